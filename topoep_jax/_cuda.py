"""Loads the CUDA library, building it where that has not been done yet, and registers its XLA FFI targets once."""

import ctypes
import functools

import jax

from topoep_jax import _cuda_build

TARGETS = {"topoep_plan": "TopoepPlanCuda", "topoep_pull": "TopoepPullCuda", "topoep_push": "TopoepPushCuda"}
"""Handler in the library of each FFI target on platform CUDA."""


def load() -> ctypes.CDLL:
    """The CUDA library with every target of `TARGETS` registered; the first call may compile for a minute.

    Neither a GPU nor a driver is needed: a program with these targets compiles ahead of time anywhere.

    Raises:
      ImportError: if the library cannot be built or does not load; the message says what to do. That is final for this
        process: every trace of a planner asks, and none should wait for another attempt.
    """
    loaded = _load()
    if isinstance(loaded, str):
        raise ImportError(loaded)
    return loaded


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    try:
        library = ctypes.CDLL(str(_cuda_build.build(_cuda_build.find()) / _cuda_build.LIBRARY))
    except (_cuda_build.BuildError, OSError) as error:
        return f"topoep_jax's CUDA library: {error}\n(this process will not try again: start it anew after a change)"
    for name, symbol in TARGETS.items():
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, symbol)), platform="CUDA")
    return library
