"""How a group connects and ends, on a machine that may have no GPU: xla_ffi/transport/group.cc over stand-ins."""

import subprocess
from pathlib import Path

from topoep_jax import _cuda_build

ROOT = Path(__file__).parent.parent.parent


def test_a_rank_that_fails_aborts_and_nobody_waits_for_it(cuda_library: object, tmp_path: Path) -> None:
    toolchain = _cuda_build.find(["sm_90"])
    program = tmp_path / "group_bringup"
    sources = ["tests/cc/group_bringup.cc", "xla_ffi/transport/group.cc", "xla_ffi/transport/nccl_api.cc"]
    build = [toolchain.nvcc, "-std=c++17", "-O1", f"-I{ROOT}", "-isystem", toolchain.nccl_include, "-cudart=none"]
    # NCCL's initializer macros leave fields out.
    build += ["-Werror=all-warnings", "-Xcompiler=-Wall,-Wextra,-Wno-missing-field-initializers,-Werror"]
    done = subprocess.run(
        [*build, "-o", program, *(ROOT / source for source in sources)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    played = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert played.returncode == 0, played.stdout + played.stderr
