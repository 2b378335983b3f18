"""What every candidate reads of a problem and its demand; xla_ffi/plan/topoep/context.h is the same in C++."""

import numpy as np

from topoep_jax.plan.hardware import NOMINAL_SPEED
from topoep_jax.plan.problem import Problem

NOWHERE = -1
"""No rank, no expert, no instance."""


class Context:
    """One problem and its demand, with what all candidates share.

    A pair is a domain and a remote expert (its main is in another domain) whose replica there pays. Pairs compete
    twice: at the expert's main rank, which lets only so many copies go, and in the domain, which has only so many
    slots. More rows win, then the lower domain, then the lower expert.

    Attributes:
      problem: the question.
      omega: int64 [R, E], demand.
      ranks: R.
      experts: E.
      slots: N.
      mains: P, of a rank.
      instances: J = P + N, of a rank.
      num_domains: M.
      members: M times int64 [G], the ranks of each domain, ascending.
      domain_of: int64 [R], domain of each rank.
      main_rank: int64 [E].
      home: int64 [E], domain of the main rank.
      speed: int64 [R], permille of nominal.
      demand: int64 [M, E], rows of each domain for each expert.
      total: int64 [E], rows of all domains.
      fair: rows of a nominal rank if load were even: ceil(all rows x 1000 / all speeds).
      inbound: int64 [R], rows that other domains send to a rank's mains while there is no replica.
      mean_inbound: their mean over ranks, rounded down.
      pays: bool [M, E], whether a replica in a domain that is not the expert's home costs less to pull than the
        domain's rows cost to send, there and back (law 4): 2 x demand x token_bytes > expert_bytes.
      ranked: for each domain the experts of its pairs, best first.
      place: int64 [M, E], how many better pairs a pair has at its main rank; `NOWHERE` for what is no pair.
      before: int64 [M, E], the rows of these.
    """

    def __init__(self, omega: np.ndarray, problem: Problem) -> None:
        """Gathers what is known of demand `omega` (int64 [R, E]) before candidates are built."""
        topology, cost = problem.topology, problem.cost
        self.problem, self.omega = problem, omega
        self.ranks, self.experts = omega.shape
        self.slots, self.mains = problem.num_slots, problem.mains_per_rank
        self.instances = self.mains + self.slots
        self.num_domains = topology.num_domains
        self.members = [np.array(topology.ranks_of_domain(d), np.int64) for d in range(self.num_domains)]
        self.domain_of = np.array(topology.domain_of_rank, np.int64)
        self.main_rank = problem.main_rank().astype(np.int64)
        self.home = self.domain_of[self.main_rank]
        self.speed = np.array(cost.rank_speed or (NOMINAL_SPEED,) * self.ranks, np.int64)
        self.demand = np.stack([omega[ranks].sum(axis=0) for ranks in self.members])
        self.total = self.demand.sum(axis=0)
        self.fair = -(-int(self.total.sum()) * NOMINAL_SPEED // int(self.speed.sum()))
        remote = self.home != np.arange(self.num_domains)[:, None]
        self.inbound = (self.demand * remote).sum(axis=0).reshape(self.ranks, self.mains).sum(axis=1)
        self.mean_inbound = int(self.inbound.sum()) // self.ranks
        self.pays = remote & (2 * self.demand * cost.token_bytes > cost.expert_bytes)
        self.ranked: list[list[int]] = [[] for _ in self.members]
        self.place = np.full(self.demand.shape, NOWHERE, np.int64)
        self.before = np.zeros(self.demand.shape, np.int64)
        count, rows = np.zeros(self.ranks, np.int64), np.zeros(self.ranks, np.int64)  # of each main rank so far
        for domain, expert in sorted(np.argwhere(self.pays).tolist(), key=lambda pair: -self.demand[tuple(pair)]):
            main = self.main_rank[expert]
            self.ranked[domain].append(expert)
            self.place[domain, expert], self.before[domain, expert] = count[main], rows[main]
            count[main] += 1
            rows[main] += self.demand[domain, expert]

    def share(self, rank: int, rows: int) -> int:
        """Rows that `rank` executes in the time in which a nominal rank executes `rows`, rounded down."""
        return rows * int(self.speed[rank]) // NOMINAL_SPEED

    def level(self, rank: int, rows: int) -> int:
        """Rows that a nominal rank executes in the time in which `rank` executes `rows`, rounded up."""
        return -(-rows * NOMINAL_SPEED // int(self.speed[rank]))

    def may_hold(self, rank: int, expert: int) -> bool:
        """Whether a replica of `expert` on `rank` is legal: in its home domain, or where it pays."""
        domain = self.domain_of[rank]
        return bool(self.home[expert] == domain or self.pays[domain, expert])
