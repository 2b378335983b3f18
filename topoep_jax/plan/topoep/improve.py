"""Rounds that move rows between a plan's instances; xla_ffi/plan/topoep/improve.h is the same in C++."""

import dataclasses
import enum
from collections.abc import Iterable, Iterator

import numpy as np

from topoep_jax.plan.finish import Worth, worth_of
from topoep_jax.plan.links import link_ps
from topoep_jax.plan.problem import MAX_ROWS
from topoep_jax.plan.topoep.context import NOWHERE, Context
from topoep_jax.plan.topoep.effort import QUARTERS, Kind
from topoep_jax.plan.topoep.measure import Measure
from topoep_jax.plan.topoep.state import State

THRIFTY_QUARTERS = 3
"""Quarters of the mean rank's traffic between domains that a thrifty phase adds to the objective."""


class Target(enum.Enum):
    """What a phase counts as the cost of a plan."""

    THRIFTY = enum.auto()
    """The objective + 3/4 x the time of the rows that the mean rank sends to other domains."""
    EAGER = enum.auto()
    """The objective."""
    LEVEL = enum.auto()
    """The most aligned rows of a rank; traffic may rise."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A rank asks for rows that one of its instances could take over from another of the same expert.

    Attributes:
      want: rows, at least 1.
      to: the rank that asks.
      to_instance: its instance.
      giver: the rank that is asked.
      instance: its instance.
    """

    want: int
    to: int
    to_instance: int
    giver: int
    instance: int


class Improver:
    """Improves one plan in place, phase by phase."""

    def __init__(self, context: Context, state: State) -> None:
        """Works on `state`."""
        self.context = context
        self.state = state

    def run(self, target: Target, kinds: Iterable[Kind]) -> None:
        """One phase: a round of each kind in turn, undone where it does not lower the cost; idle slots are freed.

        A kind that was undone is left out until another round is kept: it would do the same again.
        """
        cost = self.cost(target)
        undone: set[Kind] = set()
        for kind in kinds:
            if kind in undone:
                continue
            quota = self.state.quota.copy()
            _Round(self.context, self.state, kind, bound=target != Target.LEVEL).run()
            new = self.cost(target)
            if new < cost:
                cost = new
                undone.clear()
            else:
                self.state.quota = quota
                undone.add(kind)
        self.state.drop_idle()

    def now_worth(self) -> Worth:
        """What the plan is worth as it is."""
        return worth_of(self.state.plan(), self.context.problem)

    def cost(self, target: Target) -> int:
        """What a phase brings down."""
        now, cost = self.now_worth(), self.context.problem.cost
        match target:
            case Target.THRIFTY:
                mean_rows = Measure(self.context, self.state).total_inter // self.context.ranks
                mean_ps = link_ps(2 * cost.token_bytes * mean_rows, cost.inter_fs_per_byte)
                return now.cost + THRIFTY_QUARTERS * mean_ps // QUARTERS
            case Target.EAGER:
                return now.cost
            case Target.LEVEL:
                return now.aligned


