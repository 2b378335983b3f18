"""What a planner is asked, and the dense draft on which it works; xla_ffi/plan/problem.h is the same in C++."""

import dataclasses
from collections.abc import Callable

import numpy as np

from topoep_jax._integers import is_integer
from topoep_jax.plan.hardware import NOMINAL_SPEED, Hardware, checked_speeds, set_integers
from topoep_jax.topology import Topology

MAX_ROWS = 2**31 - 1
"""Largest total demand of a layer: every count of rows fits int32."""
MAX_REPLICAS = 2**16
"""Largest R x N: bounds the bytes of all pulls, so that no sum leaves 64 bits."""
MAX_INSTANCES = 2 * MAX_REPLICAS
"""Largest J = E/R + N of a rank, where instances cost time or are padded."""
PULLS = ("direct", "relayed", "striped", "best")
"""How a replica's parameters may travel; see `pulls`."""
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
        if self.pulls not in PULLS:
            raise ValueError(f"pulls={self.pulls!r} is unknown: choose one of {list(PULLS)}")
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
            if not is_integer(value, 1):
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


def _compute_limit(count: int, slowest_rank: int) -> int:
    """The most picoseconds of one unit of compute, so that `count` units take half of 64 bits on the slowest rank."""
    limit = _INT64_MAX // (2 * count)
    return limit if slowest_rank >= NOMINAL_SPEED else limit // NOMINAL_SPEED * slowest_rank


@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything a planner is told besides the demand; static under jit, and valid (`api.solve_plan` checks it).

    Attributes:
      topology: the domain of each rank.
      cost: sizes and rates.
      num_experts: E, a multiple of R.
      num_slots: N, replica slots per rank.
      cap_rows: bound on a rank's aligned rows, or None.
      block_rows: the rows of an active instance are rounded up to a multiple of this.
      objective: key of `cost.OBJECTIVES`.
      effort: key of `topoep.EFFORTS`; only that planner reads it.
    """

    topology: Topology
    cost: CostModel
    num_experts: int
    num_slots: int
    cap_rows: int | None
    block_rows: int
    objective: str
    effort: str = "default"

    @property
    def mains_per_rank(self) -> int:
        """E/R."""
        return self.num_experts // self.topology.num_ranks

    def main_rank(self) -> np.ndarray:
        """The rank that owns each expert, int [E]."""
        return np.arange(self.num_experts) // self.mains_per_rank


@dataclasses.dataclass
class Draft:
    """A plan under construction.

    Attributes:
      holds: bool [R, E], whether a rank has an instance of an expert, its mains included.
      quota: int64 [E, R, R], rows of expert e executed by rank r for source rank s, indexed [e, r, s].
    """

    holds: np.ndarray
    quota: np.ndarray


Planner = Callable[[np.ndarray, Problem], Draft]
"""omega (int64 [R, E]) and the problem -> a draft; `finish.finish` turns it into a `Plan`."""


def none(omega: np.ndarray, problem: Problem) -> Draft:
    """The empty plan: every expert runs on its main rank alone."""
    num_ranks = problem.topology.num_ranks
    experts = np.arange(problem.num_experts)
    main = problem.main_rank()
    holds = np.zeros((num_ranks, problem.num_experts), bool)
    holds[main, experts] = True
    quota = np.zeros((problem.num_experts, num_ranks, num_ranks), np.int64)
    quota[experts, main] = omega.T
    return Draft(holds, quota)
