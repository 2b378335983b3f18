"""Plans of forced routing, drawn and solved once per process for all figures that look at them."""

import dataclasses
import functools

import numpy as np

from topoep_jax.config import LayerConfig
from topoep_jax.plan.evaluate import Evaluation, evaluate
from topoep_jax.plan.hardware import Hardware
from topoep_jax.plan.problem import CostModel, Problem
from topoep_jax.plan.reference import PLANNERS
from topoep_jax.plan.run import run_planner
from topoep_jax.shapes import Shape
from topoep_jax.simulate import Work, work_of_planner
from topoep_jax.synthetic import demand_of_model
from train.experiments.settings import SLOTS

ALL = tuple(PLANNERS)
_BLOCK_ROWS = 128


@functools.lru_cache(maxsize=256)
def demand(shape: Shape, skew: float, seed: int) -> np.ndarray:
    """int64 [R, E]: forced routing whose experts the model's own router selects."""
    return demand_of_model(shape, [skew], seed)[skew]


def problem(shape: Shape, *, slots: int = SLOTS, hardware: Hardware | None = None, effort: str = "default") -> Problem:
    """What a planner is asked, without a cap; rates are nominal ones of an H800 if not given."""
    cost = CostModel.from_model(shape.hidden, shape.ffn, hardware or Hardware.h800())
    return Problem(shape.topology, cost, shape.num_experts, slots, None, _BLOCK_ROWS, "bottleneck", effort)


@functools.lru_cache(maxsize=1024)
def scored(shape: Shape, skew: float, seed: int, planner: str, asked: Problem) -> Evaluation:
    """The plan of a planner and what it is worth."""
    omega = demand(shape, skew, seed)
    return evaluate(run_planner(omega, asked, planner), omega, asked)


def slots_of(plan: Evaluation) -> int:
    """The most replicas on a rank, or its slots."""
    return plan.plan.slot_expert.shape[1]


def work(shape: Shape, planner: str, plan: Evaluation, asked: Problem, hardware: Hardware) -> Work:
    """The work of a plan, for the simulator."""
    config = LayerConfig(
        shape.hidden, shape.ffn, shape.num_experts, shape.top_k, shape.topology, num_slots=asked.num_slots
    )
    config = dataclasses.replace(config, hardware=hardware)
    return work_of_planner(config, planner, plan.plan)
