"""The C functions of the CUDA library that make and end groups, as typed Python functions."""

import ctypes
import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

UNIQUE_ID_BYTES = 128
"""NCCL_UNIQUE_ID_BYTES."""

_MESSAGE_BYTES = 1024


class NativeError(RuntimeError):
    """The CUDA library, NCCL or the driver refused; the message says what."""


@dataclasses.dataclass(frozen=True)
class LocalRank:
    """A rank that this process drives."""

    device: int
    """CUDA ordinal."""
    rank: int
    """Position on the expert-parallel axis."""
    clique: int
    """Index of its communicator among those of the mesh's other axes."""


class Native(Protocol):
    """What `transport.init` needs; `Library` is the real one."""

    def unique_id(self) -> bytes:
        """A new communicator's identity, for one process to hand to the others."""
        ...

    def prepare(self, group: int, local: Sequence[LocalRank], spec: "GroupSpec") -> None:
        """Allocates windows and state on every local device."""
        ...

    def connect(self, group: int, local: Sequence[LocalRank], unique_ids: Sequence[bytes]) -> int:
        """Joins the local ranks to their communicators; returns the number of neighbouring ranks that share memory."""
        ...

    def destroy(self, group: int, local: Sequence[LocalRank], everywhere: bool = True) -> None:
        """Frees what `prepare` and `connect` made.

        Every process must do it if all had connected, which `everywhere` says; else none waits for another.
        """
        ...

    def failure(self, group: int, device: int) -> tuple[int, int, int] | None:
        """Word, peer and value of a local rank's first time-out, as `struct Failure` of xla_ffi/transfer/fabric.h."""
        ...


@dataclasses.dataclass(frozen=True)
class GroupSpec:
    """What is the same on every rank of a group."""

    domain_of_rank: tuple[int, ...]
    num_workers: int
    timeout_ns: int
    sizes: tuple[int, ...]
    """Bytes of every window, then of every workspace, as `_xla_ffi.group_sizes` gives them."""


class Library:
    """The CUDA library, with NCCL loaded.

    Raises:
      ImportError: the library cannot be built or loaded.
      NativeError: there is no NCCL, or one that is too old.
    """

    def __init__(self) -> None:
        from topoep_jax import _cuda  # only here: importing topoep_jax needs neither nvcc nor a CUDA library

        self._library = _cuda.load()
        path = nccl_path()
        version = ctypes.c_int32()
        self._call("topoep_nccl_load", path.encode() if path else None, ctypes.byref(version))
        self.nccl_version = version.value
        """NCCL's version code, as 23203."""

    def unique_id(self) -> bytes:
        """See Native."""
        result = ctypes.create_string_buffer(UNIQUE_ID_BYTES)
        self._call("topoep_unique_id", result)
        return result.raw

    def prepare(self, group: int, local: Sequence[LocalRank], spec: GroupSpec) -> None:
        """See Native."""
        domains, sizes = np.array(spec.domain_of_rank, np.int32), np.array(spec.sizes, np.int64)
        self._call(
            "topoep_group_prepare",
            ctypes.c_int64(group),
            _pointer(_devices(local)),
            _pointer(np.array([one.rank for one in local], np.int32)),
            ctypes.c_int32(len(local)),
            _pointer(domains),
            ctypes.c_int32(len(domains)),
            ctypes.c_int32(spec.num_workers),
            ctypes.c_int64(spec.timeout_ns),
            _pointer(sizes),
            ctypes.c_int32(len(sizes)),
        )

    def connect(self, group: int, local: Sequence[LocalRank], unique_ids: Sequence[bytes]) -> int:
        """See Native."""
        lsa_sizes = np.zeros(len(local), np.int32)
        ids = b"".join(unique_ids[one.clique] for one in local)
        self._call(
            "topoep_group_connect",
            ctypes.c_int64(group),
            _pointer(_devices(local)),
            ctypes.c_int32(len(local)),
            ids,
            _pointer(lsa_sizes),
        )
        return int(lsa_sizes.min(initial=np.iinfo(np.int32).max))  # a process may drive none of the ranks

    def destroy(self, group: int, local: Sequence[LocalRank], everywhere: bool = True) -> None:
        """See Native."""
        function = self._library.topoep_group_destroy
        function.restype = None
        function(
            ctypes.c_int64(group), _pointer(_devices(local)), ctypes.c_int32(len(local)), ctypes.c_int32(everywhere)
        )

    def failure(self, group: int, device: int) -> tuple[int, int, int] | None:
        """See Native."""
        record = np.zeros(3, np.int64)
        failed = self._library.topoep_group_failure(ctypes.c_int64(group), ctypes.c_int32(device), _pointer(record))
        return (int(record[0]), int(record[1]), int(record[2])) if failed else None

    def _call(self, name: str, *args: object) -> None:
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        if getattr(self._library, name)(*args, message, ctypes.c_int64(_MESSAGE_BYTES)):
            raise NativeError(message.value.decode(errors="replace"))


def nccl_path() -> str | None:
    """The NCCL library of an installed wheel (nvidia-nccl-cu12 or -cu13), or None: then the loader's own search."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        library = Path(folder) / "nccl/lib/libnccl.so.2"
        if library.is_file():
            return str(library)
    return None


def _devices(local: Sequence[LocalRank]) -> np.ndarray:
    return np.array([one.device for one in local], np.int32)


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)  # keeps the array alive, which its address alone would not
