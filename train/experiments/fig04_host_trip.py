"""Figure 4: what it costs to leave the program for a planner on the host, against one inside the program."""

import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from topoep_jax.plan import solve_plan
from topoep_jax.plan.problem import Problem
from topoep_jax.plan.reference import solve
from topoep_jax.shapes import SHAPES
from train.experiments import gpu_trip, plans, training, trip_picture
from train.experiments.figure import Figure
from train.experiments.record import Record
from train.experiments.settings import Settings

_NUMBER, _MODEL, _SKEW, _PLANNER = "4", "qwen3-30b-a3b", -4.0, "topoep_paper"
_WARMUPS, _RUNS = 5, 50
_RUNS_OF = {"inside": "cpu", "callback": "reference"}
"""The planner's implementation in a training run, by the way that the plan is made."""


def run(settings: Settings) -> list[Record]:
    """Medians of equal plans and of equal steps, made in each way; and what the programs for GPUs do."""
    return [*_plans(), *_steps(settings), *gpu_trip.run(_NUMBER, _MODEL, _PLANNER)]


def _plans() -> Iterator[Record]:
    shape = SHAPES[_MODEL]
    asked = plans.problem(shape)
    omega = plans.demand(shape, _SKEW, 0)
    ready = solve(omega, asked, _PLANNER)
    demand = jnp.asarray(omega, jnp.int32)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), np.asarray(leaf).dtype), ready)
    trip = jax.jit(lambda rows: jax.pure_callback(lambda _: ready, shapes, rows))
    found = {
        "inside": _median_us(functools.partial(_program(asked, "cpu"), demand)),
        "callback": _median_us(functools.partial(_program(asked, "reference"), demand)),
        "planner": _median_us(lambda: solve(omega, asked, _PLANNER)),
        "trip": _median_us(functools.partial(trip, demand)),
    }
    for way, us in found.items():
        yield Record(_NUMBER, _MODEL, _PLANNER, {"way": way}, trip_picture.PLAN, us, "us", "measured")


def _program(asked: Problem, implementation: str) -> Callable[[jax.Array], Any]:
    return jax.jit(
        functools.partial(
            solve_plan,
            topology=asked.topology,
            cost=asked.cost,
            num_slots=asked.num_slots,
            planner=_PLANNER,
            implementation=implementation,
        )
    )


def _median_us(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(_WARMUPS + _RUNS):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times[_WARMUPS:])


def _steps(settings: Settings) -> Iterator[Record]:
    """Two training runs on emulated devices that differ in where their plans are made, and in nothing else."""
    steps = 200 if settings.full else 30
    losses = {}
    for way, implementation in _RUNS_OF.items():
        folder = training.trained(settings, _PLANNER, "code", implementation=implementation, steps=steps)
        ms, losses[way] = _log(folder)
        yield Record(_NUMBER, training.MODEL, _PLANNER, {"way": way}, trip_picture.STEP, ms, "ms", "measured")
    differ = sum(a != b for a, b in zip(losses["inside"], losses["callback"], strict=True))
    setting: dict[str, str | float] = {"steps": steps}
    yield Record(_NUMBER, training.MODEL, _PLANNER, setting, trip_picture.DIFFER, differ, "", "measured")


def _log(folder: Path) -> tuple[float, list[float]]:
    """Median milliseconds of a step, without the first ones, and the loss of each."""
    config = json.loads((folder / "config.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = [config["batch_size"] * config["seq_len"] / line["tokens_per_s"] for line in lines]
    return 1e3 * statistics.median(seconds[_WARMUPS:]), [line["loss"] for line in lines]


FIGURE = Figure(
    _NUMBER,
    "The host round trip: a planner in a host callback against one inside the program",
    "a minute; for the GPU programs the extra `cuda-aot` (`make setup EXTRA=cuda-aot`), and another half",
    "The paper draws a GPU that waits. The GPU programs here are compiled for 32 H200 and did not run, so their lengths"
    " mean nothing; what the host copies is what the call takes and returns, and that it waits twice is how JAX runs"
    " callbacks. A callback cannot be compiled where there is no GPU, so the call that JAX makes of it stands in its"
    " place. Times are of this machine, where host and device are one CPU: no copies and no idle GPU are in them, only"
    " what a callback costs beside its planner, which is NumPy where the custom call is C++; medians of 50 equal plans,"
    f" and of the steps of two training runs of `{training.MODEL}` on 4 emulated devices, which plan 4 layers each.",
    run,
    trip_picture.draw,
)
