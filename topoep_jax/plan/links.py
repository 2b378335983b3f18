"""Bytes between ranks by class of link, and their time; xla_ffi/plan/links.h is the same in C++."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from topoep_jax.topology import Topology

Bytes = TypeVar("Bytes", int, np.ndarray)


def link_ps(total_bytes: Bytes, fs_per_byte: int) -> Bytes:
    """Picoseconds to move `total_bytes`, a number or int64 [...]: the one rounding rule."""
    return total_bytes * fs_per_byte // 1000


def busiest_direction(moved: np.ndarray) -> int:
    """The largest sum that one rank sends or receives; `moved` is [R, R], from one rank to another."""
    return int(max(moved.sum(axis=0).max(), moved.sum(axis=1).max()))


def everything(moved: np.ndarray) -> int:
    """The sum over all pairs of ranks; `moved` is [R, R]."""
    return int(moved.sum())


Reduce = Callable[[np.ndarray], int]
"""How an objective counts traffic: `busiest_direction` or `everything`."""


def moved_ps(
    moved_bytes: np.ndarray, topology: Topology, inter_fs_per_byte: int, intra_fs_per_byte: int, reduce: Reduce
) -> int:
    """Picoseconds of int64 [R, R] bytes from one rank to another: both classes of link, each rounded once.

    What stays on a rank (the diagonal) costs nothing.
    """
    inter = topology.crosses_domains()
    intra = ~inter & ~np.eye(topology.num_ranks, dtype=bool)
    return link_ps(reduce(moved_bytes * inter), inter_fs_per_byte) + link_ps(
        reduce(moved_bytes * intra), intra_fs_per_byte
    )
