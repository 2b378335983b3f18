"""Every C++ source that is compiled, listed once.

BUILD loads this file as Starlark and CMakeLists.txt executes it as Python, so it
holds plain lists only: no load(), no functions.
"""

PLAN_SRCS = [
    "xla_ffi/plan/solver.cc",
]

# Of all that is told a problem: the extensions and the CUDA library.
PROBLEM_SRCS = [
    "xla_ffi/plan/owned_problem.cc",
]

# Of the extension and of the CUDA library.
SHARED_SRCS = [
    "xla_ffi/plan/call.cc",
]

MODULE_SRCS = [
    "xla_ffi/module.cc",
    "xla_ffi/plan/ffi.cc",
]

# The CUDA library: topoep_jax/_cuda_build.py compiles these, PROBLEM_SRCS and SHARED_SRCS with nvcc.
CUDA_SRCS = [
    "xla_ffi/plan/cuda_ffi.cc",
    "xla_ffi/plan/plan.cu",
    "xla_ffi/transfer/cuda_ffi.cc",
    "xla_ffi/transfer/transfer.cu",
    "xla_ffi/transport/c_api.cc",
    "xla_ffi/transport/group.cc",
    "xla_ffi/transport/nccl_api.cc",
]

# The extension that only tests load.
TEST_SRCS = [
    "tests/native/depth.cc",
    "tests/native/host_transfer.cc",
    "tests/native/host_transfer_ffi.cc",
    "tests/native/module.cc",
]

# Programs that leave out a barrier or weaken an order: tools/mutants.py runs them.
CC_MUTANTS = [
    "mutant_plan",
    "mutant_transfer",
]

# Needs the headers of CUDA and NCCL: tests/cuda/group_test.py builds and runs it.
CC_CUDA_TESTS = [
    "group_bringup",
]

CC_TESTS = [
    "block_team_test",
    "cost_test",
    "scratch_test",
    "solver_test",
    "team_test",
    "topoep_test",
    "transfer_schedule_test",
    "transfer_test",
]
