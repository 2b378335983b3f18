"""The programs that tools/gpu_check.sh builds compile with nvcc, free of warnings."""

import re
import subprocess
from pathlib import Path

import pytest

from tools.gpu_check.building import PROGRAMS, program_commands
from topoep_jax import _cuda_build


@pytest.fixture
def toolchain(cuda_library: object) -> _cuda_build.Toolchain:
    return _cuda_build.find(["sm_90"])


@pytest.mark.parametrize("source", sorted(path.name for path in PROGRAMS.glob("*.cu")))
def test_a_program_compiles(toolchain: _cuda_build.Toolchain, source: str, tmp_path: Path) -> None:
    commands = program_commands(toolchain.nvcc, toolchain.nccl_include, ["sm_90"], tmp_path)
    [command] = [words for words in commands.values() if PROGRAMS / source in words]
    flags = [word for word in command if re.match(r"-(std|O3|I|gencode)", str(word))]
    include = ["-isystem", toolchain.nccl_include]
    compile_it = [toolchain.nvcc, "-c", *flags, *include, "-Werror=all-warnings", "-Xcompiler=-Wall,-Wextra"]
    # NCCL's initializer macros leave fields out.
    compile_it += ["-Xcompiler=-Wno-missing-field-initializers", PROGRAMS / source, "-o", tmp_path / "object"]
    done = subprocess.run(compile_it, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
