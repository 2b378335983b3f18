"""One domain filled in one way; xla_ffi/plan/topoep/fill_case.h is the same in C++."""

import dataclasses

from topoep_jax.plan.hardware import NOMINAL_SPEED
from topoep_jax.plan.links import link_ps
from topoep_jax.plan.topoep.context import NOWHERE, Context
from topoep_jax.plan.topoep.effort import PERMILLE
from topoep_jax.plan.topoep.select import Selection

VARIANTS = 4
"""Ways to fill a domain."""
LOW_PERMILLE = 1010
"""Of the fair load: up to this the first two variants fill a rank."""
HIGH_PERMILLE = 1200
"""The same of the other two."""


@dataclasses.dataclass
class Item:
    """Rows in search of a slot.

    Attributes:
      expert: whose rows they are.
      rows: still to place.
      remote: whether it is a remote expert that the domain serves; else it was carved off a main of the domain.
      placed: whether it has a slot already.
    """

    expert: int
    rows: int
    remote: bool
    placed: bool = False


class FillCase:
    """One domain in one variant, from the mains alone to a filled domain.

    A variant is a level up to which ranks fill, and whether remote experts are dealt out evenly. The level is
    `LOW_PERMILLE` (variants 0 and 1) or `HIGH_PERMILLE` (2 and 3) of the fair load, or of the domain's own fair load,
    ceil(rows it executes x 1000 / its speeds), if that is larger; rounded down. In odd variants no rank holds more than
    ceil(remote experts served / ranks) remote experts, at least 1. Of equal ranks and experts the lower comes first.

    Attributes:
      ranks: the G ranks of the domain, ascending; a position g is an index into it.
      level: rows of a nominal rank up to which ranks are filled.
      remote_limit: most remote experts of a rank.
      slot_expert: [G][N], `NOWHERE` if free.
      slot_rows: [G][N].
      main_rows: [G][P].
      load: [G], rows of each rank.
      remote: [G], remote experts that each rank holds.
      items: the remote experts served, most rows first; then carved pieces, by rank, of its largest main first.
      infeasible: whether a remote expert found no slot at all.
    """

    def __init__(self, context: Context, selection: Selection, domain: int, variant: int) -> None:
        """Starts with the rows that stay at home at their mains, and carves off what is above the level."""
        self.context = context
        self.domain = domain
        self.ranks: list[int] = context.members[domain].tolist()
        size, served = len(self.ranks), selection.selected[domain]
        speed = int(context.speed[self.ranks].sum())
        own_fair = -(-int(selection.domain_rows[domain]) * NOMINAL_SPEED // speed)
        permille = LOW_PERMILLE if variant < VARIANTS // 2 else HIGH_PERMILLE
        self.level = max(own_fair, context.fair) * permille // PERMILLE
        even = max(-(-len(served) // size), 1)
        self.remote_limit = min(even, context.slots) if variant % 2 else context.slots
        self.slot_expert = [[NOWHERE] * context.slots for _ in self.ranks]
        self.slot_rows = [[0] * context.slots for _ in self.ranks]
        self.main_rows: list[list[int]] = selection.home_rows.reshape(context.ranks, -1)[self.ranks].tolist()
        self.load = [sum(rows) for rows in self.main_rows]
        self.remote = [0] * size
        self.items = [Item(expert, int(context.demand[domain, expert]), remote=True) for expert in served]
        self.infeasible = False
        for g in range(size):
            self._carve(g)

    def fill(self, moves: int) -> None:
        """Places the items, the largest first; then the busiest rank gives rows away, at most `moves` times."""
        while self._place_next():
            pass
        load = self.load.copy()
        for item in self.items:
            self._settle(item, load)
        for _ in range(0 if self.infeasible else moves):
            if not self._move_half_gap():
                break

    def cost(self) -> int:
        """Picoseconds: compute of the slowest rank, and on each class of link the most copies that one rank pulls.

        row_ps x L + floor(inter_fs_per_byte x W x remote / 1000) + floor(intra_fs_per_byte x W x local / 1000) at W =
        expert_bytes. L is the level of a rank's load, remote and local count its slots with remote experts and with
        those of its domain: each the maximum over ranks, not always of the same one.
        """
        cost = self.context.problem.cost
        local = max(
            sum(expert != NOWHERE and not self._is_remote(expert) for expert in experts) for experts in self.slot_expert
        )
        return (
            cost.row_ps * max(self._level_of(g) for g in range(len(self.ranks)))
            + link_ps(max(self.remote) * cost.expert_bytes, cost.inter_fs_per_byte)
            + link_ps(local * cost.expert_bytes, cost.intra_fs_per_byte)
        )

    def _carve(self, g: int) -> None:
        """Takes what a rank has above its share of the level off its mains, the largest first (the lower of equals)."""
        excess = -self._room(g)
        for main in sorted(range(self.context.mains), key=lambda main: -self.main_rows[g][main]):
            piece = min(excess, self.main_rows[g][main])
            if piece <= 0:
                return
            self.items.append(Item(self.ranks[g] * self.context.mains + main, piece, remote=False))
            self.main_rows[g][main] -= piece
            self.load[g] -= piece
            excess -= piece

    def _place_next(self) -> bool:
        """Gives the largest item that some rank may take a slot on the one with most room; False if none is left.

        The largest has most rows left; of equal items the first of `items` goes, of equal rooms to the lower rank. Of
        each remote expert that still has rows to place one slot is waited for. Only if more are free does a remote
        expert with more rows than the room leave the rest for another slot; carved pieces do so anyway. Without room a
        remote expert is placed whole.
        """
        free = sum(experts.count(NOWHERE) for experts in self.slot_expert)
        waiting = sum(item.remote and item.rows > 0 for item in self.items)
        for item in sorted(self.items, key=lambda item: -item.rows):
            targets = [g for g in range(len(self.ranks)) if self._may_take(g, item, free, waiting)]
            if targets:
                target = max(targets, key=self._room)
                splits = 0 < self._room(target) < item.rows and (free > waiting or not item.remote)
                rows = self._room(target) if splits else item.rows
                self._add(target, item.expert, rows)
                item.rows -= rows
                item.placed = True
                return True
        return False

    def _may_take(self, g: int, item: Item, free: int, waiting: int) -> bool:
        """Whether rank g may get an instance for an item, where so many slots are free and are waited for.

        A remote expert with a slot already gets more if each that waits, itself included, can have one; a carved piece
        if another slot is left, and only on a rank with room.
        """
        if item.rows == 0 or NOWHERE not in self.slot_expert[g] or self._holds(g, item.expert):
            return False
        if item.remote:
            return self.remote[g] < self.remote_limit and (not item.placed or free >= waiting)
        return self._room(g) > 0 and free > waiting

    def _settle(self, item: Item, load: list[int]) -> None:
        """What found no slot returns to its main, or joins the holder (the lower of equals) with the least `load`.

        That is the load before any item settled: [G].
        """
        if item.rows == 0:
            return
        main = self.context.main_rank[item.expert]
        holders = [g for g in range(len(self.ranks)) if self._holds(g, item.expert)]
        if not item.remote:
            self._add(self.ranks.index(main), item.expert, item.rows)
        elif holders:
            self._add(min(holders, key=load.__getitem__), item.expert, item.rows)
        else:
            self.infeasible = True

    def _move_half_gap(self) -> bool:
        """The busiest rank (the lower of equals) gives another as many rows of an instance as half of the gap allows.

        At speeds v and v' and loads L and L', half of the gap is floor((L v' - L' v) / (v + v')). The most rows go, of
        equals to a rank that holds the expert, then to the lower rank, then of the lower instance. False if none can.
        """
        busy = max(range(len(self.ranks)), key=self._level_of)
        speed, instances = self.context.speed[self.ranks].tolist(), self._instances(busy)
        best, move = (0, True), None
        for g in range(len(self.ranks)):
            half = (self.load[busy] * speed[g] - self.load[g] * speed[busy]) // (speed[busy] + speed[g])
            for instance, (expert, rows) in enumerate(instances):
                held = self._holds(g, expert)
                if (min(half, rows), held) > best and (held or self._may_add(g, expert)):
                    best, move = (min(half, rows), held), (g, instance, expert)
        if move is None:
            return False
        target, instance, expert = move
        self._remove(busy, instance, best[0])
        self._add(target, expert, best[0])
        return True

    def _instances(self, g: int) -> list[tuple[int, int]]:
        """(expert, rows) of each instance of rank g, mains first; (`NOWHERE`, 0) of a free slot."""
        first = self.ranks[g] * self.context.mains
        mains = [(first + main, rows) for main, rows in enumerate(self.main_rows[g])]
        return mains + list(zip(self.slot_expert[g], self.slot_rows[g], strict=True))

    def _may_add(self, g: int, expert: int) -> bool:
        """Whether rank g has a free slot for another expert, which if remote keeps within `remote_limit`."""
        full = self._is_remote(expert) and self.remote[g] >= self.remote_limit
        return NOWHERE in self.slot_expert[g] and not full

    def _add(self, g: int, expert: int, rows: int) -> None:
        """Adds rows to the instance of an expert on rank g, which is put into the first free slot if there is none."""
        self.load[g] += rows
        if self.context.main_rank[expert] == self.ranks[g]:
            self.main_rows[g][expert % self.context.mains] += rows
            return
        if expert not in self.slot_expert[g]:
            self.slot_expert[g][self.slot_expert[g].index(NOWHERE)] = expert
            self.remote[g] += self._is_remote(expert)
        self.slot_rows[g][self.slot_expert[g].index(expert)] += rows

    def _remove(self, g: int, instance: int, rows: int) -> None:
        """Takes rows from an instance of rank g; a slot without rows becomes free."""
        self.load[g] -= rows
        if instance < self.context.mains:
            self.main_rows[g][instance] -= rows
            return
        slot = instance - self.context.mains
        self.slot_rows[g][slot] -= rows
        if self.slot_rows[g][slot] == 0:
            self.remote[g] -= self._is_remote(self.slot_expert[g][slot])
            self.slot_expert[g][slot] = NOWHERE

    def _holds(self, g: int, expert: int) -> bool:
        return bool(self.context.main_rank[expert] == self.ranks[g]) or expert in self.slot_expert[g]

    def _is_remote(self, expert: int) -> bool:
        return bool(self.context.home[expert] != self.domain)

    def _room(self, g: int) -> int:
        """Rows from the load of rank g up to its share of the level, in rows of this rank; negative if above."""
        return self.context.share(self.ranks[g], self.level) - self.load[g]

    def _level_of(self, g: int) -> int:
        return self.context.level(self.ranks[g], self.load[g])
