"""Builds one candidate and runs its phases; xla_ffi/plan/topoep/candidate.h is the same in C++."""

from collections.abc import Iterator

from topoep_jax.plan.topoep.context import Context
from topoep_jax.plan.topoep.effort import BY_INTERVALS, NO_SPREAD, Candidate, Effort, Kind
from topoep_jax.plan.topoep.fill import fill
from topoep_jax.plan.topoep.greedy import greedy
from topoep_jax.plan.topoep.improve import Improver, Target
from topoep_jax.plan.topoep.select import select
from topoep_jax.plan.topoep.split import split
from topoep_jax.plan.topoep.spread import spread
from topoep_jax.plan.topoep.state import State

LEVEL_ROUNDS = 8
"""Rounds, all of kind LOAD, that level a plan which misses the cap."""


def build(context: Context, effort: Effort, candidate: Candidate) -> State:
    """The plan of a candidate before it is improved: select, fill and split, or else the empty plan; then spread."""
    if candidate.sixteenths == 0:
        state = State.empty(context)
    else:
        selection = select(context, candidate)
        state = split(context, selection, *fill(context, selection, effort.fill_moves))
    if candidate.price != BY_INTERVALS:
        greedy(context, candidate, state)
    elif candidate.spread != NO_SPREAD:
        spread(context, candidate.spread, state)
    return state


def run_candidate(context: Context, effort: Effort, candidate: Candidate) -> Iterator[State]:
    """The plans of a candidate: after the thrifty phase, after the eager one, and levelled if that misses the cap."""
    state = build(context, effort, candidate)
    improver = Improver(context, state)
    improver.run(Target.THRIFTY, effort.thrifty)
    yield state.copy()
    improver.run(Target.EAGER, effort.eager)
    yield state.copy()
    if not improver.now_worth().meets_cap(context.problem):
        improver.run(Target.LEVEL, (Kind.LOAD,) * LEVEL_ROUNDS)
        yield state.copy()
