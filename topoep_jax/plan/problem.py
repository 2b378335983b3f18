"""What a planner is asked, and the dense draft on which it works."""

import dataclasses
from collections.abc import Callable

import numpy as np

from topoep_jax.plan.cost import CostModel
from topoep_jax.topology import Topology


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
"""omega (int64 [R, E]) and the problem -> a draft; `reference.finish` turns it into a `Plan`."""


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


def aligned_rows(quota: np.ndarray, block_rows: int) -> np.ndarray:
    """int64 [R]: rows of each rank with every instance rounded up to `block_rows`; `quota` is [R, R, J]."""
    rows = quota.sum(axis=0, dtype=np.int64)
    return (-(-rows // block_rows) * block_rows).sum(axis=1)


def meets_cap(quota: np.ndarray, problem: Problem) -> bool:
    """Whether no rank exceeds `cap_rows` aligned rows; always true without a cap."""
    return problem.cap_rows is None or int(aligned_rows(quota, problem.block_rows).max()) <= problem.cap_rows


def fill_slots(draft: Draft, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """`slot_expert` [R, N], ascending, and `quota` [R, R, J] of a draft; replicas without rows are left out."""
    num_ranks, mains = problem.topology.num_ranks, problem.mains_per_rank
    slot_expert = np.full((num_ranks, problem.num_slots), -1, np.int64)
    quota = np.zeros((num_ranks, num_ranks, mains + problem.num_slots), np.int64)
    main_rank = problem.main_rank()
    rows = draft.quota.sum(axis=2)  # [E, R]
    for rank in range(num_ranks):
        own = np.flatnonzero(main_rank == rank)
        replicas = np.flatnonzero(draft.holds[rank] & (main_rank != rank) & (rows[:, rank] > 0))
        slot_expert[rank, : replicas.size] = replicas
        served = np.concatenate([own, replicas])
        quota[:, rank, : served.size] = draft.quota[served, rank].T
    return slot_expert, quota
