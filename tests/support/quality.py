"""Plans of the published workloads, drawn and solved once per process, and scored by the tests' own ruler."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import numpy as np

from tests.support.cases import SKEWS, Case, named
from tests.support.generator import Score, biased_demand, score
from topoep_jax.plan import Status, picoseconds, solve_plan

RESULTS = Path(__file__).parent.parent.parent / "results" / "full"

QUICK = {"qwen3_30b": range(2), "glm45_air": range(2), "deepseek_v2": range(2)}
FULL = {name: range(5) for name in ("qwen3_30b", "glm45_air", "deepseek_v2", "e640")} | {"r128": range(3)}
"""Workload -> seeds: what the default tier can afford, and what the evidence tables are made of."""


@dataclasses.dataclass(frozen=True)
class Result:
    """A plan's score, its status, and whether no slot is filled."""

    score: Score
    status: Status

    @property
    def ps(self) -> int:
        return self.score.bottleneck_ps


@functools.cache
def drawn(name: str, seed: int) -> dict[float, np.ndarray]:
    """int64 [R, E] for each of `SKEWS`; the wide workloads take half a minute to draw."""
    return biased_demand(named(name), SKEWS, seed)


@functools.cache
def solver(case: Case, planner: str, **options):
    """A compiled `solve_plan` for int32 [R, E]."""
    return jax.jit(
        functools.partial(
            solve_plan, topology=case.topology, cost=case.cost, num_slots=case.num_slots, planner=planner, **options
        )
    )


@functools.cache
def result(name: str, seed: int, skew: float, planner: str, **options) -> Result:
    """What a planner makes of one demand matrix; its own prediction must equal a recount."""
    case = named(name)
    plan = solver(case, planner, **options)(drawn(name, seed)[skew].astype(np.int32))
    counted = score(case, plan)
    objective = counted.eq8_ps if options.get("objective") == "eq8" else counted.bottleneck_ps
    assert picoseconds(plan.predicted_ps) == objective
    return Result(counted, Status(int(plan.status)))


def cells(sample: dict[str, range]):
    """(workload, seed, skew) of every matrix of a sample."""
    return [(name, seed, skew) for name, seeds in sample.items() for seed in seeds for skew in SKEWS]


def mean_over_seeds(sample: dict[str, range], name: str, measure) -> dict[float, float]:
    """skew -> the mean of measure(seed, skew)."""
    return {skew: float(np.mean([measure(seed, skew) for seed in sample[name]])) for skew in SKEWS}


def record(file: str, section: str, value) -> None:
    """Writes one section of results/full/<file>, and leaves the others."""
    path = RESULTS / file
    report = json.loads(path.read_text()) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report | {section: value}, indent=1) + "\n")
