"""PlaceMoE: replicas near the sources that want them, one copy per source and expert, refined by coordinate moves.

Source: arXiv 2610.14798 and `veomni/distributed/moe/hiermoe/placemoe/` of github.com/pia7a/PlaceMoE: `allocation.py`
at b509321, `placement.py` and `optimizer.py` at 1a8d424, `mapping.py` at 270ea38.

Steps:
  1. Allocation: all R x N slots are used. Whole rounds give one more copy to every expert, the rest goes to the
     experts of largest demand (low expert first).
  2. Layout, largest load per copy first: the domain of best score, then the rank that keeps the domain's peak lowest
     (then the lighter, then the lower one). The score is w_node x rows of the domain for the expert (if it has no
     copy there) less gamma x largest load per rank of any domain.
  3. Mapping: pairs (source, expert) by falling demand, all rows to one copy: of the copies in the source's domain, if
     any, that whose rank ends with the least load.
  4. Up to 6 sweeps in the same order: move the pair to the copy of best score: w_node x rows if near, plus w_rank x
     rows if on the source's rank, less gamma x largest rank load (low rank on ties).
  5. Steps 2-4 are repeated up to three times with the loads per copy that the best mapping so far gives; mappings
     before and after the sweeps compete by replay (worst rank's traffic per link class plus largest load; placement
     is taken as given, pulls are not priced).
  w_node, w_rank and gamma are picoseconds per row: between domains, inside a domain (out and back), and of compute.

Departures, and what is lost:
  - A planner here is told demand, not which experts each token selects together. So there is no affinity between
    experts: no affinity groups (allocation and layout work on single experts), no affinity terms in the scores, and
    the replay counts every row where the source counts a token once per destination. De-duplication, the source's
    main gain in traffic, is neither planned for nor seen.
  - Mains stay, so the assignment of groups to locations falls away and the layout is greedy, without exchange of
    pairs.
  - One allocation is tried, not the best 64; a mapping is not carried over to the next layout.
  - Planned anew for every batch; the source plans from a profile and keeps the result for many steps.
  - Integers throughout; the source works in float64.
"""

import numpy as np

from topoep_jax.plan.baselines.common import draft_of_quota
from topoep_jax.plan.problem import Draft, Problem, none

ROUNDS = 3
SWEEPS = 6


