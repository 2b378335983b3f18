"""The CUDA library as nvcc built it: what it needs to load, what it shows, and which instructions its kernels use."""

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.structure_test import ROOT, source_lists
from topoep_jax import _cuda


@pytest.fixture
def library(cuda_library: ctypes.CDLL) -> Path:
    return Path(cuda_library._name)


def test_it_needs_no_library_of_cuda_to_load(library: Path) -> None:
    listing = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", listing))
    assert "libc.so.6" in needed
    assert not [name for name in needed if re.match("lib(nccl|cuda|cudart|nv)", name)], needed
    # In a process of its own, with no search path: there is nothing that could have been loaded before.
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print(open('/proc/self/maps').read())"
    command = [sys.executable, "-I", "-c", code, str(library)]
    maps = subprocess.run(command, capture_output=True, text=True, check=True, env={}).stdout
    assert "libtopoep_cuda" in maps and not re.search(r"/lib(nccl|cuda|cudart)\.", maps)


def test_it_shows_its_handlers_and_functions_alone(library: Path) -> None:
    listing = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    shown = {line.split()[-1] for line in listing.splitlines()}
    assert shown and not [name for name in shown if not re.match("Topoep|topoep_", name)]
    sources = [ROOT / source for source in source_lists()["CUDA_SRCS"]]
    handlers = [
        name
        for source in sources
        for name in re.findall(r"XLA_FFI_DEFINE_HANDLER(?:_SYMBOL)?\(\s*(\w+)", source.read_text())
    ]
    assert sorted(handlers) == sorted(_cuda.TARGETS.values())
    assert set(handlers) <= shown


def test_transfers_are_bulk_copies_that_complete_on_barriers(library: Path) -> None:
    [ptx] = library.parent.glob("transfer.transfer.cu.*.ptx")
    text = ptx.read_text()
    assert re.search(r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes", text)
    assert re.search(r"cp\.async\.bulk\.global\.shared::cta\.bulk_group", text)
    assert re.search(r"mbarrier\.(arrive\.expect_tx|expect_tx)", text)
    assert re.search(r"mbarrier\.try_wait", text)
    assert "fence.proxy.async" in text
