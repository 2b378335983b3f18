"""What planner `topoep` knows about a problem before it builds candidates."""

import dataclasses

import numpy as np

from topoep_jax.plan.cost import predict_ps
from topoep_jax.plan.hardware import NOMINAL_SPEED
from topoep_jax.plan.problem import Problem
from topoep_jax.plan.types import unpriced

NOWHERE = -1
"""No rank, no expert, no instance."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """One problem and its demand, with what all candidates share.

    Attributes:
      omega: int64 [R, E], demand.
      problem: the question.
      domain: int64 [R], domain of each rank.
      members: int64 [M, G], ranks of each domain, ascending, then `NOWHERE`.
      speed: int64 [R], permille of nominal.
      main_rank: int64 [E].
      home: int64 [E], domain of the main rank.
      demand: int64 [M, E], rows of each domain for each expert.
      fair: rows that each rank would compute at nominal speed, were the load perfectly balanced.
      pays: bool [M, E], whether a replica in a domain that is not the expert's home costs less than the traffic it can
        save (law 4).
    """

    omega: np.ndarray
    problem: Problem
    domain: np.ndarray
    members: np.ndarray
    speed: np.ndarray
    main_rank: np.ndarray
    home: np.ndarray
    demand: np.ndarray
    fair: int
    pays: np.ndarray

    @classmethod
    def of(cls, omega: np.ndarray, problem: Problem) -> "Facts":
        """Gathers the facts about demand `omega` (int64 [R, E])."""
        topology, cost = problem.topology, problem.cost
        groups = [topology.ranks_of_domain(d) for d in range(topology.num_domains)]
        members = np.full((len(groups), max(map(len, groups))), NOWHERE, np.int64)
        for d, ranks in enumerate(groups):
            members[d, : len(ranks)] = ranks
        domain = np.array(topology.domain_of_rank, np.int64)
        speed = np.array(cost.rank_speed or (NOMINAL_SPEED,) * topology.num_ranks, np.int64)
        main_rank = problem.main_rank().astype(np.int64)
        home = domain[main_rank]
        demand = np.stack([omega[list(ranks)].sum(axis=0) for ranks in groups])
        remote = home != np.arange(topology.num_domains)[:, None]
        return cls(
            omega=omega,
            problem=problem,
            domain=domain,
            members=members,
            speed=speed,
            main_rank=main_rank,
            home=home,
            demand=demand,
            fair=int(-(-int(omega.sum()) * NOMINAL_SPEED // int(speed.sum()))),
            pays=remote & (2 * demand * cost.token_bytes > cost.expert_bytes),
        )

    @property
    def num_ranks(self) -> int:
        """R."""
        return self.omega.shape[0]

    @property
    def num_experts(self) -> int:
        """E."""
        return self.omega.shape[1]

    @property
    def num_domains(self) -> int:
        """M."""
        return self.members.shape[0]

    def score(self, slot_expert: np.ndarray, quota: np.ndarray) -> int:
        """The problem's objective of one plan ([R, N] and [R, R, J]) in picoseconds."""
        return predict_ps(unpriced(slot_expert, quota), self.problem)


def share(level: np.ndarray | int, speed: np.ndarray) -> np.ndarray:
    """Rows that ranks of `speed` compute while a nominal one computes `level` rows, rounded down."""
    return level * speed // NOMINAL_SPEED


def level_of(rows: np.ndarray, speed: np.ndarray) -> np.ndarray:
    """Rows that a nominal rank computes while ranks of `speed` compute `rows`, rounded up."""
    return -(-rows * NOMINAL_SPEED // speed)
