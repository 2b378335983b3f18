"""Fills the slots of every domain on its own: remote experts that it serves, and second instances of busy mains."""

import dataclasses

import numpy as np

from topoep_jax.plan.topoep.facts import NOWHERE, Facts, level_of, share
from topoep_jax.plan.topoep.narrow import first_smallest
from topoep_jax.plan.topoep.select import Pairs, place_in_domain

VARIANTS = ((1010, False), (1010, True), (1200, False), (1200, True))
"""What a domain tries: permille of the mean load up to which a rank is filled, and whether remote experts are dealt
out evenly."""
CLOSED = -2
"""Slot of a position that has no rank (domains may be uneven)."""
_FAR = np.iinfo(np.int64).max


@dataclasses.dataclass
class Domains:
    """B attempts to fill a domain; G positions are its ranks, ascending.

    Attributes:
      domain: int64 [B].
      member: int64 [B, G], rank at each position.
      speed: int64 [B, G].
      limit: int64 [B, G], rows up to which a rank is filled.
      most_remote: int64 [B], remote experts that a rank may hold.
      main_rows: int64 [B, G, P].
      slot_expert: int64 [B, G, N], `NOWHERE` if free.
      slot_rows: int64 [B, G, N].
      remote_count: int64 [B, G].
    """

    domain: np.ndarray
    member: np.ndarray
    speed: np.ndarray
    limit: np.ndarray
    most_remote: np.ndarray
    main_rows: np.ndarray
    slot_expert: np.ndarray
    slot_rows: np.ndarray
    remote_count: np.ndarray

    def load(self) -> np.ndarray:
        """int64 [B, G], rows of each rank."""
        return self.main_rows.sum(axis=2) + self.slot_rows.sum(axis=2)


@dataclasses.dataclass
class Items:
    """Rows in search of a slot: I per attempt, remote experts first, then what was carved off the mains.

    Attributes:
      expert: int64 [B, I], `NOWHERE` for none.
      rows: int64 [B, I], not yet placed.
      held: bool [B, I, G], whether a position has an instance of the expert.
      remote: bool [I].
    """

    expert: np.ndarray
    rows: np.ndarray
    held: np.ndarray
    remote: np.ndarray


def fill(facts: Facts, pairs: Pairs, chosen: np.ndarray, moves: int) -> tuple[np.ndarray, np.ndarray]:
    """Fills all domains for each selection of pairs (bool [C, n]), and levels each with at most so many moves.

    Returns:
      The experts of the slots, int64 [C, R, N], and the rows of all instances, int64 [C, R, J].
    """
    count, num_domains = len(chosen), facts.num_domains
    expert, rows = _served(facts, pairs, chosen)
    domains = _attempts(facts, pairs, chosen)
    repeat = len(VARIANTS)
    items = _carve(facts, domains, expert.repeat(repeat, axis=0), rows.repeat(repeat, axis=0))
    feasible = _place(domains, items)
    _level(facts, domains, moves)
    cost = np.where(feasible, _cost(facts, domains), _FAR).reshape(-1, repeat)
    best = cost.argmin(axis=1) + np.arange(count * num_domains) * repeat
    return _by_rank(facts, domains, best, count)


