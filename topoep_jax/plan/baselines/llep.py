"""Least-loaded expert parallelism: what does not fit on an expert's main rank spills to the least loaded ranks.

Source: `compute_llep_lpt_plan` and the gate around it in `llep/gpt_oss_llep.py` of
github.com/SalesforceAIResearch/LeastLoadedEP at 0349746, with its default capacity factor of 1.1 and at least 1024 rows
per spilled chunk; the gate is the 1.3 of its README.

Steps:
  1. Gate: if the busiest rank has less than 1.3 of the mean load, every expert runs on its main rank.
  2. Capacity of a rank is 1.1 of the (whole) mean. Experts are visited by falling load; the effective load of a rank is
     what it was given so far plus the mains it owns that are still to be visited.
  3. The main takes what fits. The rest goes to other ranks by rising effective load, in chunks of at most their room;
     a chunk below 1024 rows is skipped unless it is all that is left. The order is refreshed after each chunk, but not
     for an expert whose main took nothing.
  4. If no rank has room, the rest is forced onto the first of that order.
  5. Sources feed the chunks in order: low source ranks first, main first, then the helpers as they were chosen.

Departures:
  - The source has no limit on replicas per rank; here a helper needs a free slot or a copy. If no helper has one, the
    rest is forced onto the main, so the load may exceed what the source would reach.
  - The gate compares integers; the source compares float32.
"""

import numpy as np

from topoep_jax.plan.problem import Draft, Problem, none
from topoep_jax.plan.topoep.apportion import overlap

MIN_CHUNK = 1024


def llep(omega: np.ndarray, problem: Problem) -> Draft:
    """Spills rows over capacity, regardless of domains; a main may end with no rows."""
    num_ranks = problem.topology.num_ranks
    load = omega.sum(axis=0)
    draft = none(omega, problem)
    if is_even(load.tolist(), num_ranks):
        return draft
    for expert, chunks in assign(load.tolist(), num_ranks, problem.num_slots).items():
        ranks, rows = np.array(chunks).T
        fed = overlap(rows, omega[:, expert])  # [chunk, source]
        draft.quota[expert] = 0
        np.add.at(draft.quota[expert], ranks, fed)
        draft.holds[ranks, expert] = True
    return draft


def is_even(load: list[int], num_ranks: int) -> bool:
    """The gate: whether no rank has 1.3 times the mean, with every expert on its main rank; false if all is zero."""
    mains = len(load) // num_ranks
    busiest = max(sum(load[r * mains : (r + 1) * mains]) for r in range(num_ranks))
    return 10 * num_ranks * busiest < 13 * sum(load)


def assign(load: list[int], num_ranks: int, num_slots: int) -> dict[int, list[tuple[int, int]]]:
    """(rank, rows) of each chunk of every expert that has rows, in token order."""
    mains = len(load) // num_ranks
    mean = sum(load) // num_ranks
    capacity = max(mean * 11 // 10 if mean else sum(load), 1)
    effective = [sum(load[r * mains : (r + 1) * mains]) for r in range(num_ranks)]
    free = [num_slots] * num_ranks
    plan = {}
    for expert in sorted(range(len(load)), key=lambda e: (-load[e], e)):
        main, rows = expert // mains, load[expert]
        if rows == 0:
            continue
        effective[main] -= rows
        kept = min(max(capacity - effective[main], 0), rows)
        effective[main] += kept
        chunks = [(main, kept)] if kept else []
        spilled = _spill(rows - kept, main, kept > 0, capacity, effective, free)
        plan[expert] = chunks + spilled
    return plan


def _spill(
    rest: int, main: int, refresh: bool, capacity: int, effective: list[int], free: list[int]
) -> list[tuple[int, int]]:
    """(rank, rows) of the chunks that leave the main rank; updates the effective loads and the free slots."""
    chunks: list[tuple[int, int]] = []

    def by_load() -> list[int]:
        held = {rank for rank, _ in chunks}
        helpers = [r for r in range(len(free)) if r != main and (free[r] or r in held)]
        return sorted(helpers, key=lambda r: (effective[r], r))

    order = left = by_load()
    while rest:
        helper = next((r for r in left if _fits(rest, capacity - effective[r])), None)
        if helper is None:
            helper, chunk = (order[0] if order else main), rest
        else:
            chunk = min(rest, capacity - effective[helper])
        if helper != main and helper not in {rank for rank, _ in chunks}:
            free[helper] -= 1
        effective[helper] += chunk
        chunks.append((helper, chunk))
        rest -= chunk
        if refresh:
            order = left = by_load()
        elif rest:
            left = left[left.index(helper) + 1 :]
    return chunks


def _fits(rest: int, room: int) -> bool:
    """Whether a rank takes a chunk: all of `rest`, or at least a minimum."""
    return room >= min(rest, MIN_CHUNK)
