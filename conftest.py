"""One process, 32 emulated CPU devices, a strict world, and nothing that outlives a test: of tests and doctests.

Tests take submeshes of 1, 2, 8 or 32 devices. The environment is set before JAX is imported, since it reads it once.
"""

import ctypes
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator

from tests.support.xla_flags import xla_flags

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {xla_flags(num_devices=32)}".strip()

import flax.nnx  # noqa: F401  (changes `random` and `sys` when it is first imported, in whichever test that is)
import hypothesis
import jax
import pytest

from tests.support import leaks

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Programs without the stack of each operation: nobody reads it, and writing it is a sixth of a compilation.
jax.config.update("jax_traceback_in_locations_limit", 0)

# No compilation cache, though compiling is most of the time: on CPU a program with collectives that JAX's persistent
# cache returns may run two of them at once and deadlock (jax 0.10.2: the default training step, at its second call).
jax.config.update("jax_enable_compilation_cache", False)

# The same examples on every run and machine; a slow machine is no failure.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-cuda", action="store_true", help="where a CUDA package is missing, fail")
    parser.addoption("--transformers-python", help="an interpreter that has torch and transformers (tests/parity)")


@pytest.fixture(autouse=True, scope="session")
def own_temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is made without a folder lands in one of this process, which `tests.support.leaks` can look at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(autouse=True, scope="module")
def nothing_outlives_a_file() -> Iterator[None]:
    """As below, of what fixtures of a file's scope make."""
    yield from leaks.of_a_file()


@pytest.fixture(autouse=True)
def nothing_outlives_a_test() -> Iterator[None]:
    """Fails a test or doctest that leaves something behind, by its name. Is set up first, so it looks last."""
    yield from leaks.of_a_test()


@pytest.fixture(scope="module")
def standard_promotion() -> Iterator[None]:
    """JAX's usual promotion of types, for files whose tests train: Optax is not written for the strict one."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="session")
def cuda_library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """libtopoep_cuda.so, built if need be, with its targets registered."""
    from topoep_jax import _cuda

    try:
        return _cuda.load()
    except ImportError as error:
        return give_up(request, error)


@pytest.fixture(scope="session")
def aot(request: pytest.FixtureRequest, cuda_library: ctypes.CDLL):
    """Compiles programs for GPUs ahead of time: a tests.support.aot.Compiler."""
    from tests.support.aot import Compiler

    try:
        return Compiler()
    except ImportError as error:
        return give_up(request, error)


@pytest.fixture(scope="session")
def transformers_python(request: pytest.FixtureRequest) -> str:
    """An interpreter that has torch and transformers: the one that is named, else this one."""
    if named := request.config.getoption("--transformers-python"):
        return named
    if not all(map(importlib.util.find_spec, ("torch", "transformers"))):
        pytest.skip("torch and transformers are not installed, and --transformers-python names no other interpreter")
    return sys.executable


def give_up(request: pytest.FixtureRequest, error: ImportError):
    if request.config.getoption("--require-cuda"):
        pytest.fail(str(error))
    pytest.skip(str(error))
