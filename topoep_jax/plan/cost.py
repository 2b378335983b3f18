"""Predicted time of one MoE layer on one microbatch, from a plan: integers in, picoseconds out.

Rates are femtoseconds per byte, times are picoseconds, everything is a 64-bit integer, and each term is rounded once:
`ps = floor(total_bytes * fs_per_byte / 1000)`. Planners, laws, reports and native code all use this arithmetic, so that
a plan has one cost, bit for bit, everywhere.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from topoep_jax.topology import Topology

MAX_ROWS = 2**31 - 1
"""Largest total demand of a layer: every count of rows fits int32."""
MAX_REPLICAS = 2**16
"""Largest R x N: bounds the bytes of all pulls, so that no sum leaves 64 bits."""
_INT64_MAX = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Sustained rates of one GPU and its links, as integers.

    Attributes:
      inter_fs_per_byte: femtoseconds per byte between domains, per direction and GPU (50 GB/s = 20000).
      intra_fs_per_byte: the same inside a domain (200 GB/s = 5000).
      gflops: sustained grouped-GEMM rate in GFLOP/s (400 TFLOP/s = 400000).

    Raises:
      ValueError: a value is not an integer, or not positive.
    """

    inter_fs_per_byte: int
    intra_fs_per_byte: int
    gflops: int

    def __post_init__(self) -> None:
        _set_integers(self, minimum=1)

    @classmethod
    def h800(cls) -> "Hardware":
        """One 400 Gb/s NIC per GPU, NVLink at 200 GB/s per direction, 400 TFLOP/s sustained in bf16."""
        return cls(inter_fs_per_byte=20_000, intra_fs_per_byte=5_000, gflops=400_000)

    @classmethod
    def h100(cls) -> "Hardware":
        """As `h800`, with the full NVLink of the SXM board: 450 GB/s per direction."""
        return cls(inter_fs_per_byte=20_000, intra_fs_per_byte=2_222, gflops=400_000)


@dataclasses.dataclass(frozen=True)
class CostModel:
    """What a planner needs to know about a model on some hardware.

    Attributes:
      expert_bytes: parameters of one expert (W).
      token_bytes: one routed row (S); it crosses a link twice, at dispatch and at combine.
      row_ps: picoseconds of expert compute per row, forward and backward; 0 for a model too small to matter.
      inter_fs_per_byte: femtoseconds per byte between domains, per direction and GPU.
      intra_fs_per_byte: the same inside a domain.

    Raises:
      ValueError: a value is not an integer, is out of range, or is so large that a 64-bit sum could overflow with
        2^31-1 rows or 2^16 replicas.
    """

    expert_bytes: int
    token_bytes: int
    row_ps: int
    inter_fs_per_byte: int
    intra_fs_per_byte: int

    def __post_init__(self) -> None:
        _set_integers(self, minimum=0)
        for name in ("expert_bytes", "token_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1 byte: give the real size")
        slowest = max(self.inter_fs_per_byte, self.intra_fs_per_byte, 1)
        limits = {
            "row_ps": _INT64_MAX // (2 * MAX_ROWS),
            "token_bytes": _INT64_MAX // (2 * MAX_ROWS * slowest),
            "expert_bytes": _INT64_MAX // (MAX_REPLICAS * slowest),
        }
        for name, limit in limits.items():
            if getattr(self, name) > limit:
                raise ValueError(
                    f"{name}={getattr(self, name)} is above {limit}, where 64-bit picoseconds could overflow (the"
                    f" slowest link takes {slowest} fs per byte): check the units"
                )

    @classmethod
    def from_model(cls, hidden: int, ffn: int, hardware: Hardware, *, dtype_bytes: int = 2) -> "CostModel":
        """Sizes of a gated expert: three [hidden, ffn] matrices; 18 x hidden x ffn flop per row, forward and backward.

        Raises:
          ValueError: a size is not a positive integer, or overflows (see the class).
        """
        for name, value in (("hidden", hidden), ("ffn", ffn), ("dtype_bytes", dtype_bytes)):
            if not _is_integer(value) or value < 1:
                raise ValueError(f"{name}={value!r} must be an integer of at least 1")
        hidden, ffn, dtype_bytes = int(hidden), int(ffn), int(dtype_bytes)
        return cls(
            expert_bytes=3 * hidden * ffn * dtype_bytes,
            token_bytes=hidden * dtype_bytes,
            row_ps=18 * hidden * ffn * 1000 // hardware.gflops,
            inter_fs_per_byte=hardware.inter_fs_per_byte,
            intra_fs_per_byte=hardware.intra_fs_per_byte,
        )


