"""Planners in NumPy, written to be read: the ground truth that the native planners equal bit for bit.

Ties always go to the smaller index. While it plans, a planner works on a dense `Draft`; `finish.finish`
turns any draft into a `Plan`, so slots, loads, predicted time and status have one definition.
"""

import numpy as np

from topoep_jax.plan.baselines import BASELINES
from topoep_jax.plan.finish import finish, is_bad, refuse
from topoep_jax.plan.paper import paper_plan
from topoep_jax.plan.problem import Planner, Problem, none
from topoep_jax.plan.topoep import topoep
from topoep_jax.plan.types import Plan

PLANNERS: dict[str, Planner] = {"none": none, "topoep_paper": paper_plan, "topoep": topoep, **BASELINES}

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