class _Round:
    """One round: every rank asks one instance for rows, every instance grants one request, and the rows move.

    A round of a kind takes rows off ranks that have too much of something, half of the way to the mean:

    - LOAD: of load, above load_cut = fair + floor((level - fair) / 2), or above the fair load where traffic does not
      count;
    - INBOUND: of rows from other domains, above inter_cut = floor((mean + most) / 2);
    - HOME: of these too, but above none, and it moves only rows that the other rank's domain sends.

    `most` is what the busiest rank receives from or sends to other domains, `level` the highest level of a load.

    Attributes:
      over: [R], rows that a rank should give away.
      slack: [R], rows that a rank may take over: up to its share of load_cut in a round of LOAD, else of the level.
      inter_room: [R], rows that a rank may receive from other domains on top of those that it does: up to inter_cut in
        a round of INBOUND, else up to the most.
      outer_room: int64 [R], rows that a source may send to other domains on top of those that it does: up to the most.
    """

    def __init__(self, context: Context, state: State, kind: Kind, *, bound: bool) -> None:
        """Measures the plan; unless `bound`, there is room for any traffic."""
        self.context, self.state, self.kind = context, state, kind
        self.now = now = Measure(context, state)
        load_cut = context.fair + (now.level - context.fair) // 2 if bound else context.fair
        inter_cut = (now.total_inter // context.ranks + now.inter) // 2
        inter_most = inter_cut if kind == Kind.INBOUND else now.inter
        load, inter_in = now.load.tolist(), now.inter_in.tolist()
        everyone = range(context.ranks)
        match kind:
            case Kind.LOAD:
                self.over = [load[rank] - context.share(rank, load_cut) for rank in everyone]
            case Kind.INBOUND:
                self.over = [rows - inter_cut for rows in inter_in]
            case Kind.HOME:
                self.over = inter_in
        most = load_cut if kind == Kind.LOAD else now.level
        self.slack = [context.share(rank, most) - load[rank] for rank in everyone]
        self.inter_room = [max(inter_most - rows, 0) if bound else MAX_ROWS for rows in inter_in]
        self.outer_room = np.maximum(now.inter - now.inter_out, 0) if bound else np.full(context.ranks, MAX_ROWS)

    def run(self) -> None:
        """Finds the requests, grants some of them, and moves their rows, all measured before any of them moves.

        An instance grants its largest request, the lower rank's of equals. A rank gives no more than what it has over:
        its lower instances come first, and each counts with what was asked.
        """
        granted: dict[tuple[int, int], Request] = {}
        for request in self._requests():
            at = (request.giver, request.instance)
            if at not in granted or request.want > granted[at].want:  # the lower rank of equals is there already
                granted[at] = request
        left = self.over.copy()
        moves = []
        for giver, instance in sorted(granted):
            request = granted[giver, instance]
            amount = min(request.want, left[giver])
            left[giver] -= request.want
            if amount > 0:
                moves.append((request, self._take(request, amount)))
        for request, taken in moves:
            self.state.quota[:, request.giver, request.instance] -= taken
            self.state.quota[:, request.to, request.to_instance] += taken

    def _requests(self) -> Iterator[Request]:
        """The request of each rank with slack: most rows; of equals to its lower instance, then of the lower giver."""
        experts = self.state.experts().tolist()
        holders: dict[int, list[tuple[int, int]]] = {}
        for rank, of_rank in enumerate(experts):
            for instance, expert in enumerate(of_rank):
                holders.setdefault(expert, []).append((rank, instance))
        for to, of_rank in enumerate(experts):
            best: Request | None = None
            for to_instance, expert in enumerate(of_rank):
                if expert == NOWHERE or self.slack[to] <= 0:
                    continue
                for giver, instance in holders[expert]:
                    if giver == to or self.over[giver] <= 0:
                        continue
                    want = min(self.slack[to], self.over[giver], self._movable(to, giver, instance))
                    if want > (best.want if best else 0):
                        best = Request(want, to, to_instance, giver, instance)
            if best:
                yield best

    def _movable(self, to: int, giver: int, instance: int) -> int:
        """Rows that this kind of round may move from an instance to a rank.

        Rows may come to another domain than their source's only while the taker has inter room.
        """
        to_domain, giver_domain = self.context.domain_of[to], self.context.domain_of[giver]
        by_domain = self.now.by_domain[giver, instance]
        rows, of_taker = int(self.now.rows[giver, instance]), int(by_domain[to_domain])
        back = of_taker if to_domain != giver_domain else 0  # they leave their domain no more
        match self.kind:
            case Kind.LOAD:
                return of_taker + min(self.inter_room[to], rows - of_taker)
            case Kind.INBOUND:
                return back + min(self.inter_room[to], rows - int(by_domain[giver_domain]) - back)
            case Kind.HOME:
                return back

    def _take(self, request: Request, amount: int) -> np.ndarray:
        """int64 [R], rows of each source that a granted request moves, at most `amount`.

        Best sources first, lower ranks first among equals: the taker itself, then sources of its domain where that is
        not the giver's, of the domain of both, of a third domain, and of the giver's domain. These last would send more
        to other domains: in a round of LOAD each as much as it has outer room, in the others nothing.
        """
        sources, domain_of = np.arange(self.context.ranks), self.context.domain_of
        stays = domain_of == domain_of[request.to]  # executed in the source's domain if moved
        stayed = domain_of == domain_of[request.giver]  # executed there now
        rank = np.select([sources == request.to, stays & ~stayed, stays, ~stayed], [0, 1, 2, 3], default=4)
        rows = self.state.quota[:, request.giver, request.instance]
        match self.kind:
            case Kind.LOAD:
                limit = np.where(rank == 4, np.minimum(rows, self.outer_room), rows)
            case Kind.INBOUND:
                limit = np.where(stayed, 0, rows)
            case Kind.HOME:
                limit = np.where(stays & ~stayed, rows, 0)
        amount = min(amount, int(limit[stays].sum()) + self.inter_room[request.to])
        order = np.argsort(rank, kind="stable")
        before = limit[order].cumsum() - limit[order]
        taken = np.zeros_like(rows)
        taken[order] = np.clip(amount - before, 0, limit[order])
        return taken
