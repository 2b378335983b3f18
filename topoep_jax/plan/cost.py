"""Predicted time of one MoE layer on one microbatch, from a plan: integers in, picoseconds out.

Rates are femtoseconds per byte, times are picoseconds, everything is a 64-bit integer, and each term is rounded once:
`ps = floor(total_bytes * fs_per_byte / 1000)`. Planners, laws, reports and native code all use this arithmetic, so that
a plan has one cost, bit for bit, everywhere.
"""

import dataclasses
from typing import Any, Protocol

import numpy as np

from topoep_jax.plan import pulls
from topoep_jax.plan.hardware import NOMINAL_SPEED, checked_speeds, is_integer, set_integers
from topoep_jax.plan.hardware import Hardware as Hardware
from topoep_jax.plan.links import Reduce, busiest_direction, everything, moved_ps
from topoep_jax.topology import Topology

MAX_ROWS = 2**31 - 1
"""Largest total demand of a layer: every count of rows fits int32."""
MAX_REPLICAS = 2**16
"""Largest R x N: bounds the bytes of all pulls, so that no sum leaves 64 bits."""
MAX_INSTANCES = 2 * MAX_REPLICAS
"""Largest J = E/R + N of a rank, where instances cost time or are padded."""
_INT64_MAX = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class CostModel:
    """What a planner needs to know about a model on some hardware.

    A rank computes for `max(instance_ps * active instances, row_ps * padded rows) * 1000 // speed` picoseconds: few
    rows cost the reading of parameters, many cost arithmetic (max-affine, as in makespan-aware dispatchers).
    Each optional term is off by default, and then changes nothing.

    Attributes:
      expert_bytes: parameters of one expert (W).
      token_bytes: one routed row (S); it crosses a link twice, at dispatch and at combine.
      row_ps: picoseconds of expert compute per row, forward and backward; 0 for a model too small to matter.
      inter_fs_per_byte: femtoseconds per byte between domains, per direction and GPU.
      intra_fs_per_byte: the same inside a domain.
      instance_ps: picoseconds that an active instance (one with rows) takes at least.
      tile_rows: the rows of an instance are padded to a multiple of this; 0 for none.
      rank_speed: speed of each rank in permille of nominal, or None: all are nominal.
      pulls: how a replica's parameters travel: "direct" (from the main's rank), "relayed" (once across per domain),
        "striped" (slices through every NIC of the main's domain), or "best" (the quickest of these); see `plan.pulls`.

    Raises:
      ValueError: a value is out of range, or is so large that a 64-bit sum could overflow with 2^31-1 rows, 2^16
        replicas or 2^17 instances on a rank.
    """

    expert_bytes: int
    token_bytes: int
    row_ps: int
    inter_fs_per_byte: int
    intra_fs_per_byte: int
    instance_ps: int = 0
    tile_rows: int = 0
    rank_speed: tuple[int, ...] | None = None
    pulls: str = "direct"

    def __post_init__(self) -> None:
        set_integers(
            self,
            ("row_ps", "inter_fs_per_byte", "intra_fs_per_byte", "instance_ps", "tile_rows"),
            minimum=0,
        )
        set_integers(self, ("expert_bytes", "token_bytes"), minimum=1)
        object.__setattr__(self, "rank_speed", checked_speeds(self.rank_speed))
        if self.pulls not in pulls.MODES:
            raise ValueError(f"pulls={self.pulls!r} is unknown: choose one of {list(pulls.MODES)}")
        self._check_overflow()

    def _check_overflow(self) -> None:
        slowest_link = max(self.inter_fs_per_byte, self.intra_fs_per_byte, 1)
        slowest_rank = min(self.rank_speed or (NOMINAL_SPEED,))
        copies_per_replica = 1 if self.pulls == "direct" else 2  # a slice may pass through one rank on its way
        padded_rows = MAX_ROWS + MAX_INSTANCES * max(self.tile_rows - 1, 0)
        limits = {
            "tile_rows": MAX_ROWS,
            "row_ps": _compute_limit(padded_rows, slowest_rank),
            "instance_ps": _compute_limit(MAX_INSTANCES, slowest_rank),
            "token_bytes": _INT64_MAX // (2 * MAX_ROWS * slowest_link),
            "expert_bytes": _INT64_MAX // (copies_per_replica * MAX_REPLICAS * slowest_link),
        }
        for name, limit in limits.items():
            if getattr(self, name) > limit:
                raise ValueError(
                    f"{name}={getattr(self, name)} is above {limit}, where 64-bit picoseconds could overflow (the"
                    f" slowest link takes {slowest_link} fs per byte, the slowest rank runs at {slowest_rank} permille,"
                    f" and tiles have {self.tile_rows} rows): check the units"
                )

    def check_ranks(self, num_ranks: int) -> None:
        """Raises ValueError if there is a speed for another number of ranks."""
        if self.rank_speed is not None and len(self.rank_speed) != num_ranks:
            raise ValueError(
                f"rank_speed has {len(self.rank_speed)} entries, but the topology has {num_ranks} ranks: give one each"
            )

    @classmethod
    def from_model(
        cls,
        hidden: int,
        ffn: int,
        hardware: Hardware,
        *,
        dtype_bytes: int = 2,
        instance_ps: int = 0,
        tile_rows: int = 0,
        pulls: str = "direct",
    ) -> "CostModel":
        """Sizes of a gated expert: three [hidden, ffn] matrices; 18 x hidden x ffn flop per row, forward and backward.

        Raises:
          ValueError: a size is not a positive integer, or overflows (see the class).
        """
        for name, value in (("hidden", hidden), ("ffn", ffn), ("dtype_bytes", dtype_bytes)):
            if not is_integer(value) or value < 1:
                raise ValueError(f"{name}={value!r} must be an integer of at least 1")
        hidden, ffn, dtype_bytes = int(hidden), int(ffn), int(dtype_bytes)
        return cls(
            expert_bytes=3 * hidden * ffn * dtype_bytes,
            token_bytes=hidden * dtype_bytes,
            row_ps=18 * hidden * ffn * 1000 // hardware.gflops,
            inter_fs_per_byte=hardware.inter_fs_per_byte,
            intra_fs_per_byte=hardware.intra_fs_per_byte,
            instance_ps=instance_ps,
            tile_rows=tile_rows,
            rank_speed=hardware.rank_speed,
            pulls=pulls,
        )


