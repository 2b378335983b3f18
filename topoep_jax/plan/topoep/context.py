"""What every candidate reads of a problem and its demand; xla_ffi/plan/topoep/context.h is the same in C++."""

import dataclasses

import numpy as np

from topoep_jax.plan.hardware import NOMINAL_SPEED
from topoep_jax.plan.problem import Problem

NOWHERE = -1
"""No rank, no expert, no instance."""


@dataclasses.dataclass(frozen=True)
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

    problem: Problem
    omega: np.ndarray
    ranks: int
    experts: int
    slots: int
    mains: int
    instances: int
    num_domains: int
    members: tuple[np.ndarray, ...]
    domain_of: np.ndarray
    main_rank: np.ndarray
    home: np.ndarray
    speed: np.ndarray
    demand: np.ndarray
    total: np.ndarray
    fair: int
    inbound: np.ndarray
    mean_inbound: int
    pays: np.ndarray
    ranked: tuple[tuple[int, ...], ...]
    place: np.ndarray
    before: np.ndarray

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


def prepare(omega: np.ndarray, problem: Problem) -> Context:
    """Gathers what is known of demand `omega` (int64 [R, E]) before candidates are built."""
    topology, cost = problem.topology, problem.cost
    members = tuple(np.array(topology.ranks_of_domain(d), np.int64) for d in range(topology.num_domains))
    domain_of = np.array(topology.domain_of_rank, np.int64)
    speed = np.array(cost.rank_speed or (NOMINAL_SPEED,) * topology.num_ranks, np.int64)
    main_rank = problem.main_rank().astype(np.int64)
    home = domain_of[main_rank]
    demand = np.stack([omega[ranks].sum(axis=0) for ranks in members])
    remote = home != np.arange(topology.num_domains)[:, None]
    inbound = (demand * remote).sum(axis=0).reshape(topology.num_ranks, -1).sum(axis=1)
    pays = remote & (2 * demand * cost.token_bytes > cost.expert_bytes)
    ranked, place, before = _ranking(demand, pays, main_rank)
    return Context(
        problem=problem,
        omega=omega,
        ranks=topology.num_ranks,
        experts=problem.num_experts,
        slots=problem.num_slots,
        mains=problem.mains_per_rank,
        instances=problem.mains_per_rank + problem.num_slots,
        num_domains=topology.num_domains,
        members=members,
        domain_of=domain_of,
        main_rank=main_rank,
        home=home,
        speed=speed,
        demand=demand,
        total=demand.sum(axis=0),
        fair=-(-int(omega.sum()) * NOMINAL_SPEED // int(speed.sum())),
        inbound=inbound,
        mean_inbound=int(inbound.sum()) // topology.num_ranks,
        pays=pays,
        ranked=ranked,
        place=place,
        before=before,
    )


def _ranking(
    demand: np.ndarray, pays: np.ndarray, main_rank: np.ndarray
) -> tuple[tuple[tuple[int, ...], ...], np.ndarray, np.ndarray]:
    """`ranked`, `place` and `before` of the context."""
    ranked: list[list[int]] = [[] for _ in demand]
    place, before = np.full(demand.shape, NOWHERE, np.int64), np.zeros(demand.shape, np.int64)
    count, rows = np.zeros(main_rank.size, np.int64), np.zeros(main_rank.size, np.int64)  # of each main rank so far
    for domain, expert in sorted(np.argwhere(pays).tolist(), key=lambda pair: -demand[tuple(pair)]):
        main = main_rank[expert]
        ranked[domain].append(expert)
        place[domain, expert], before[domain, expert] = count[main], rows[main]
        count[main] += 1
        rows[main] += demand[domain, expert]
    return tuple(map(tuple, ranked)), place, before
