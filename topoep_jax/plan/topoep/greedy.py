"""Lets busy ranks hand rows to ranks with room, one move after the other, few copies and anywhere."""

import numpy as np

from topoep_jax.plan.links import link_ps
from topoep_jax.plan.topoep.facts import NOWHERE, Facts, level_of, share
from topoep_jax.plan.topoep.narrow import first_smallest
from topoep_jax.plan.topoep.state import Plans


def greedy(facts: Facts, permille: np.ndarray, price: np.ndarray) -> Plans:
    """One plan for each of C settings: the busiest rank hands rows of a main to another rank, again and again.

    Args:
      facts: the problem.
      permille: int64 [C], ranks above the fair load by more than this give, and nobody takes more.
      price: int64 [C], quarters of the time of a pull that the rows of a new copy must be worth.
    """
    count, num_ranks, mains = len(permille), facts.num_ranks, facts.problem.mains_per_rank
    plans = Plans.empty(facts, count)
    target = share((facts.fair * (1000 + permille) // 1000)[:, None], facts.speed)
    load = plans.rows().sum(axis=2)
    left = np.repeat(facts.omega.sum(axis=0)[None], count, axis=0)  # [C, E], rows at the main
    part = np.zeros((count, facts.num_experts, num_ranks), np.int64)  # rows elsewhere
    instance = np.full(part.shape, NOWHERE)
    blocked = np.zeros(load.shape, bool)
    pulls = _pull_rows(facts, price)  # [C, R, R]
    while True:
        gives = (load > target) & ~blocked
        c = np.flatnonzero(gives.any(axis=1))
        if c.size == 0:
            break
        giver = np.where(gives[c], level_of(load[c], facts.speed), -1).argmax(axis=1)
        expert = giver[:, None] * mains + np.arange(mains)  # [c, P]
        over = load[c, giver] - target[c, giver]
        amount = np.minimum(left[c[:, None], expert], over[:, None])[..., None]
        amount = np.minimum(amount, (target - load)[c][:, None])  # [c, P, R]
        held = instance[c[:, None], expert] != NOWHERE
        free = (plans.slot_expert[c] == NOWHERE).any(axis=2)[:, None]
        near = (facts.domain[giver][:, None] == facts.domain)[:, None]
        feasible = (amount > 0) & (near | facts.pays.T[expert][..., facts.domain]) & (held | free)
        feasible &= (np.arange(num_ranks) != giver[:, None])[:, None]
        some = feasible.any(axis=(1, 2))
        blocked[c[~some], giver[~some]] = True
        if not some.any():
            continue
        worth = amount - np.where(held, 0, pulls[c, giver][:, None])
        a, to = np.divmod(first_smallest(feasible[some], -worth[some]), num_ranks)
        c, giver, expert, amount = c[some], giver[some], expert[some], amount[some]
        each = np.arange(c.size)
        expert, amount = expert[each, a], amount[each, a, to]
        left[c, expert] -= amount
        part[c, expert, to] += amount
        load[c, giver] -= amount
        load[c, to] += amount
        new = instance[c, expert, to] == NOWHERE
        c, expert, to = c[new], expert[new], to[new]
        slot = (plans.slot_expert[c, to] == NOWHERE).argmax(axis=1)
        plans.slot_expert[c, to, slot] = expert
        instance[c, expert, to] = mains + slot
    plan, expert = np.nonzero(part.any(axis=2))
    takers = np.broadcast_to(np.arange(num_ranks), (plan.size, num_ranks))
    at = (plan, facts.main_rank[expert], expert % mains)
    plans.hand_out(*at, part[plan, expert], takers, instance[plan, expert])
    return plans


def _pull_rows(facts: Facts, price: np.ndarray) -> np.ndarray:
    """Rows that take as long as `price` (int64 [C]) quarters of a pull from one rank to another, int64 [C, R, R]."""
    cost = facts.problem.cost
    if cost.row_ps == 0:
        return np.zeros((len(price), facts.num_ranks, facts.num_ranks), np.int64)
    near, far = (link_ps(cost.expert_bytes, rate) for rate in (cost.intra_fs_per_byte, cost.inter_fs_per_byte))
    pull = np.where(facts.problem.topology.crosses_domains(), far, near)
    return price[:, None, None] * pull // (4 * cost.row_ps)