class Objective(Protocol):
    """Picoseconds of a plan."""

    def __call__(self, slot_expert: np.ndarray, quota: np.ndarray, topology: Topology, cost: CostModel) -> int:
        """`slot_expert` is [R, N], `quota` [R, R, J]."""


def bottleneck_ps(slot_expert: np.ndarray, quota: np.ndarray, topology: Topology, cost: CostModel) -> int:
    """Objective (b): slowest rank's compute + the busiest rank's traffic of each link class, in or out, rows and pulls.

    Pulls repeated in the backward pass and gradient pushes count as hidden.
    """
    return _predict_ps(slot_expert, quota, topology, cost, busiest_direction)


def eq8_ps(slot_expert: np.ndarray, quota: np.ndarray, topology: Topology, cost: CostModel) -> int:
    """Objective (a), Eq. 8 of the paper: slowest rank's compute + the traffic of all ranks together."""
    return _predict_ps(slot_expert, quota, topology, cost, everything)


OBJECTIVES: dict[str, Objective] = {"bottleneck": bottleneck_ps, "eq8": eq8_ps}


def rank_compute_ps(rows: np.ndarray, cost: CostModel) -> np.ndarray:
    """Picoseconds that each rank computes, int64 [R]; `rows` is int [R, J], the rows of each of its instances."""
    rows = rows.astype(np.int64)
    padded = -(-rows // cost.tile_rows) * cost.tile_rows if cost.tile_rows else rows
    ps = np.maximum(cost.instance_ps * (rows > 0).sum(axis=1), cost.row_ps * padded.sum(axis=1))
    if cost.rank_speed is None:
        return ps
    speed = np.array(cost.rank_speed)
    # floor(ps * 1000 / speed) without leaving 64 bits.
    return ps // speed * NOMINAL_SPEED + ps % speed * NOMINAL_SPEED // speed


def row_traffic(quota: np.ndarray) -> np.ndarray:
    """Rows that each rank sends to each other at dispatch, int64 [R, R]; what stays on a rank is on the diagonal."""
    return quota.sum(axis=2, dtype=np.int64)


def picoseconds(predicted_ps: Any) -> np.ndarray:
    """Joins the high and low words of `Plan.predicted_ps` (int32 [..., 2]) into int64 [...]."""
    words = np.asarray(predicted_ps).astype(np.int64)
    return (words[..., 0] << 32) | (words[..., 1] & 0xFFFFFFFF)


def split_picoseconds(ps: int) -> np.ndarray:
    """int32 [2], the high and low word of a 64-bit number; the inverse of `picoseconds`."""
    return np.array([ps >> 32, ps & 0xFFFFFFFF], np.uint64).astype(np.uint32).view(np.int32)


def _predict_ps(
    slot_expert: np.ndarray,
    quota: np.ndarray,
    topology: Topology,
    cost: CostModel,
    reduce: Reduce,
) -> int:
    cost.check_ranks(topology.num_ranks)
    rows = row_traffic(quota)
    copies = pulls.schedule(slot_expert, quota.shape[2] - slot_expert.shape[1], topology, cost)
    rates = (cost.inter_fs_per_byte, cost.intra_fs_per_byte)
    return (
        int(rank_compute_ps(quota.sum(axis=0, dtype=np.int64), cost).max())
        + moved_ps(2 * cost.token_bytes * rows, topology, *rates, reduce)
        + moved_ps(pulls.moved_bytes(copies, topology, cost), topology, *rates, reduce)
    )


def _compute_limit(count: int, slowest_rank: int) -> int:
    """The most picoseconds of one unit of compute, so that `count` units take half of 64 bits on the slowest rank."""
    limit = _INT64_MAX // (2 * count)
    return limit if slowest_rank >= NOMINAL_SPEED else limit // NOMINAL_SPEED * slowest_rank
