"""Which remote experts each domain serves itself."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from topoep_jax.plan.topoep.effort import Candidate, served_experts
from topoep_jax.plan.topoep.facts import Facts


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Every (domain, remote expert) whose replica could pay, by domain, then by weight, heaviest first, then by expert.

    Attributes:
      domain: int64 [n].
      expert: int64 [n].
      position: int64 [n], place of the pair among those of the expert's main rank, heaviest first.
      left: int64 [n], rows that the main rank still receives from other domains when all pairs before are served.
      mean_inbound: rows that a rank receives from other domains without replicas, on average.
    """

    domain: np.ndarray
    expert: np.ndarray
    position: np.ndarray
    left: np.ndarray
    mean_inbound: int


def find_pairs(facts: Facts) -> Pairs:
    """All pairs that pay, and their order at the main rank and at the domain."""
    inbound = np.zeros(facts.num_ranks, np.int64)
    away = facts.demand.sum(axis=0) - facts.demand[facts.home, np.arange(facts.num_experts)]
    np.add.at(inbound, facts.main_rank, away)

    domain, expert = np.nonzero(facts.pays)
    heavy = -facts.demand[domain, expert]
    main = facts.main_rank[expert]
    at_main = np.lexsort((expert, domain, heavy, main))
    rows = facts.demand[domain, expert][at_main]
    count = np.bincount(main, minlength=facts.num_ranks)
    first = np.repeat(count.cumsum() - count, count)  # of the main rank's pairs, in the order `at_main`
    before = np.concatenate([[0], rows.cumsum()])
    position, left = np.empty_like(expert), np.empty_like(expert)
    position[at_main] = np.arange(expert.size) - first
    left[at_main] = inbound[main[at_main]] - (before[:-1] - before[first])

    at_domain = np.lexsort((expert, heavy, domain))
    return Pairs(
        domain[at_domain],
        expert[at_domain],
        position[at_domain],
        left[at_domain],
        int(inbound.sum()) // facts.num_ranks,
    )


def select(facts: Facts, pairs: Pairs, candidates: Sequence[Candidate]) -> np.ndarray:
    """Whether a candidate serves a pair, bool [C, n]: the heaviest K_d of each domain that its main rank lets go."""
    topology, num_slots = facts.problem.topology, facts.problem.num_slots
    own, inbound = (np.array([getattr(c, name) for c in candidates])[:, None] for name in ("own", "inbound"))
    most = np.array([served_experts(topology, num_slots, c.sixteenths) for c in candidates])  # [C, M]
    target = np.where(inbound == 0, -1, pairs.mean_inbound * inbound // 16)
    chosen = (pairs.position < own) & (pairs.left > target)
    return chosen & (place_in_domain(facts, pairs, chosen) < most[:, pairs.domain])


def place_in_domain(facts: Facts, pairs: Pairs, chosen: np.ndarray) -> np.ndarray:
    """How many chosen pairs of its domain precede each pair, int64 [C, n]."""
    before = np.concatenate([np.zeros((len(chosen), 1), np.int64), chosen.cumsum(axis=1)], axis=1)
    count = np.bincount(pairs.domain, minlength=facts.num_domains)
    first = np.repeat(count.cumsum() - count, count)
    return before[:, :-1] - before[:, first]
