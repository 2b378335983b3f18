"""Busy ranks spill over to ranks with room, by intervals; xla_ffi/plan/topoep/spread.h is the same in C++."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from topoep_jax.plan.topoep.context import Context
from topoep_jax.plan.topoep.effort import PERMILLE
from topoep_jax.plan.topoep.state import State, Taker


class _Item(NamedTuple):
    """Rows of an instance that its rank spills, from `start` to `end` on the line of all that is spilled."""

    start: int
    end: int
    giver: int
    instance: int
    expert: int


def spread(context: Context, permille: int, state: State) -> None:
    """Ranks above the level, `permille` above the fair load, spill over: anywhere, in their domain, then anywhere."""
    level = context.fair * (PERMILLE + permille) // PERMILLE
    everyone = (np.arange(context.ranks),)
    for scopes in (everyone, context.members, everyone):
        for ranks in scopes:
            _spill_over(context, level, ranks.tolist(), state)
        state.drop_idle()


def _spill_over(context: Context, level: int, ranks: list[int], state: State) -> None:
    """One pass among some ranks: what they have above the level and what others have below it are laid end to end.

    The level gives each rank its limit, `Context.share`. On the first line lies what is above the limits, on the second
    the room of ranks that are below theirs and have a free slot; on either the rank with the most comes first, the
    lower one of equals. A rank with room looks at the items that overlap its own stretch, and takes as many rows as
    overlap, of the largest overlaps first (of equals the first on the line; of an expert only one), if it may hold the
    expert and does not, while it has a free slot, the lowest first. The takers of an item share it in their order.
    """
    load = state.rows().sum(axis=1).tolist()
    limit = [context.share(rank, level) for rank in range(context.ranks)]
    items = _spilled(context, state, ranks, limit)
    room = {rank: limit[rank] - load[rank] for rank in ranks if load[rank] < limit[rank] and state.free_slots(rank)}
    shares: dict[_Item, list[Taker]] = {}
    end = 0
    for taker in _most_first(room):
        start, end = end, end + room[taker]
        offers = {item: min(end, item.end) - max(start, item.start) for item in items}
        held = set(state.experts()[taker].tolist())
        slots = state.free_slots(taker)
        for item in sorted(items, key=lambda item: -offers[item]):
            if offers[item] <= 0 or not slots:
                break
            if item.expert not in held and context.may_hold(taker, item.expert):
                held.add(item.expert)
                shares.setdefault(item, []).append(Taker(offers[item], taker, slots.pop(0)))
    for item, takers in shares.items():
        state.hand_out(item.giver, item.instance, takers)


def _spilled(context: Context, state: State, ranks: list[int], limit: list[int]) -> list[_Item]:
    """What some ranks have above their limits, as it lies on the line: by rank, its larger items first.

    A rank keeps its smallest instances whole, so that only the fullest spill.
    """
    rows, experts = state.rows().tolist(), state.experts().tolist()
    spill: dict[int, dict[int, int]] = {}
    for rank in ranks:
        kept, spill[rank] = 0, {}
        for instance in sorted(range(context.instances), key=rows[rank].__getitem__):
            stays = min(rows[rank][instance], max(limit[rank] - kept, 0))
            kept += stays
            if rows[rank][instance] > stays:
                spill[rank][instance] = rows[rank][instance] - stays
    items, end = [], 0
    for giver in _most_first({rank: sum(of_rank.values()) for rank, of_rank in spill.items()}):
        for instance in _most_first(dict(sorted(spill[giver].items()))):
            start, end = end, end + spill[giver][instance]
            items.append(_Item(start, end, giver, instance, experts[giver][instance]))
    return items


def _most_first(amount: dict[int, int]) -> Iterable[int]:
    """The keys (which ascend) by amount, the most first, the lower key of equals."""
    return sorted(amount, key=lambda key: -amount[key])
