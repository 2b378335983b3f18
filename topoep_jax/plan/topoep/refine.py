"""Small problems: one slot is changed at a time; xla_ffi/plan/topoep/refine.h is the same in C++."""

from collections.abc import Iterator

from topoep_jax.plan.finish import Worth
from topoep_jax.plan.topoep.context import NOWHERE, Context
from topoep_jax.plan.topoep.effort import Effort
from topoep_jax.plan.topoep.improve import Improver, Target
from topoep_jax.plan.topoep.state import State


def can_refine(context: Context, effort: Effort) -> bool:
    """Whether there are few enough changes of one slot: R x N slots times E experts or none."""
    return context.ranks * context.slots * (context.experts + 1) <= effort.refine_changes


def refine(context: Context, effort: Effort, state: State) -> tuple[State, Worth]:
    """Makes the best of all changes of one slot, again and again, while it lowers the cost and the cap is met.

    Each changed plan runs the eager phase before it is compared. The first of equally good changes wins: by rank, by
    slot, then the empty slot, then by expert. A plan that misses the cap is left as it is.

    Returns:
      The plan, another object than `state` if anything changed, and what it is worth.
    """
    worth = Improver(context, state).now_worth()
    for _ in range(effort.refine_waves if worth.meets_cap(context.problem) else 0):
        before = state
        for rank, slot, expert in _changes(context, before):
            changed = change(before, rank, slot, expert)
            improver = Improver(context, changed)
            improver.run(Target.EAGER, effort.eager)
            new = improver.now_worth()
            if new.meets_cap(context.problem) and new.cost < worth.cost:
                state, worth = changed, new
        if state is before:
            break
    return state, worth


def change(state: State, rank: int, slot: int, expert: int) -> State:
    """The plan with another expert in a slot, or `NOWHERE`: the rows of the old one go back to its main."""
    changed = State(state.slot_expert.copy(), state.quota.copy())
    old, instance = int(state.slot_expert[rank, slot]), state.mains + slot
    if old != NOWHERE:
        changed.quota[:, old // state.mains, old % state.mains] += state.quota[:, rank, instance]
        changed.quota[:, rank, instance] = 0
    changed.slot_expert[rank, slot] = expert
    return changed


def is_change(context: Context, state: State, rank: int, slot: int, expert: int) -> bool:
    """Whether a slot may hold an expert (or `NOWHERE`) instead of what it holds."""
    if expert == NOWHERE:
        return bool(state.slot_expert[rank, slot] != NOWHERE)
    return context.may_hold(rank, expert) and state.instance_of(rank, expert) == NOWHERE


def _changes(context: Context, state: State) -> Iterator[tuple[int, int, int]]:
    """(rank, slot, expert) of all changes, in order."""
    for rank in range(context.ranks):
        for slot in range(context.slots):
            for expert in range(NOWHERE, context.experts):
                if is_change(context, state, rank, slot, expert):
                    yield rank, slot, expert
