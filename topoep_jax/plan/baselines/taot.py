"""TAOT: optimal transport of load from hot to cold ranks, topology in the cost, then whole replicas to match it.

Source: arXiv 2608.03676 (TAOT) and its code, `gen_assignment_sinkhorn` in
`megatron/core/transformer/moe/offloading_planner.py` of github.com/Zachary-wW/Loong-Megatron at 84aea31 (a fork of
baidu-baige/Loong-Megatron).

Steps:
  1. Sinkhorn-Knopp, 50 rounds: excess of hot ranks is transported to the room of cold ranks, kernel exp(-c/c_inter),
     c = 1 inside a domain and c_inter between domains.
  2. Spill per expert as in ECHO. N rounds; in each every rank may win one expert: each rank proposes the expert of
     best score, each expert accepts its best proposal and sends min(spill left, room left); repeat until nobody
     gives.
     score = min(spill, room) + alpha * bonus + 0.1 * alpha * transport / excess of the home rank,
     alpha = mean load / (E/R), bonus = 1 inside the home's domain and 1 / c_inter outside it.
  3. Every source gives a clone its share (rounded down); what is left over goes from low sources to low ranks.

Departures:
  - c_inter is the problem's own ratio of link rates; the source fixes 3.
  - Ties: hot ranks of one domain have the same ratio of transport to excess, so their experts tie wherever spill
    exceeds room. Here bonus and hint are rounded to six digits, and the lower expert, then the lower rank wins; in
    the source the rounding errors of float32 decide.
  - Float64 instead of float32. Floats make plans repeatable on one machine only. Moved rows are rounded down, as in
    the source.
"""

import numpy as np

from topoep_jax.plan.baselines.common import draft_of_quota, quota_in_proportion, spilled_rows
from topoep_jax.plan.problem import Draft, Problem

SINKHORN_ROUNDS = 50
TINY = 1e-8


def taot(omega: np.ndarray, problem: Problem) -> Draft:
    """Clones hot experts on cold ranks that optimal transport finds near, at most N per rank."""
    same_domain = ~problem.topology.crosses_domains()
    inter, intra = problem.cost.inter_fs_per_byte, problem.cost.intra_fs_per_byte
    inter_cost = inter / intra if inter and intra else 1.0
    moved = clone(omega.sum(axis=0), same_domain, inter_cost, problem.num_slots)
    return draft_of_quota(quota_in_proportion(moved, omega, problem), problem)


def clone(load: np.ndarray, same_domain: np.ndarray, inter_cost: float, num_slots: int) -> np.ndarray:
    """int64 [E, R]: rows that each rank's clones take; `load` is [E], `same_domain` bool [R, R], mains contiguous."""
    num_ranks = same_domain.shape[0]
    mains = load.size // num_ranks
    home = np.arange(load.size) // mains
    rank_load = load.reshape(num_ranks, mains).sum(axis=1).astype(float)
    mean = rank_load.mean()
    excess, room = np.maximum(rank_load - mean, 0), np.maximum(mean - rank_load, 0)
    flow = transport(excess, room, np.exp(-np.where(same_domain, 1 / inter_cost, 1)))
    alpha = mean / mains
    bonus = alpha * np.where(same_domain, 1, 1 / inter_cost)[home]
    hint = 0.1 * alpha * flow[home] / np.maximum(excess[home], 1)[:, None]
    preference = np.round(bonus + hint, 6)  # experts of one domain often tie, but for rounding errors
    return _match(spilled_rows(load, num_ranks, mean), room, preference, num_slots)


def transport(excess: np.ndarray, room: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """float [R, R]: entropic transport of `excess` [R] (scaled down to the whole room) into `room` [R]."""
    excess = excess * min(room.sum() / max(excess.sum(), 1), 1)
    to = np.ones(room.size)
    for _ in range(SINKHORN_ROUNDS):
        out = excess / np.maximum(kernel @ to, TINY)
        to = room / np.maximum(kernel.T @ out, TINY)
    flow = out[:, None] * kernel * to
    fitted: np.ndarray = flow * np.minimum(room / np.maximum(flow.sum(axis=0), TINY), 1)
    return fitted


def _match(spill: np.ndarray, room: np.ndarray, preference: np.ndarray, num_slots: int) -> np.ndarray:
    """Step 2: whole replicas; `spill` [E] and `room` [R] are used up, `preference` [E, R] is added to what can move."""
    moved = np.zeros(preference.shape, np.int64)
    ranks = np.arange(room.size)
    for _ in range(num_slots):
        matched = np.zeros(room.size, bool)
        while True:
            amount = np.minimum(spill[:, None], room)
            score = np.where((amount > 0) & (moved == 0) & ~matched, amount + preference, -np.inf)
            expert = score.argmax(axis=0)  # of each rank
            proposes = score[expert, ranks] > -np.inf
            if not proposes.any():
                break
            proposal = np.full(score.shape, -np.inf)
            proposal[expert[proposes], ranks[proposes]] = score[expert[proposes], ranks[proposes]]
            accepts = np.flatnonzero((proposal > -np.inf).any(axis=1))
            rank = proposal[accepts].argmax(axis=1)
            given = amount[accepts, rank]
            moved[accepts, rank] = given
            spill[accepts] -= given
            room[rank] -= given
            matched[rank] = True
    return moved
