"""ECHO: what hot ranks have above the mean fills what cold ranks lack, both laid end to end.

Source: `megatron/core/transformer/moe/offloading_planner.py` of github.com/NVIDIA/Megatron-LM pull request 2368 ("MoE
ECHO"), `gen_assignment` with `one_shot_greedy`, and `breadth_first_allocation` with `depth_first_allocation`.

Steps:
  1. A rank's capacity is floor(total / R). Its experts, lightest first, fill it; what does not fit of each is its
     spill.
  2. Spills in falling order and spare capacities in falling order are laid end to end; the overlap of an expert's
     interval with a rank's interval is what the rank could take of it.
  3. Each rank clones the N experts of which it takes most; what it cannot clone stays at home.
  4. Every source gives a clone its share (rounded down); what is left over goes from low sources to low ranks.

Departures:
  - Ties: lower expert, lower rank; the source leaves them to its sort.
  - With one slot per rank the source takes an approximate bin packing (8 buckets, on GPU only); here the overlap
    serves every number of slots.
  - Shares are exact integers; the source rounds them to float32 before it takes the floor.
  - Reclaiming small clones is off, as by default in the source (its threshold is 0).
"""

import numpy as np

from topoep_jax.plan.baselines.common import draft_of_quota, quota_in_proportion, spilled_rows
from topoep_jax.plan.problem import Draft, Problem
from topoep_jax.plan.topoep.apportion import overlap


def echo(omega: np.ndarray, problem: Problem) -> Draft:
    """Clones hot experts on cold ranks, at most N per rank."""
    load = omega.sum(axis=0)
    num_ranks = problem.topology.num_ranks
    mean = int(load.sum()) // num_ranks
    spare = np.maximum(mean - load.reshape(num_ranks, -1).sum(axis=1), 0)
    moved = clone(spilled_rows(load, num_ranks, mean), spare, problem.num_slots)
    return draft_of_quota(quota_in_proportion(moved, omega, problem), problem)


def clone(spilled: np.ndarray, spare: np.ndarray, num_slots: int) -> np.ndarray:
    """int64 [E, R]: rows that each rank's clones take, from `spilled` [E] and `spare` [R] rows."""
    experts, ranks = np.argsort(-spilled, kind="stable"), np.argsort(-spare, kind="stable")
    shared = overlap(spare[ranks], spilled[experts])  # [R, E], sorted
    dropped = np.argsort(-shared, axis=1, kind="stable")[:, num_slots:]
    np.put_along_axis(shared, dropped, 0, axis=1)
    moved = np.zeros((spilled.size, spare.size), np.int64)
    moved[np.ix_(experts, ranks)] = shared.T
    return moved
