"""Every C++ source, listed once.

BUILD loads this file as Starlark and CMakeLists.txt executes it as Python, so it
holds plain lists only: no load(), no functions.
"""

PLAN_HDRS = [
    "xla_ffi/plan/arena.h",
    "xla_ffi/plan/cost.h",
    "xla_ffi/plan/domains.h",
    "xla_ffi/plan/finish.h",
    "xla_ffi/plan/host_workspace.h",
    "xla_ffi/plan/links.h",
    "xla_ffi/plan/math.h",
    "xla_ffi/plan/owned_problem.h",
    "xla_ffi/plan/paper.h",
    "xla_ffi/plan/problem.h",
    "xla_ffi/plan/pulls.h",
    "xla_ffi/plan/scratch.h",
    "xla_ffi/plan/solve.h",
    "xla_ffi/plan/solver.h",
    "xla_ffi/plan/topoep/apportion.h",
    "xla_ffi/plan/topoep/candidate.h",
    "xla_ffi/plan/topoep/context.h",
    "xla_ffi/plan/topoep/effort.h",
    "xla_ffi/plan/topoep/fill.h",
    "xla_ffi/plan/topoep/fill_case.h",
    "xla_ffi/plan/topoep/greedy.h",
    "xla_ffi/plan/topoep/improve.h",
    "xla_ffi/plan/topoep/measure.h",
    "xla_ffi/plan/topoep/refine.h",
    "xla_ffi/plan/topoep/search.h",
    "xla_ffi/plan/topoep/select.h",
    "xla_ffi/plan/topoep/split.h",
    "xla_ffi/plan/topoep/spread.h",
    "xla_ffi/plan/topoep/state.h",
    "xla_ffi/team/block_team.cuh",
    "xla_ffi/team/team.h",
    "xla_ffi/team/thread_team.h",
]

PLAN_SRCS = [
    "xla_ffi/plan/solver.cc",
]

# Bodies of the transfer kernels.
TRANSFER_HDRS = [
    "xla_ffi/transfer/fabric.h",
    "xla_ffi/transfer/placement.h",
    "xla_ffi/transfer/pull.h",
    "xla_ffi/transfer/pull_schedule.h",
    "xla_ffi/transfer/push.h",
    "xla_ffi/transfer/push_schedule.h",
    "xla_ffi/transfer/windows.h",
]

# Of all that is told a problem: the extensions and the CUDA library.
PROBLEM_SRCS = [
    "xla_ffi/plan/owned_problem.cc",
]

# Of the extension and of the CUDA library.
SHARED_SRCS = [
    "xla_ffi/plan/call.cc",
    "xla_ffi/plan/call.h",
    "xla_ffi/plan/plan_cuda.h",
    "xla_ffi/transport/sizes.h",
]

MODULE_SRCS = [
    "xla_ffi/module.cc",
    "xla_ffi/plan/ffi.cc",
]

# The CUDA library: topoep_jax/_cuda_build.py compiles these and SHARED_SRCS with nvcc.
CUDA_HDRS = [
    "xla_ffi/transfer/bulk_ring.cuh",
    "xla_ffi/transfer/nccl_fabric.cuh",
    "xla_ffi/transfer/transfer_cuda.h",
    "xla_ffi/transport/device_group.h",
    "xla_ffi/transport/group.h",
    "xla_ffi/transport/nccl_api.h",
]

CUDA_SRCS = [
    "xla_ffi/plan/cuda_ffi.cc",
    "xla_ffi/plan/plan.cu",
    "xla_ffi/transfer/cuda_ffi.cc",
    "xla_ffi/transfer/transfer.cu",
    "xla_ffi/transport/c_api.cc",
    "xla_ffi/transport/group.cc",
    "xla_ffi/transport/nccl_api.cc",
]

# The extension that only tests load, and what it shares with the programs of tests/cc.
TEST_HDRS = [
    "tests/native/counting_team.h",
    "tests/native/depth.h",
    "tests/native/host_fabric.h",
    "tests/native/host_transfer.h",
]

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
