"""Planners in NumPy, written to be read: the ground truth that the native planners equal bit for bit.

Ties always go to the smaller index. While it plans, a planner works on a dense `Draft`; `finish` turns any draft into a
`Plan`, so slots, loads, predicted time and status have one definition.
"""

import numpy as np

from topoep_jax.plan.baselines import BASELINES
from topoep_jax.plan.cost import predict_ps, split_picoseconds
from topoep_jax.plan.paper import topoep_paper
from topoep_jax.plan.problem import MAX_ROWS, Draft, Planner, Problem, fill_slots, meets_cap, none
from topoep_jax.plan.topoep import topoep
from topoep_jax.plan.types import Plan, Status

PLANNERS: dict[str, Planner] = {"none": none, "topoep_paper": topoep_paper, "topoep": topoep, **BASELINES}

DEFAULT_PLANNER = "topoep"

SCORED_ONLY = {
    "eplb": "it moves experts away from their main ranks",
    "moonep": "it takes up to E/R slots per rank, whatever num_slots is",
}
"""Planners whose drafts no `Plan` can hold, with the reason; `evaluate.evaluate` scores them."""


def check_planner(planner: str) -> None:
    """Raises ValueError if no layer can run the answers of `planner`."""
    if not isinstance(planner, str) or planner not in PLANNERS:
        runnable = sorted(set(PLANNERS) - set(SCORED_ONLY))
        raise ValueError(f"planner={planner!r} is unknown: choose one of {runnable}")
    if planner in SCORED_ONLY:
        raise ValueError(
            f"planner={planner!r} makes drafts that no layer can run ({SCORED_ONLY[planner]}): score them with"
            f" topoep_jax.plan.evaluate.evaluate, or run `topoep plan --planner={planner}`"
        )


def solve(omega: np.ndarray, problem: Problem, planner: str) -> Plan:
    """Plans `omega` (int32 [R, E]); bad demand gives `BAD_INPUT`, since a compiled program cannot raise."""
    omega = np.asarray(omega).astype(np.int64)
    return refuse(problem) if is_bad(omega) else finish(PLANNERS[planner](omega, problem), omega, problem)


def is_bad(omega: np.ndarray) -> bool:
    """Whether demand is negative, or 2^31 or more in all."""
    return bool((omega < 0).any()) or int(omega.sum(dtype=np.int64)) > MAX_ROWS


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
    plan, empty = fill_slots(draft, problem), fill_slots(none(omega, problem), problem)
    predicted = predict_ps(plan, problem)
    status = Status(0)
    if meets_cap(np.asarray(plan.quota), problem):
        status |= Status.CAP_MET
    if (plan.slot_expert < 0).all():
        status |= Status.EMPTY
    if meets_cap(np.asarray(empty.quota), problem) and predicted > predict_ps(empty, problem):
        status |= Status.OVER_EMPTY_COST
    return plan._replace(predicted_ps=split_picoseconds(predicted), status=np.array(status, np.int32))
