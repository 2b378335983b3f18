"""DeepSeek's expert-parallel load balancer: copies of experts, packed onto ranks; mains move, so evaluation only.

Source: `eplb.py` of github.com/deepseek-ai/EPLB at d52c72d (the balancer described with DeepSeek-V3, arXiv 2412.19437).

Steps:
  1. If the groups divide over the nodes, pack groups onto nodes by load; else take one group and one node.
  2. Within a node start from one copy per expert; until its slots are full, copy the expert of largest load per copy.
  3. Pack the copies of a node, each worth load per copy, onto its ranks.
  Packing takes items by falling weight, each to the lightest pack with room; every pack gets the same number of items,
  and with one item per pack item i goes to pack i.

Departures:
  - A problem has no expert groups: the planner passes one group, so with several domains it is the source's global
    policy, which is blind to domains. Copies are E + R x N, the same memory as N replica slots per rank.
  - The source estimates load from the past and leaves the split of rows to the caller. Here load is the demand itself,
    copies of an expert share its rows evenly (remainder to low ranks), and near sources are served first.
  - Two copies of an expert on one rank (the source allows it) count as one instance with two shares.
  - Fractions are exact and equal weights go by index; the source computes in float32 and sorts unstably.
"""

import heapq
import math
from fractions import Fraction

import numpy as np

from topoep_jax.plan.baselines.common import quota_local_first
from topoep_jax.plan.problem import Draft, Problem


def eplb(omega: np.ndarray, problem: Problem) -> Draft:
    """Places E + R x N copies anywhere; `holds` has only these, so main instances without a copy are missing."""
    num_ranks, num_experts = problem.topology.num_ranks, problem.num_experts
    load = omega.sum(axis=0)
    num_copies = num_experts + num_ranks * problem.num_slots
    expert = np.array(rebalance(load.tolist(), num_copies, 1, problem.topology.num_domains, num_ranks))
    copies = np.zeros((num_experts, num_ranks), np.int64)
    np.add.at(copies, (expert, np.arange(num_copies) // (num_copies // num_ranks)), 1)
    base, remainder = np.divmod(load[:, None], copies.sum(axis=1, keepdims=True))
    before = copies.cumsum(axis=1) - copies
    rows = base * copies + np.clip(remainder - before, 0, copies)
    return Draft(copies.T > 0, quota_local_first(rows, omega, problem))


def rebalance(load: list[int], num_copies: int, num_groups: int, num_nodes: int, num_ranks: int) -> list[int]:
    """The expert of each copy; copies are numbered rank by rank, `num_copies / num_ranks` each.

    Args:
      load: rows per expert.
      num_copies: a multiple of `num_ranks`, at least the number of experts.
      num_groups: groups of consecutive experts that stay on one node; must divide the experts.
      num_nodes: must divide `num_ranks`, if it divides `num_groups`.
      num_ranks: ranks of all nodes.
    """
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    group_size = len(load) // num_groups
    group_load = [sum(load[g * group_size : (g + 1) * group_size]) for g in range(num_groups)]
    placed: list[int] = []
    for groups in pack(group_load, num_nodes):
        experts = [g * group_size + i for g in groups for i in range(group_size)]
        copied = add_copies([load[e] for e in experts], num_copies // num_nodes)
        count = np.bincount(copied, minlength=len(experts)).tolist()
        scale = math.lcm(*count)  # makes every load per copy an integer
        weight = [load[experts[i]] * scale // count[i] for i in copied]
        for items in pack(weight, num_ranks // num_nodes):
            placed.extend(experts[copied[i]] for i in items)
    return placed


def pack(weight: list[int], num_packs: int) -> list[list[int]]:
    """Items of each pack, in order of arrival; equally many in each."""
    room = len(weight) // num_packs
    if room == 1:
        return [[item] for item in range(num_packs)]
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    lightest = [(0, p) for p in range(num_packs)]
    for item in sorted(range(len(weight)), key=lambda i: (-weight[i], i)):
        total, p = heapq.heappop(lightest)
        packs[p].append(item)
        if len(packs[p]) < room:
            heapq.heappush(lightest, (total + weight[item], p))
    return packs


def add_copies(load: list[int], num_copies: int, most: int | None = None) -> list[int]:
    """The expert of each copy: one of each, then one more of the largest load per copy; at most `most` of one."""
    copied = list(range(len(load)))
    largest = [(Fraction(-rows), e, 1) for e, rows in enumerate(load)]
    heapq.heapify(largest)
    while len(copied) < num_copies and largest:
        _, e, count = heapq.heappop(largest)
        if count == most:
            continue
        copied.append(e)
        heapq.heappush(largest, (Fraction(-load[e], count + 1), e, count + 1))
    return copied
