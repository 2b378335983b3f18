"""Moves rows between the instances of an expert, round by round, as long as the plan gets better."""

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from topoep_jax.plan.problem import aligned_rows
from topoep_jax.plan.topoep.effort import Kind
from topoep_jax.plan.topoep.facts import NOWHERE, Facts, level_of, share
from topoep_jax.plan.topoep.narrow import first_largest_of_each
from topoep_jax.plan.topoep.state import Plans

LEVEL_ROUNDS = (Kind.LOAD,) * 8
"""The rounds that level a plan which misses the cap."""
_ANY = 1 << 40
"""More rows than there are."""

Costs = Callable[[Plans], np.ndarray]
"""The cost of each plan, int64 [C]: what a phase brings down."""


def improve(facts: Facts, plans: Plans, kinds: Iterable[Kind], costs: Costs, *, level: bool = False) -> None:
    """One phase: a round of each kind in turn, undone where it does not lower the cost; idle slots are freed.

    With `level`, load is all that counts: traffic may rise, and ranks give down to the fair load.
    """
    old = costs(plans)
    siblings = Siblings.of(facts, plans)
    settled = np.zeros((len(Kind), len(plans)), bool)  # the round would do again what was undone
    for kind in kinds:
        tried = np.flatnonzero(~settled[kind])
        before = plans.at(tried)
        after = _round(facts, before, siblings.among(tried), kind, level=level)
        moved = (after.quota != before.quota).any(axis=(1, 2, 3))
        settled[kind, tried[~moved]] = True
        tried, after = tried[moved], after.at(moved)
        new = costs(after)
        better = new < old[tried]
        settled[kind, tried[~better]] = True
        settled[:, tried[better]] = False
        plans.put(tried[better], after.at(better))
        old[tried[better]] = new[better]
    plans.free_idle_slots()


def objective(facts: Facts, plans: Plans) -> np.ndarray:
    """The problem's objective, int64 [C]."""
    scores = [facts.score(*plan) for plan in zip(plans.slot_expert, plans.quota, strict=True)]
    return np.array(scores, np.int64)