def placemoe(omega: np.ndarray, problem: Problem) -> Draft:
    """Copies the most demanded experts near their sources; each source uses one copy of an expert."""
    demand = omega.sum(axis=0)
    copies = allocate(demand, problem.num_slots * problem.topology.num_ranks, problem.topology.num_ranks)
    rows = [[int(d) // (n + 1)] * (n + 1) for d, n in zip(demand, copies, strict=True)]
    found: list[tuple[int, np.ndarray, np.ndarray]] = []
    for _ in range(ROUNDS):
        holds = lay_out(rows, omega, problem)
        start = initial_mapping(holds, omega, problem)
        for mapping in (start, refine(start, holds, omega, problem)):
            found.append((replay(mapping, omega, problem), mapping, holds))
        _, best, its_holds = min(found, key=lambda candidate: candidate[0])  # the first of equals
        rows = _rows_per_copy(best, its_holds, omega)
    return draft_of_quota(_quota(best, omega), problem)


def allocate(demand: np.ndarray, num_copies: int, num_ranks: int) -> np.ndarray:
    """int64 [E]: copies of each expert besides its main, at most one per other rank; `demand` is [E]."""
    rounds, rest = divmod(num_copies, demand.size)
    copies = np.full(demand.size, rounds)
    copies[np.argsort(-demand, kind="stable")[:rest]] += 1
    return np.minimum(copies, num_ranks - 1)


def weights(problem: Problem) -> tuple[int, int, int]:
    """w_node, w_rank and gamma: picoseconds per row between domains, inside a domain, and of compute."""
    cost = problem.cost
    both_ways = 2 * cost.token_bytes
    return both_ways * cost.inter_fs_per_byte // 1000, both_ways * cost.intra_fs_per_byte // 1000, cost.row_ps


def lay_out(rows: list[list[int]], omega: np.ndarray, problem: Problem) -> np.ndarray:
    """bool [R, E], who holds what; `rows[e]` are the rows of expert e's main and of its copies."""
    w_node, _, gamma = weights(problem)
    topology = problem.topology
    domains = [list(topology.ranks_of_domain(d)) for d in range(topology.num_domains)]
    demand = np.stack([omega[ranks].sum(axis=0) for ranks in domains]).tolist()
    holds = none(omega, problem).holds
    load = np.zeros(topology.num_ranks, np.int64)
    np.add.at(load, problem.main_rank(), [share[0] for share in rows])
    free = np.full(topology.num_ranks, problem.num_slots)
    for amount, expert in sorted(
        ((n, e) for e, share in enumerate(rows) for n in share[1:]), key=lambda x: (-x[0], x[1])
    ):
        per_rank = [int(load[ranks].sum()) // len(ranks) for ranks in domains]
        best = None
        for domain, ranks in enumerate(domains):
            open_ranks = [r for r in ranks if free[r] and not holds[r, expert]]
            if open_ranks:
                near = 0 if holds[ranks, expert].any() else demand[domain][expert]
                peak = max(*per_rank, (int(load[ranks].sum()) + amount) // len(ranks))
                score = w_node * near - gamma * peak
                if best is None or score > best[0]:
                    best = score, open_ranks, int(load[ranks].max())
        if best is not None:
            _, open_ranks, domain_peak = best
            rank = min(open_ranks, key=lambda r: (max(domain_peak, load[r] + amount), load[r], r))
            holds[rank, expert] = True
            load[rank] += amount
            free[rank] -= 1
    return holds


def initial_mapping(holds: np.ndarray, omega: np.ndarray, problem: Problem) -> np.ndarray:
    """int64 [R, E]: the rank that executes all rows of each (source, expert)."""
    domain = problem.topology.domain_of_rank
    choices = [np.flatnonzero(column).tolist() for column in holds.T]
    load = [0] * holds.shape[0]
    mapping = np.zeros(omega.shape, np.int64)
    for source, expert in _by_demand(omega):
        near = [r for r in choices[expert] if domain[r] == domain[source]]
        rank = min(near or choices[expert], key=lambda r: (load[r], r))
        mapping[source, expert] = rank
        load[rank] += int(omega[source, expert])
    return mapping


def refine(mapping: np.ndarray, holds: np.ndarray, omega: np.ndarray, problem: Problem) -> np.ndarray:
    """The mapping after the sweeps of step 4."""
    w_node, w_rank, gamma = weights(problem)
    domain = problem.topology.domain_of_rank
    choices = [np.flatnonzero(column).tolist() for column in holds.T]
    pairs = [pair for pair in _by_demand(omega) if len(choices[pair[1]]) > 1]
    mapping = mapping.copy()
    load = _quota(mapping, omega).sum(axis=(0, 2)).tolist()
    for _ in range(SWEEPS):
        changed = False
        for source, expert in pairs:
            amount, current = int(omega[source, expert]), int(mapping[source, expert])
            load[current] -= amount
            others = max(load)
            score = {
                rank: w_node * amount * (domain[rank] == domain[source])
                + w_rank * amount * (rank == source)
                - gamma * max(others, load[rank] + amount)
                for rank in choices[expert]
            }
            rank = max(score, key=lambda r: (score[r], -r))
            load[rank] += amount
            mapping[source, expert] = rank
            changed |= rank != current
        if not changed:
            break
    return mapping


def replay(mapping: np.ndarray, omega: np.ndarray, problem: Problem) -> int:
    """Picoseconds of the worst rank's traffic in each link class and of the largest load."""
    w_node, w_rank, gamma = weights(problem)
    rows = _quota(mapping, omega).sum(axis=0).T  # [source, rank]
    far = problem.topology.crosses_domains()
    near = ~far & ~np.eye(far.shape[0], dtype=bool)
    busiest = [int(max((rows * link).sum(axis=0).max(), (rows * link).sum(axis=1).max())) for link in (far, near)]
    return w_node * busiest[0] + w_rank * busiest[1] + gamma * int(rows.sum(axis=0).max())


def _by_demand(omega: np.ndarray) -> list[tuple[int, int]]:
    """(source, expert) by falling demand, then source, then expert."""
    order = np.argsort(-omega.ravel(), kind="stable")
    return list(zip((order // omega.shape[1]).tolist(), (order % omega.shape[1]).tolist(), strict=True))


def _quota(mapping: np.ndarray, omega: np.ndarray) -> np.ndarray:
    """int64 [E, R, R], as in `Draft`."""
    num_ranks, num_experts = omega.shape
    quota = np.zeros((num_experts, num_ranks, num_ranks), np.int64)
    source, expert = np.indices(omega.shape)
    quota[expert, mapping, source] = omega
    return quota


def _rows_per_copy(mapping: np.ndarray, holds: np.ndarray, omega: np.ndarray) -> list[list[int]]:
    """Rows of each expert's main, then of its copies in falling order."""
    rows = _quota(mapping, omega).sum(axis=2)  # [E, R]
    main = np.arange(rows.shape[0]) // (rows.shape[0] // rows.shape[1])
    return [
        [
            int(rows[e, main[e]]),
            *sorted((int(rows[e, r]) for r in np.flatnonzero(holds[:, e]) if r != main[e]), reverse=True),
        ]
        for e in range(rows.shape[0])
    ]
