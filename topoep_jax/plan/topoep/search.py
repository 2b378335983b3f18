"""Builds every candidate, improves it, and chooses: the planner as a whole."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from topoep_jax.plan.paper import topoep_paper
from topoep_jax.plan.problem import Draft, Problem
from topoep_jax.plan.topoep.effort import BY_INTERVALS, EFFORTS, NO_SPREAD, Candidate, Effort, candidates
from topoep_jax.plan.topoep.facts import Facts
from topoep_jax.plan.topoep.fill import fill
from topoep_jax.plan.topoep.greedy import greedy
from topoep_jax.plan.topoep.improve import (
    LEVEL_ROUNDS,
    cross_rows,
    improve,
    max_aligned_rows,
    meets_cap,
    objective,
    thrifty_objective,
)
from topoep_jax.plan.topoep.refine import can_refine, refine
from topoep_jax.plan.topoep.select import Pairs, find_pairs, select
from topoep_jax.plan.topoep.split import split
from topoep_jax.plan.topoep.spread import spread
from topoep_jax.plan.topoep.state import Plans

_QUOTAS_AT_ONCE = 1 << 22
"""Bounds memory: so many quotas of candidates are worked on at the same time."""
_TOLERANCE = 128
"""A plan that is slower than the best by one part in so many may win by its traffic."""


def topoep(omega: np.ndarray, problem: Problem) -> Draft:
    """Builds many cheap candidates, scores each exactly, and takes the best; never worse than the empty plan.

    A candidate decides which remote experts each domain serves, fills the slots of each domain by load, may let busy
    ranks spill over to any rank, and then moves rows between the instances of an expert as long as the objective falls.
    Among plans that are almost as good as the best, the one that sends the fewest rows between domains wins. With a
    cap, only plans that meet it compete. Ties go to the lower index everywhere.

    Args:
      omega: int64 [R, E], demand.
      problem: the question; `problem.effort` is a key of `EFFORTS`.
    """
    effort = EFFORTS[problem.effort]
    facts = Facts.of(omega, problem)
    pairs = find_pairs(facts)
    found = [Plans.empty(facts, 1)]
    for batch in _batches(candidates(problem.topology, problem.num_slots, effort), facts):
        found.append(_stages(facts, build(facts, pairs, batch, effort.fill_moves), effort))
    if effort.paper:
        found.append(Plans.of(facts, topoep_paper(omega, problem)))
    cost, cross, aligned = (
        np.concatenate([measure(facts, plans) for plans in found])
        for measure in (objective, cross_rows, max_aligned_rows)
    )
    eligible = meets_cap(facts, aligned)
    best = choose(cost, cross, aligned, eligible, paper=effort.paper)
    plan = _entry(found, best)
    if can_refine(facts, effort):
        plan = _refined(facts, effort, found, plan, cost[eligible], np.flatnonzero(eligible))
    return plan.draft(0, facts)


def _entry(found: Sequence[Plans], index: int) -> Plans:
    """One plan by its place among all that were `found`."""
    for plans in found:
        if index < len(plans):
            break
        index -= len(plans)
    return plans.at(np.array([index]))


def _refined(
    facts: Facts, effort: Effort, found: Sequence[Plans], plan: Plans, cost: np.ndarray, entry: np.ndarray
) -> Plans:
    """The best of `plan` and the cheapest entries, all refined; of entries of equal `cost` only the first is tried."""
    best = refine(facts, effort, plan)
    _, first = np.unique(cost, return_index=True)
    for index in entry[first[: effort.refine_starts]] if best.fits else ():
        other = refine(facts, effort, _entry(found, int(index)))
        if other.cost < best.cost:
            best = other
    return best.plan


def build(facts: Facts, pairs: Pairs, batch: Sequence[Candidate], fill_moves: int) -> Plans:
    """The plans of some candidates, before they are improved."""
    plans = Plans.empty(facts, len(batch))
    selections = list(dict.fromkeys(_selection(c) for c in batch if c.sixteenths))
    if selections:
        chosen = select(facts, pairs, selections)
        filled = split(facts, pairs, chosen, *fill(facts, pairs, chosen, fill_moves))
        serving = np.array([i for i, c in enumerate(batch) if c.sixteenths])
        plans.put(serving, filled.at(np.array([selections.index(_selection(batch[i])) for i in serving])))
    permille, price = (np.array([getattr(c, name) for c in batch], np.int64) for name in ("spread", "price"))
    by_moves = np.flatnonzero(price != BY_INTERVALS)
    if by_moves.size:
        plans.put(by_moves, greedy(facts, permille[by_moves], price[by_moves]))
    by_intervals = np.flatnonzero((permille != NO_SPREAD) & (price == BY_INTERVALS))
    if by_intervals.size:
        spilled = plans.at(by_intervals)
        spread(facts, spilled, permille[by_intervals])
        plans.put(by_intervals, spilled)
    return plans


def _selection(candidate: Candidate) -> Candidate:
    """What a candidate has in common with others that place the same experts in each domain."""
    return dataclasses.replace(candidate, spread=NO_SPREAD)


def _batches(every: Sequence[Candidate], facts: Facts) -> Iterator[Sequence[Candidate]]:
    quotas = facts.num_ranks**2 * (facts.problem.mains_per_rank + facts.problem.num_slots)
    size = max(1, _QUOTAS_AT_ONCE // quotas)
    return (every[i : i + size] for i in range(0, len(every), size))


def _stages(facts: Facts, plans: Plans, effort: Effort) -> Plans:
    """All that becomes of each candidate, one after the other: thrifty, eager, and level where eager misses the cap."""
    everyone = np.arange(len(plans))
    improve(facts, plans, effort.thrifty, functools.partial(thrifty_objective, facts))
    thrifty = plans.at(everyone)
    improve(facts, plans, effort.eager, functools.partial(objective, facts))
    missed = np.flatnonzero(~meets_cap(facts, max_aligned_rows(facts, plans)))
    level = plans.at(missed)
    improve(facts, level, LEVEL_ROUNDS, functools.partial(max_aligned_rows, facts), level=True)
    order = np.argsort(np.concatenate([everyone, everyone, missed]), kind="stable")
    return Plans.joined([thrifty, plans, level]).at(order)


def choose(cost: np.ndarray, cross: np.ndarray, aligned: np.ndarray, eligible: np.ndarray, *, paper: bool) -> int:
    """Index of the entry to take; all arguments have one element for each entry, the empty plan's first.

    Args:
      cost: picoseconds.
      cross: rows between domains.
      aligned: the most aligned rows of a rank.
      eligible: whether the cap is met.
      paper: whether the last entry is the paper's plan, which is not to be lost to either.
    """
    if not eligible.any():
        return int(np.lexsort((cost, aligned))[0])
    best = int(cost[eligible].min())
    if eligible[0] and best == cost[0]:
        return 0
    limit = best + best // _TOLERANCE
    for rival in (0, -1) if paper else (0,):
        if eligible[rival]:
            limit = min(limit, int(cost[rival]))
    contenders = np.flatnonzero(eligible & (cost <= limit))
    return int(contenders[np.lexsort((cost[contenders], cross[contenders]))[0]])
