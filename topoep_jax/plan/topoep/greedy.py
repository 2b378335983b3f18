"""Busy ranks hand rows to ranks with room, move by move; xla_ffi/plan/topoep/greedy.h is the same in C++."""

import numpy as np

from topoep_jax.plan.links import link_ps
from topoep_jax.plan.topoep.context import NOWHERE, Context
from topoep_jax.plan.topoep.effort import PERMILLE, QUARTERS, Candidate
from topoep_jax.plan.topoep.state import State, Taker

_LEAST = np.iinfo(np.int64).min


def greedy(context: Context, candidate: Candidate, state: State) -> None:
    """From the empty plan: the busiest rank hands rows of a main to another rank, again and again.

    A rank's target is its share of the level `candidate.spread` permille above the fair load; of those above it the
    busiest is the one with the highest `Context.level`. A move is of min(rows left at the main, load above the giver's
    target, load below the taker's) rows. The move of the most rows is made, less the price of the pull where the copy
    is new; of equals the lower expert, then the lower rank. A rank without a move gives nothing more. In the end the
    takers of each main, by rank, share its rows.
    """
    everyone = range(context.ranks)
    level = context.fair * (PERMILLE + candidate.spread) // PERMILLE
    target = np.array([context.share(rank, level) for rank in everyone])
    left = context.total.copy()  # rows at the mains
    moved = np.zeros((context.experts, context.ranks), np.int64)  # rows elsewhere
    load = left.reshape(context.ranks, context.mains).sum(axis=1)
    may_hold = context.pays[context.domain_of] | (context.home == context.domain_of[:, None])  # [R, E]
    blocked = np.zeros(context.ranks, bool)
    while ((load > target) & ~blocked).any():
        giver = max(np.flatnonzero((load > target) & ~blocked).tolist(), key=lambda r: context.level(r, int(load[r])))
        mains = slice(giver * context.mains, (giver + 1) * context.mains)
        amount = np.minimum.outer(np.minimum(left[mains], load[giver] - target[giver]), target - load)  # [P, R]
        held = moved[mains] > 0
        free = (state.slot_expert == NOWHERE).any(axis=1)
        feasible = (amount > 0) & may_hold[:, mains].T & (held | free)
        if not feasible.any():
            blocked[giver] = True
            continue
        worth = np.where(feasible, amount - np.where(held, 0, _pull_rows(context, candidate.price, giver)), _LEAST)
        main, taker = divmod(int(worth.argmax()), context.ranks)
        if not held[main, taker]:
            state.slot_expert[taker, state.free_slots(taker)[0]] = mains.start + main
        left[mains.start + main] -= amount[main, taker]
        moved[mains.start + main, taker] += amount[main, taker]
        load[giver] -= amount[main, taker]
        load[taker] += amount[main, taker]
    for expert in np.flatnonzero(moved.any(axis=1)):
        takers = np.flatnonzero(moved[expert]).tolist()
        slots = [state.slot_expert[taker].tolist().index(expert) for taker in takers]
        shares = [Taker(int(moved[expert, taker]), taker, slot) for taker, slot in zip(takers, slots, strict=True)]
        state.hand_out(int(context.main_rank[expert]), int(expert) % context.mains, shares)


def _pull_rows(context: Context, price: int, giver: int) -> np.ndarray:
    """int64 [R], rows that take as long as `price` quarters of a pull from rank `giver` to each other rank."""
    cost = context.problem.cost
    intra, inter = (link_ps(cost.expert_bytes, rate) for rate in (cost.intra_fs_per_byte, cost.inter_fs_per_byte))
    pull_ps = np.where(context.domain_of == context.domain_of[giver], intra, inter)
    return price * pull_ps // (QUARTERS * cost.row_ps) if cost.row_ps else np.zeros_like(pull_ps)
