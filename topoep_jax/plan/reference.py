"""Planners in NumPy, written to be read: the ground truth that the native planners equal bit for bit.

Ties always go to the smaller index. While it plans, a planner works on a dense `Draft`; `finish` turns any draft into a
`Plan`, so slots, loads, predicted time and status have one definition.
"""

import numpy as np

from topoep_jax.plan.cost import MAX_ROWS, OBJECTIVES, split_picoseconds
from topoep_jax.plan.paper import topoep_paper
from topoep_jax.plan.problem import Draft, Planner, Problem, meets_cap, none
from topoep_jax.plan.types import Plan, Status

PLANNERS: dict[str, Planner] = {"none": none, "topoep_paper": topoep_paper}


def solve(omega: np.ndarray, problem: Problem, planner: str) -> Plan:
    """Plans `omega` (int32 [R, E]); bad demand gives `BAD_INPUT`, since a compiled program cannot raise."""
    omega = np.asarray(omega).astype(np.int64)
    if (omega < 0).any() or omega.sum() > MAX_ROWS:
        return refuse(problem)
    return finish(PLANNERS[planner](omega, problem), omega, problem)


def refuse(problem: Problem) -> Plan:
    """The answer to bad demand: no replica and no quota."""
    num_ranks, num_slots = problem.topology.num_ranks, problem.num_slots
    return Plan(
        slot_expert=np.full((num_ranks, num_slots), -1, np.int32),
        quota=np.zeros((num_ranks, num_ranks, problem.mains_per_rank + num_slots), np.int32),
        rank_load=np.zeros(num_ranks, np.int32),
        predicted_ps=np.zeros(2, np.int32),
        status=np.array(Status.BAD_INPUT | Status.EMPTY, np.int32),
    )


def finish(draft: Draft, omega: np.ndarray, problem: Problem) -> Plan:
    """Drops replicas without rows, fills slots in ascending expert id, and states load, predicted time and status."""
    slot_expert, quota = _fill_slots(draft, problem)
    empty_slots, empty_quota = _fill_slots(none(omega, problem), problem)
    objective = OBJECTIVES[problem.objective]
    predicted = objective(slot_expert, quota, problem.topology, problem.cost)
    status = Status(0)
    if meets_cap(quota, problem):
        status |= Status.CAP_MET
    if (slot_expert < 0).all():
        status |= Status.EMPTY
    empty_predicted = objective(empty_slots, empty_quota, problem.topology, problem.cost)
    if meets_cap(empty_quota, problem) and predicted > empty_predicted:
        status |= Status.OVER_EMPTY_COST
    return Plan(
        slot_expert=slot_expert.astype(np.int32),
        quota=quota.astype(np.int32),
        rank_load=quota.sum(axis=(0, 2)).astype(np.int32),
        predicted_ps=split_picoseconds(predicted),
        status=np.array(status, np.int32),
    )


def _fill_slots(draft: Draft, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """`slot_expert` [R, N] and `quota` [R, R, J] of a draft."""
    num_ranks, mains = problem.topology.num_ranks, problem.mains_per_rank
    slot_expert = np.full((num_ranks, problem.num_slots), -1, np.int64)
    quota = np.zeros((num_ranks, num_ranks, mains + problem.num_slots), np.int64)
    main_rank = problem.main_rank()
    rows = draft.quota.sum(axis=2)  # [E, R]
    for rank in range(num_ranks):
        own = np.flatnonzero(main_rank == rank)
        replicas = np.flatnonzero(draft.holds[rank] & (main_rank != rank) & (rows[:, rank] > 0))
        slot_expert[rank, : replicas.size] = replicas
        served = np.concatenate([own, replicas])
        quota[:, rank, : served.size] = draft.quota[served, rank].T
    return slot_expert, quota
