"""The transport's C functions in the real CUDA library, on a machine that may have no GPU: how NCCL is found."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from topoep_jax.transport.native import nccl_path

LOAD = """
import ctypes, sys
library, nccl, *first = sys.argv[1:]
kept = [ctypes.CDLL(path) for path in first]
version, message = ctypes.c_int32(), ctypes.create_string_buffer(1024)
failed = ctypes.CDLL(library).topoep_nccl_load(nccl.encode(), ctypes.byref(version), message, ctypes.c_int64(1024))
print(message.value.decode() if failed else version.value)
"""


@pytest.fixture
def load(cuda_library: ctypes.CDLL):
    """What the library says of an NCCL; it keeps the first one, so every question has a process of its own."""

    def ask(nccl: object, *loaded_before: object) -> str:
        command = [sys.executable, "-c", LOAD, cuda_library._name, str(nccl), *map(str, loaded_before)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    return ask


@pytest.fixture
def old_nccl(tmp_path: Path) -> Path:
    """A library that says it is NCCL 2.27.1, and has none of the functions that later versions added."""
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    source, library = tmp_path / "old.c", tmp_path / "libnccl.so.2"
    source.write_text("int ncclGetVersion(int* version) { *version = 22701; return 0; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", library, source], check=True)
    return library


def test_an_old_nccl_is_refused(load, old_nccl):
    said = load(old_nccl)
    assert said.startswith("the loaded NCCL is 2.27.1 and lacks nccl")
    assert said.endswith("install that version or newer")


def test_what_is_loaded_already_is_shared(load, old_nccl, tmp_path):
    assert "NCCL is 2.27.1" in load(tmp_path / "none.so", old_nccl), "the given path is not even tried"


def test_no_nccl_is_said_with_what_was_tried(load, tmp_path):
    said = load(tmp_path / "none.so")
    if said.isdigit():
        pytest.skip("the loader finds an NCCL of its own")
    assert said.startswith(f"no NCCL library ({tmp_path / 'none.so'}: cannot open shared object file")
    assert "install nvidia-nccl-cu12 or nvidia-nccl-cu13 of at least 2." in said


def test_the_wheels_nccl_loads_without_a_driver(load):
    path = nccl_path() or pytest.skip("no NCCL wheel")
    assert int(load(path)) >= 23203