def _served(facts: Facts, pairs: Pairs, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Remote experts that each domain of each selection serves, heaviest first, and their rows: [C x M, K]."""
    place = place_in_domain(facts, pairs, chosen)
    which, pair = np.nonzero(chosen)
    place = place[which, pair]
    shape = (len(chosen), facts.num_domains, int(place.max(initial=-1)) + 1)
    expert = np.full(shape, NOWHERE, np.int64)
    rows = np.zeros(shape, np.int64)
    domain = pairs.domain[pair]
    expert[which, domain, place] = pairs.expert[pair]
    rows[which, domain, place] = facts.demand[domain, pairs.expert[pair]]
    flat = (shape[0] * shape[1], shape[2])
    return expert.reshape(flat), rows.reshape(flat)


def _attempts(facts: Facts, pairs: Pairs, chosen: np.ndarray) -> Domains:
    """Every domain of every selection in every variant, before anything is moved: all rows are at the mains."""
    count, num_domains, size = len(chosen), *facts.members.shape
    mains, num_slots = facts.problem.mains_per_rank, facts.problem.num_slots
    which, pair = np.nonzero(chosen)
    domain, expert = pairs.domain[pair], pairs.expert[pair]
    served = facts.demand[domain, expert]
    at_main = np.repeat(facts.demand.sum(axis=0)[None], count, axis=0)  # [C, E]
    np.subtract.at(at_main, (which, expert), served)
    total = np.zeros((count, num_domains), np.int64)  # rows that each domain executes
    np.add.at(total, (which, domain), served)
    np.add.at(total.T, facts.home, at_main.T)
    num_served = np.zeros((count, num_domains), np.int64)
    np.add.at(num_served, (which, domain), 1)

    exists = facts.members != NOWHERE
    speed = np.where(exists, facts.speed[facts.members], 1000)
    domain_speed = np.where(exists, speed, 0).sum(axis=1)
    base = np.maximum(facts.fair, level_of(total, domain_speed))
    even = np.clip(-(-num_served // exists.sum(axis=1)), 1, num_slots)
    limit = np.stack([share((base * permille // 1000)[..., None], speed) for permille, _ in VARIANTS], axis=2)
    most_remote = np.stack([even if evenly else np.full_like(even, num_slots) for _, evenly in VARIANTS], axis=2)

    main_rows = at_main.reshape(count, facts.num_ranks, mains)[:, facts.members] * exists[..., None]
    slots = np.where(exists, NOWHERE, CLOSED)[..., None].repeat(num_slots, axis=2)

    def every(array: np.ndarray) -> np.ndarray:
        """[C or 1, M, 1 or variants, ..] -> [B, ..]."""
        full = np.broadcast_to(array, (count, num_domains, len(VARIANTS), *array.shape[3:]))
        return full.reshape(-1, *array.shape[3:]).copy()

    return Domains(
        domain=every(np.arange(num_domains)[None, :, None]),
        member=every(facts.members[None, :, None]),
        speed=every(speed[None, :, None]),
        limit=every(limit),
        most_remote=every(most_remote),
        main_rows=every(main_rows[:, :, None]),
        slot_expert=every(slots[None, :, None]),
        slot_rows=every(np.zeros_like(slots)[None, :, None]),
        remote_count=every(np.zeros((1, 1, 1, size), np.int64)),
    )


def _carve(facts: Facts, domains: Domains, expert: np.ndarray, rows: np.ndarray) -> Items:
    """Takes what exceeds the limit of each rank off its mains, largest main first; `expert` and `rows` are [B, K]."""
    batch, size, mains = domains.main_rows.shape
    excess = np.maximum(domains.load() - domains.limit, 0)
    order = np.argsort(-domains.main_rows, axis=2, kind="stable")
    largest = np.take_along_axis(domains.main_rows, order, axis=2)
    piece = np.clip(excess[..., None] - (largest.cumsum(axis=2) - largest), 0, largest)
    np.put_along_axis(domains.main_rows, order, largest - piece, axis=2)

    carved = (domains.member[..., None] * mains + order).reshape(batch, size * mains)
    piece = piece.reshape(batch, size * mains)
    position = np.broadcast_to(np.arange(size)[:, None], (size, mains)).ravel()
    first = np.argsort(piece == 0, axis=1, kind="stable")[:, : int((piece > 0).sum(axis=1).max(initial=0))]
    carved, piece, position = (np.take_along_axis(a, first, axis=1) for a in (carved, piece, position[None]))
    held = np.zeros((batch, expert.shape[1] + first.shape[1], size), bool)
    held[:, expert.shape[1] :] = position[..., None] == np.arange(size)
    return Items(
        expert=np.concatenate([expert, carved], axis=1),
        rows=np.concatenate([rows, piece], axis=1),
        held=held,
        remote=np.arange(held.shape[1]) < expert.shape[1],
    )


def _place(domains: Domains, items: Items) -> np.ndarray:
    """Puts the largest item into the emptiest rank, again and again; whether each attempt placed all remote experts.

    Slots are kept for remote experts that have none yet. What finds no slot joins an instance that exists.
    """
    _, size, num_slots = domains.slot_expert.shape
    load = domains.load()
    placed = np.zeros(items.rows.shape, bool)
    for _ in range(size * num_slots if items.remote.size else 0):
        free = domains.slot_expert == NOWHERE
        num_free = free.sum(axis=(1, 2))
        waiting = (items.rows[:, items.remote] > 0).sum(axis=1)
        room = domains.limit - load
        spare = num_free > waiting
        open_remote = free.any(axis=2) & (domains.remote_count < domains.most_remote[:, None])
        open_carved = free.any(axis=2) & (room > 0) & spare[:, None]
        wants = (items.rows > 0) & ~(items.remote & placed & (num_free < waiting)[:, None])
        feasible = np.where(items.remote[:, None], open_remote[:, None], open_carved[:, None])
        feasible &= wants[..., None] & ~items.held
        may = feasible.any(axis=2)
        b = np.flatnonzero(may.any(axis=1))
        if b.size == 0:
            break
        i = np.where(may[b], items.rows[b], -1).argmax(axis=1)
        g = np.where(feasible[b, i], room[b], -_FAR).argmax(axis=1)
        rows, left, remote = items.rows[b, i], room[b, g], items.remote[i]
        part = np.where((left > 0) & (left < rows) & (~remote | spare[b]), left, rows)
        slot = free[b, g].argmax(axis=1)
        domains.slot_expert[b, g, slot] = items.expert[b, i]
        domains.slot_rows[b, g, slot] = part
        domains.remote_count[b, g] += remote
        load[b, g] += part
        items.rows[b, i] -= part
        items.held[b, i, g] = True
        placed[b, i] = True
    return _join(domains, items, load)


def _join(domains: Domains, items: Items, load: np.ndarray) -> np.ndarray:
    """Gives what is left to the main it was carved from, or to the lightest holder; False where there is no holder."""
    left = items.rows > 0
    feasible = ~(left & items.remote & ~items.held.any(axis=2)).any(axis=1)
    mains = domains.main_rows.shape[2]

    b, i = np.nonzero(left & ~items.remote)
    expert = items.expert[b, i]
    g = (domains.member[b] == expert[:, None] // mains).argmax(axis=1)
    domains.main_rows[b, g, expert % mains] += items.rows[b, i]

    b, i = np.nonzero(left & items.remote & feasible[:, None])
    g = np.where(items.held[b, i], load[b], _FAR).argmin(axis=1)
    slot = (domains.slot_expert[b, g] == items.expert[b, i][:, None]).argmax(axis=1)
    domains.slot_rows[b, g, slot] += items.rows[b, i]
    return feasible


def _level(facts: Facts, domains: Domains, moves: int) -> None:
    """The busiest rank of each domain gives rows to another, half of the gap at a time."""
    mains = facts.problem.mains_per_rank
    live = np.arange(len(domains.domain))
    for _ in range(moves):
        d = Domains(*(getattr(domains, field.name)[live] for field in dataclasses.fields(Domains)))
        load = d.load()
        each = np.arange(live.size)
        busy = level_of(load, d.speed).argmax(axis=1)
        own = d.member[each, busy][:, None] * mains + np.arange(mains)
        expert = np.concatenate([own, d.slot_expert[each, busy]], axis=1)  # [B, J]
        rows = np.concatenate([d.main_rows[each, busy], d.slot_rows[each, busy]], axis=1)
        speed = d.speed[each, busy][:, None]
        half = (load[each, busy][:, None] * d.speed - load * speed) // (speed + d.speed)
        amount = np.minimum(rows[:, None], half[..., None])  # [B, G, J]
        holds = (d.slot_expert[:, :, None] == expert[:, None, :, None]).any(axis=3)
        holds |= facts.main_rank[expert][:, None] == d.member[..., None]
        remote = facts.home[expert] != d.domain[:, None]  # [B, J]
        free = (d.slot_expert == NOWHERE).any(axis=2)
        may_add = free[..., None] & (~remote[:, None] | (d.remote_count < d.most_remote[:, None])[..., None])
        feasible = (amount > 0) & (holds | may_add)
        some = np.flatnonzero(feasible.any(axis=(1, 2)))
        if some.size == 0:
            return
        best = first_smallest(feasible[some], -amount[some], ~holds[some])
        target, instance = np.divmod(best, expert.shape[1])
        _move(
            domains,
            live[some],
            busy[some],
            target,
            instance,
            expert[some, instance],
            amount[some, target, instance],
            remote[some, instance],
        )
        live = live[some]


def _move(
    domains: Domains,
    b: np.ndarray,
    source: np.ndarray,
    target: np.ndarray,
    instance: np.ndarray,
    expert: np.ndarray,
    amount: np.ndarray,
    remote: np.ndarray,
) -> None:
    """In each attempt of `b`, moves `amount` rows of an instance of position `source` to position `target`."""
    mains = domains.main_rows.shape[2]
    slot = instance - mains
    main = slot < 0
    domains.main_rows[b[main], source[main], instance[main]] -= amount[main]
    at = (b[~main], source[~main], slot[~main])
    domains.slot_rows[at] -= amount[~main]
    emptied = domains.slot_rows[at] == 0
    domains.slot_expert[tuple(a[emptied] for a in at)] = NOWHERE
    domains.remote_count[at[0][emptied], at[1][emptied]] -= remote[~main][emptied]

    main = domains.member[b, target] == expert // mains
    domains.main_rows[b[main], target[main], expert[main] % mains] += amount[main]
    b, target, expert, amount, remote = (a[~main] for a in (b, target, expert, amount, remote))
    held = domains.slot_expert[b, target] == expert[:, None]
    new = ~held.any(axis=1)
    slot = np.where(new, (domains.slot_expert[b, target] == NOWHERE).argmax(axis=1), held.argmax(axis=1))
    domains.slot_expert[b, target, slot] = expert
    domains.slot_rows[b, target, slot] += amount
    domains.remote_count[b, target] += remote & new


def _cost(facts: Facts, domains: Domains) -> np.ndarray:
    """Picoseconds of each attempt, int64 [B]: compute, and pulls by the most that one rank makes."""
    cost = facts.problem.cost
    held = domains.slot_rows > 0
    remote = facts.home[domains.slot_expert] != domains.domain[:, None, None]
    near, far = (np.where(held & side, 1, 0).sum(axis=2).max(axis=1) for side in (~remote, remote))
    compute = cost.row_ps * level_of(domains.load(), domains.speed).max(axis=1)
    pulls = [
        count * cost.expert_bytes * rate // 1000
        for count, rate in ((near, cost.intra_fs_per_byte), (far, cost.inter_fs_per_byte))
    ]
    return compute + pulls[0] + pulls[1]


def _by_rank(facts: Facts, domains: Domains, best: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Experts of slots [C, R, N] and rows of instances [C, R, J] of the best attempt at each domain."""
    num_ranks, mains, num_slots = facts.num_ranks, facts.problem.mains_per_rank, facts.problem.num_slots
    slot_expert = np.full((count, num_ranks, num_slots), NOWHERE, np.int64)
    rows = np.zeros((count, num_ranks, mains + num_slots), np.int64)
    member = domains.member[best]
    attempt, position = np.nonzero(member != NOWHERE)
    at = (attempt // facts.num_domains, member[attempt, position])
    slot_expert[at] = domains.slot_expert[best][attempt, position]
    rows[at] = np.concatenate([domains.main_rows[best], domains.slot_rows[best]], axis=2)[attempt, position]
    return slot_expert, rows
