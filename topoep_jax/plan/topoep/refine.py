"""Small problems: one slot of a plan is changed at a time, in every possible way, as long as that helps."""

import dataclasses
import functools

import numpy as np

from topoep_jax.plan.topoep.effort import Effort
from topoep_jax.plan.topoep.facts import NOWHERE, Facts
from topoep_jax.plan.topoep.improve import improve, max_aligned_rows, meets_cap, objective
from topoep_jax.plan.topoep.state import Plans


@dataclasses.dataclass(frozen=True)
class Refined:
    """One plan, its cost in picoseconds, and whether it meets the cap."""

    plan: Plans
    cost: int
    fits: bool


def can_refine(facts: Facts, effort: Effort) -> bool:
    """Whether there are few enough changes of one slot."""
    return facts.num_ranks * facts.problem.num_slots * (facts.num_experts + 1) <= effort.refine_changes


def refine(facts: Facts, effort: Effort, plan: Plans) -> Refined:
    """Makes the best of all changes of one slot, each improved eagerly, while it lowers the cost and the cap is met.

    `plan` is one plan; the first of equally good changes wins, by slot, then by expert.
    """
    best = Refined(plan, int(objective(facts, plan)[0]), bool(_fits(facts, plan)[0]))
    for _ in range(effort.refine_waves if best.fits else 0):
        changed = _changes(facts, best.plan)
        improve(facts, changed, effort.eager, functools.partial(objective, facts))
        candidates = np.flatnonzero(_fits(facts, changed))
        cost = objective(facts, changed.at(candidates))
        if cost.size == 0 or cost.min() >= best.cost:
            break
        best = Refined(changed.at(candidates[[cost.argmin()]]), int(cost.min()), True)
    return best


def _fits(facts: Facts, plans: Plans) -> np.ndarray:
    return meets_cap(facts, max_aligned_rows(facts, plans))


def _changes(facts: Facts, plan: Plans) -> Plans:
    """All plans in which one slot holds something else, or nothing; what it served is back at the main."""
    num_experts, mains = facts.num_experts, facts.problem.mains_per_rank
    domain = facts.domain[:, None]
    may_hold = (facts.home == domain) | facts.pays[facts.domain]  # [R, E]
    may_hold &= plan.instance_of(num_experts)[0] == NOWHERE
    filled = plan.slot_expert[0] != NOWHERE  # [R, N]
    allowed = np.zeros((*filled.shape, num_experts + 1), bool)  # emptied, or each expert
    allowed[..., 0] = filled
    allowed[..., 1:] = may_hold[:, None]
    rank, slot, change = np.nonzero(allowed)
    plans = plan.at(np.zeros(rank.size, np.int64))
    old = plans.slot_expert[np.arange(rank.size), rank, slot]
    index = np.flatnonzero(old != NOWHERE)
    quota = plans.quota.transpose(0, 2, 3, 1)  # [C, R, J, source], a view
    served = quota[index, rank[index], mains + slot[index]]
    quota[index, facts.main_rank[old[index]], old[index] % mains] += served
    quota[index, rank[index], mains + slot[index]] = 0
    plans.slot_expert[np.arange(rank.size), rank, slot] = change - 1
    return plans