def thrifty_objective(facts: Facts, plans: Plans) -> np.ndarray:
    """The objective and three quarters of what the mean rank's rows between domains take, int64 [C]."""
    cost = facts.problem.cost
    mean = cross_rows(facts, plans) // facts.num_ranks
    return objective(facts, plans) + 3 * (2 * cost.token_bytes * mean * cost.inter_fs_per_byte // 1000) // 4


def cross_rows(facts: Facts, plans: Plans) -> np.ndarray:
    """Rows that leave their domain, int64 [C]."""
    return plans.quota.sum(axis=3)[:, facts.problem.topology.crosses_domains()].sum(axis=1)


def max_aligned_rows(facts: Facts, plans: Plans) -> np.ndarray:
    """Aligned rows of the busiest rank, int64 [C]."""
    return np.array([aligned_rows(quota, facts.problem.block_rows).max() for quota in plans.quota], np.int64)


def meets_cap(facts: Facts, aligned: np.ndarray) -> np.ndarray:
    """Which of some plans' `max_aligned_rows` meet the cap."""
    cap = facts.problem.cap_rows
    return np.ones(aligned.shape, bool) if cap is None else aligned <= cap


@dataclasses.dataclass
class Siblings:
    """Every two instances of one expert in C plans, by (plan, receiver, its instance, giver).

    Attributes:
      plan: int64 [n].
      to: int64 [n], the rank that may receive rows.
      to_instance: int64 [n].
      giver: int64 [n], the rank that may give them.
      instance: int64 [n], of the giver.
    """

    plan: np.ndarray
    to: np.ndarray
    to_instance: np.ndarray
    giver: np.ndarray
    instance: np.ndarray

    @classmethod
    def of(cls, facts: Facts, plans: Plans) -> "Siblings":
        """Finds them."""
        experts, where = plans.experts(), plans.instance_of(facts.num_experts)
        shared = (where != NOWHERE).sum(axis=1) > 1  # [C, E]
        each = np.arange(len(plans))[:, None, None]
        plan, to, to_instance = np.nonzero((experts != NOWHERE) & shared[each, experts])
        of_expert = where[plan, :, experts[plan, to, to_instance]]  # [instances, R]
        of_expert[np.arange(plan.size), to] = NOWHERE
        k, giver = np.nonzero(of_expert != NOWHERE)
        return cls(plan[k], to[k], to_instance[k], giver, of_expert[k, giver])

    def among(self, plans: np.ndarray) -> "Siblings":
        """Those of some plans (ascending), which are renumbered from 0."""
        number = np.full(int(self.plan.max(initial=-1)) + 1, NOWHERE)
        known = plans[plans < number.size]
        number[known] = np.arange(known.size)
        return dataclasses.replace(self, plan=number[self.plan]).at(number[self.plan] != NOWHERE)

    def at(self, index: np.ndarray) -> "Siblings":
        """Those at `index`."""
        return Siblings(*(getattr(self, field.name)[index] for field in dataclasses.fields(self)))


@dataclasses.dataclass
class Limits:
    """What a round of one kind may move in C plans.

    Attributes:
      over: int64 [C, R], rows that a rank should give away.
      slack: int64 [C, R], rows that a rank may receive.
      more_inbound: int64 [C, R], of these from other domains.
      more_outbound: int64 [C, R], rows that a source may send to another domain besides those it does.
    """

    over: np.ndarray
    slack: np.ndarray
    more_inbound: np.ndarray
    more_outbound: np.ndarray

    @classmethod
    def of(cls, facts: Facts, plans: Plans, kind: Kind, *, level: bool) -> "Limits":
        """Measures the plans: half of what is above the mean should go."""
        flow = plans.quota.sum(axis=3)  # [C, source, rank]
        load = flow.sum(axis=1)
        crosses = facts.problem.topology.crosses_domains()
        far = flow * crosses
        inbound, outbound = far.sum(axis=1), far.sum(axis=2)
        most = level_of(load, facts.speed).max(axis=1, keepdims=True)
        most_far = np.maximum(inbound.max(axis=1), outbound.max(axis=1))[:, None]
        load_cut = np.full_like(most, facts.fair) if level else facts.fair + (most - facts.fair) // 2
        inbound_cut = (inbound.sum(axis=1, keepdims=True) // facts.num_ranks + most_far) // 2
        over = {
            Kind.LOAD: load - share(load_cut, facts.speed),
            Kind.INBOUND: inbound - inbound_cut,
            Kind.HOME: inbound,
        }
        more_inbound = np.maximum((inbound_cut if kind == Kind.INBOUND else most_far) - inbound, 0)
        more_outbound = np.maximum(most_far - outbound, 0)
        return cls(
            over=over[kind],
            slack=share(load_cut if kind == Kind.LOAD else most, facts.speed) - load,
            more_inbound=np.full_like(more_inbound, _ANY) if level else more_inbound,
            more_outbound=np.full_like(more_outbound, _ANY) if level else more_outbound,
        )


def _round(facts: Facts, plans: Plans, siblings: Siblings, kind: Kind, *, level: bool) -> Plans:
    """One round: each rank asks one instance for rows, and each instance grants one request; a new set of plans."""
    limits = Limits.of(facts, plans, kind, level=level)
    siblings = siblings.at(
        (limits.slack[siblings.plan, siblings.to] > 0) & (limits.over[siblings.plan, siblings.giver] > 0)
    )
    moves, amount = _grant(facts, plans, siblings, limits, kind)
    taken = _take(facts, plans, moves, amount, limits, kind)
    result = Plans(plans.slot_expert.copy(), plans.quota.copy())
    quota = result.quota.transpose(0, 2, 3, 1)  # [C, R, J, source], a view
    quota[moves.plan, moves.giver, moves.instance] -= taken
    quota[moves.plan, moves.to, moves.to_instance] += taken
    return result


def _grant(facts: Facts, plans: Plans, siblings: Siblings, limits: Limits, kind: Kind) -> tuple[Siblings, np.ndarray]:
    """The requests that are granted, at most one of each rank and to each instance, and the rows of each."""
    num_ranks, instances = facts.num_ranks, plans.quota.shape[3]
    s = siblings
    want = np.minimum(limits.slack[s.plan, s.to], limits.over[s.plan, s.giver])
    want = np.minimum(want, _movable(facts, plans, s, limits, kind))
    s, want = s.at(want > 0), want[want > 0]

    asked = first_largest_of_each(s.plan * num_ranks + s.to, want)
    s, want = s.at(asked), want[asked]

    at = (s.plan * num_ranks + s.giver) * instances + s.instance
    order = np.argsort(at, kind="stable")
    s, want, at = s.at(order), want[order], at[order]
    granted = first_largest_of_each(at, want)
    s, want = s.at(granted), want[granted]

    # A rank gives no more than what it has over, lowest instance first.
    giver = s.plan * num_ranks + s.giver
    before = np.concatenate([[0], want.cumsum()])
    before = before[:-1] - before[np.searchsorted(giver, giver)]
    amount = np.clip(limits.over[s.plan, s.giver] - before, 0, want)
    return s.at(amount > 0), amount[amount > 0]


def _movable(facts: Facts, plans: Plans, s: Siblings, limits: Limits, kind: Kind) -> np.ndarray:
    """Rows that this kind of round may move between each two siblings, int64 [n]."""
    by_source = plans.quota[s.plan, :, s.giver, s.instance]  # [n, source]
    rows = by_source.sum(axis=1)
    here, there = facts.domain[s.to], facts.domain[s.giver]
    of_here = np.where(facts.domain == here[:, None], by_source, 0).sum(axis=1)
    of_there = np.where(facts.domain == there[:, None], by_source, 0).sum(axis=1)
    back = np.where(here != there, of_here, 0)
    inbound = limits.more_inbound[s.plan, s.to]
    match kind:
        case Kind.LOAD:
            return of_here + np.minimum(inbound, rows - of_here)
        case Kind.INBOUND:
            return back + np.minimum(inbound, rows - of_there - back)
        case Kind.HOME:
            return back


def _take(facts: Facts, plans: Plans, s: Siblings, amount: np.ndarray, limits: Limits, kind: Kind) -> np.ndarray:
    """Rows of each source that each granted request moves, int64 [n, R]; those first that save traffic."""
    by_source = plans.quota[s.plan, :, s.giver, s.instance]
    here, there = facts.domain[s.to][:, None], facts.domain[s.giver][:, None]
    own = np.arange(facts.num_ranks) == s.to[:, None]
    from_here, from_there = facts.domain == here, facts.domain == there
    rank = np.select(
        [own, from_here & ~from_there, from_here & from_there, ~from_here & ~from_there], [0, 1, 2, 3], default=4
    )
    inbound = limits.more_inbound[s.plan, s.to]
    match kind:
        case Kind.LOAD:
            limit = np.where(rank == 4, np.minimum(by_source, limits.more_outbound[s.plan]), by_source)
            most = np.where(rank <= 2, limit, 0).sum(axis=1) + inbound
        case Kind.INBOUND:
            limit = np.where(from_there, 0, by_source)
            most = np.where(rank <= 2, limit, 0).sum(axis=1) + inbound
        case Kind.HOME:
            limit = np.where(from_here & ~from_there, by_source, 0)
            most = limit.sum(axis=1)
    amount = np.minimum(amount, most)
    order = np.argsort(rank, axis=1, kind="stable")
    limit = np.take_along_axis(limit, order, axis=1)
    taken = np.clip(amount[:, None] - (limit.cumsum(axis=1) - limit), 0, limit)
    result = np.zeros_like(taken)
    np.put_along_axis(result, order, taken, axis=1)
    return result
