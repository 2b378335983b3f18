"""The load balancer of EPLB with mains that stay: only the extra copies are placed, each in its main's domain.

Source: `solve_on_host` in `csrc/kernels/legacy/placement_cpu.cpp` of github.com/Dots-Infra/UltraEP at 94cab09, with its
default balance threshold of 1 (no early stop).

Steps, for each domain alone:
  1. As often as the domain has slots, count one more copy for the expert of largest load per copy (low expert first),
     at most one per rank.
  2. Visit these copies by falling load per copy (then expert); each goes to the least loaded rank (low rank first) that
     has a free slot and no copy. Rank load counts mains at their load per copy, and copies as they are placed.
  3. A copy that finds no rank is given up.

Departures:
  - The source sends the rows of each source rank round robin over the instances; here the instances of an expert share
    all its rows evenly (remainder to low ranks), and near sources are served first.
  - Loads per copy are exact fractions; the source rounds them to float64.
  - Copies of experts without rows are placed, as in the source, and then left out: they would be pulled for nothing.
"""

import math

import numpy as np

from topoep_jax.plan.baselines.common import draft_of_rows, split_evenly
from topoep_jax.plan.baselines.eplb import add_copies
from topoep_jax.plan.problem import Draft, Problem, none


def eplb_fixed_main(omega: np.ndarray, problem: Problem) -> Draft:
    """Adds copies inside each domain; every instance of an expert executes an equal share of its rows."""
    return draft_of_rows(split_evenly(omega.sum(axis=0), copied(omega, problem)), omega, problem)


def copied(omega: np.ndarray, problem: Problem) -> np.ndarray:
    """bool [R, E], who holds what after steps 1 to 3."""
    load, holds = omega.sum(axis=0), none(omega, problem).holds
    for domain in range(problem.topology.num_domains):
        for rank, expert in place_copies(load, problem, domain):
            holds[rank, expert] = True
    return holds


def place_copies(load: np.ndarray, problem: Problem, domain: int) -> list[tuple[int, int]]:
    """(rank, expert) of each copy in the order of placement; `load` is rows per expert, int64 [E]."""
    ranks = problem.topology.ranks_of_domain(domain)
    main_rank = problem.main_rank().tolist()
    experts = [e for e in range(problem.num_experts) if main_rank[e] in ranks]
    copied = add_copies([int(load[e]) for e in experts], len(experts) + len(ranks) * problem.num_slots, len(ranks))
    count = np.bincount(copied).tolist()
    scale = math.lcm(*count)
    share = {e: int(load[e]) * scale // n for e, n in zip(experts, count, strict=True)}
    rank_load = {r: sum(share[e] for e in experts if main_rank[e] == r) for r in ranks}
    held = {r: {e for e in experts if main_rank[e] == r} for r in ranks}
    used = dict.fromkeys(ranks, 0)
    placed = []
    extra = [e for e, n in zip(experts, count, strict=True) for _ in range(n - 1)]
    for expert in sorted(extra, key=lambda e: (-share[e], e)):
        open_ranks = [r for r in ranks if used[r] < problem.num_slots and expert not in held[r]]
        if not open_ranks:
            continue
        rank = min(open_ranks, key=lambda r: (rank_load[r], r))
        rank_load[rank] += share[expert]
        used[rank] += 1
        held[rank].add(expert)
        placed.append((rank, expert))
    return placed