class Traffic(NamedTuple):
    """What a plan moves, as int64 [R, R] counts from one rank to another; nothing on the diagonal, it costs nothing."""

    inter_rows: np.ndarray
    """Rows from source rank to executing rank, between domains."""
    intra_rows: np.ndarray
    """The same inside a domain."""
    inter_pulls: np.ndarray
    """Replicas from main rank to holding rank, between domains."""
    intra_pulls: np.ndarray
    """The same inside a domain."""


def traffic(slot_expert: np.ndarray, quota: np.ndarray, topology: Topology) -> Traffic:
    """Counts the rows and pulls of a plan (`slot_expert` [R, N], `quota` [R, R, J]), split by class of link."""
    num_ranks, num_slots = slot_expert.shape
    mains_per_rank = quota.shape[2] - num_slots
    rows = quota.sum(axis=2, dtype=np.int64)
    pulls = np.zeros((num_ranks, num_ranks), np.int64)
    rank, slot = np.nonzero(slot_expert >= 0)
    np.add.at(pulls, (slot_expert[rank, slot] // mains_per_rank, rank), 1)
    inter = topology.crosses_domains()
    intra = ~inter & ~np.eye(num_ranks, dtype=bool)
    return Traffic(rows * inter, rows * intra, pulls * inter, pulls * intra)


def bottleneck_ps(slot_expert: np.ndarray, quota: np.ndarray, topology: Topology, cost: CostModel) -> int:
    """Objective (b): slowest rank's compute + the busiest rank's traffic of each link class, in or out, rows and pulls.

    A pull leaves from the main's rank. Pulls repeated in the backward pass and gradient pushes count as hidden.
    """
    return _predict_ps(slot_expert, quota, topology, cost, busiest_direction)


def eq8_ps(slot_expert: np.ndarray, quota: np.ndarray, topology: Topology, cost: CostModel) -> int:
    """Objective (a), Eq. 8 of the paper: slowest rank's compute + the traffic of all ranks together."""
    return _predict_ps(slot_expert, quota, topology, cost, lambda counts: int(counts.sum()))


Objective = Callable[[np.ndarray, np.ndarray, Topology, CostModel], int]

OBJECTIVES: dict[str, Objective] = {"bottleneck": bottleneck_ps, "eq8": eq8_ps}


def busiest_direction(counts: np.ndarray) -> int:
    """The largest sum that one rank sends or receives; `counts` is [R, R], from one rank to another."""
    return int(max(counts.sum(axis=0).max(), counts.sum(axis=1).max()))


def link_ps(total_bytes: int, fs_per_byte: int) -> int:
    """Picoseconds to move `total_bytes`: the one rounding rule."""
    return total_bytes * fs_per_byte // 1000


def picoseconds(predicted_ps: Any) -> np.ndarray:
    """Joins the high and low words of `Plan.predicted_ps` (int32 [..., 2]) into int64 [...]."""
    words = np.asarray(predicted_ps).astype(np.int64)
    return (words[..., 0] << 32) | (words[..., 1] & 0xFFFFFFFF)


def split_picoseconds(ps: int) -> np.ndarray:
    """int32 [2], the high and low word of a 64-bit number; the inverse of `picoseconds`."""
    return np.array([ps >> 32, ps & 0xFFFFFFFF], np.uint64).astype(np.uint32).view(np.int32)


def _predict_ps(
    slot_expert: np.ndarray, quota: np.ndarray, topology: Topology, cost: CostModel, reduce: Callable[[np.ndarray], int]
) -> int:
    moved = traffic(slot_expert, quota, topology)
    compute = cost.row_ps * int(quota.sum(axis=(0, 2), dtype=np.int64).max())
    row, pull = 2 * cost.token_bytes, cost.expert_bytes
    return (
        compute
        + link_ps(row * reduce(moved.inter_rows), cost.inter_fs_per_byte)
        + link_ps(row * reduce(moved.intra_rows), cost.intra_fs_per_byte)
        + link_ps(pull * reduce(moved.inter_pulls), cost.inter_fs_per_byte)
        + link_ps(pull * reduce(moved.intra_pulls), cost.intra_fs_per_byte)
    )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _set_integers(instance: Any, minimum: int) -> None:
    """Checks every field of a frozen dataclass and turns NumPy integers into Python's, which do not overflow."""
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if not _is_integer(value) or value < minimum:
            raise ValueError(f"{field.name}={value!r} must be an integer of at least {minimum}: round it")
        object.__setattr__(instance, field.name, int(value))
