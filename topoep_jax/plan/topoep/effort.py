"""How hard planner `topoep` searches; xla_ffi/plan/topoep/effort.h is the same in C++, but for what is tried."""

import dataclasses
import enum

from topoep_jax.topology import Topology

UNLIMITED = 2**31 - 1
"""`Candidate.own` of a main rank that may send any number of copies."""
NO_SPREAD = -1
"""`Candidate.spread` of a candidate whose copies stay where the domains put them."""
BY_INTERVALS = -1
"""`Candidate.price` of a candidate that spreads in one step, by interval overlap."""
PERMILLE = 1000
SIXTEENTHS = 16
"""Shares of slots and of inbound rows are multiples of one sixteenth."""
QUARTERS = 4
"""Prices are multiples of one quarter."""


class Kind(enum.IntEnum):
    """What a round of improvement moves rows away from."""

    LOAD = 0
    """Ranks with much to compute."""
    INBOUND = 1
    """Ranks that receive many rows from other domains."""
    HOME = 2
    """Ranks that receive rows from a domain that has an instance itself."""


LOAD, INBOUND, HOME = Kind


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to place replicas.

    Attributes:
      own: at most so many copies of a rank's mains leave its domain.
      inbound: serve remote experts until their main rank receives so many sixteenths of the mean inbound rows; 0 serves
        all that pay.
      sixteenths: share of a domain's slots given to remote experts; 0 is the empty plan.
      spread: permille above the fair load from which ranks spill over to any rank with a free slot, or `NO_SPREAD`.
      price: spread move by move, where a new copy must be worth so many quarters of its pull; or `BY_INTERVALS`.
    """

    own: int
    inbound: int
    sixteenths: int
    spread: int
    price: int


EMPTY = Candidate(own=UNLIMITED, inbound=0, sixteenths=0, spread=NO_SPREAD, price=BY_INTERVALS)


@dataclasses.dataclass(frozen=True)
class Effort:
    """A step of effort: the grid of candidates and the rounds of improvement.

    Attributes:
      own: half copies per other domain, or None for `UNLIMITED`; values below one copy are left out.
      inbound: as in `Candidate`.
      sixteenths: as in `Candidate`, all above 0.
      spread: as in `Candidate`.
      greedy_spread: the spreads of candidates that move rows off the empty plan one by one.
      price: as in `Candidate`, of these.
      empty_spread: the spreads of candidates that start from the empty plan, by intervals.
      fill_moves: most moves that level a domain after its slots were filled.
      thrifty: rounds of the first phase, which also pays for the mean traffic between domains.
      eager: rounds of the second phase, which looks at the objective alone.
      paper: whether the paper's plan is an entry too.
      refine_changes: plans of which one slot can change in at most so many ways are refined, change by change.
      refine_starts: so many of the cheapest entries are refined besides the one chosen.
      refine_waves: most changes of each.
    """

    own: tuple[int | None, ...]
    inbound: tuple[int, ...]
    sixteenths: tuple[int, ...]
    spread: tuple[int, ...]
    greedy_spread: tuple[int, ...]
    price: tuple[int, ...]
    empty_spread: tuple[int, ...]
    fill_moves: int
    thrifty: tuple[Kind, ...]
    eager: tuple[Kind, ...]
    paper: bool
    refine_changes: int
    refine_starts: int
    refine_waves: int


EFFORTS: dict[str, Effort] = {
    "fast": Effort(
        own=(None, 2),
        inbound=(0, 6),
        sixteenths=(8, 13, 16),
        spread=(NO_SPREAD,),
        greedy_spread=(),
        price=(),
        empty_spread=(0, 40),
        fill_moves=4,
        thrifty=(LOAD, INBOUND) * 2,
        eager=(LOAD, INBOUND),
        paper=True,
        refine_changes=0,
        refine_starts=0,
        refine_waves=0,
    ),
    "default": Effort(
        own=(None, 6, 4, 2, 1),
        inbound=(0, 2, 4, 6, 8, 12),
        sixteenths=(6, 8, 10, 12, 13, 14, 15, 16),
        spread=(NO_SPREAD,),
        greedy_spread=(0, 10, 20, 25, 30, 60, 100),
        price=(0, 1, 3, 6, 9),
        empty_spread=(0, 20, 40),
        fill_moves=8,
        thrifty=(LOAD, INBOUND) * 5 + (HOME, HOME),
        eager=(LOAD, INBOUND, HOME) * 3 + (LOAD,),
        paper=True,
        refine_changes=1024,
        refine_starts=24,
        refine_waves=8,
    ),
    "full": Effort(
        own=(None, 6, 4, 2, 1),
        inbound=(0, 2, 4, 6, 8, 12, 16),
        sixteenths=tuple(range(1, 17)),
        spread=(NO_SPREAD, 10),
        greedy_spread=(0, 10, 20, 25, 30, 40, 60, 80, 100, 150),
        price=(0, 1, 3, 6, 9),
        empty_spread=(0, 10, 20, 40, 80),
        fill_moves=8,
        thrifty=(LOAD, INBOUND) * 7 + (HOME, HOME),
        eager=(LOAD, INBOUND, HOME) * 5,
        paper=True,
        refine_changes=16384,
        refine_starts=4,
        refine_waves=8,
    ),
}
"""Every step of effort by name, from quick to thorough."""


def candidates(topology: Topology, num_slots: int, effort: Effort) -> tuple[Candidate, ...]:
    """The candidates in order, the empty plan first; those that could not differ from an earlier one are left out."""
    if num_slots == 0 or topology.num_ranks == 1:
        return (EMPTY,)
    if topology.num_domains == 1:  # nothing is remote: one filling is all there is
        effort = dataclasses.replace(effort, own=(None,), inbound=(0,), sixteenths=(16,))
    others = max(1, topology.num_domains - 1)
    limits = [UNLIMITED if halves is None else others * halves // 2 for halves in effort.own]
    own = [limit for limit in dict.fromkeys(limits) if limit >= 1]
    by_share = {served_experts(topology, num_slots, share): share for share in reversed(effort.sixteenths)}
    sixteenths = [share for share in effort.sixteenths if share in by_share.values()]
    return (
        EMPTY,
        *(dataclasses.replace(EMPTY, spread=s, price=p) for s in effort.greedy_spread for p in effort.price),
        *(dataclasses.replace(EMPTY, spread=s) for s in effort.empty_spread),
        *(
            Candidate(limit, target, share, spread, BY_INTERVALS)
            for limit in own
            for target in effort.inbound
            for share in sixteenths
            for spread in effort.spread
        ),
    )


def served_experts(topology: Topology, num_slots: int, sixteenths: int) -> tuple[int, ...]:
    """K_d of each domain of G_d ranks, the most remote experts that it serves: ceil(sixteenths x G_d x N / 16)."""
    sizes = [len(topology.ranks_of_domain(domain)) for domain in range(topology.num_domains)]
    return tuple(-(-sixteenths * size * num_slots // SIXTEENTHS) for size in sizes)
