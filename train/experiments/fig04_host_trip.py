"""Figure 4: what it costs to leave the program for a planner on the host, against one inside the program."""

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from topoep_jax.plan import solve_plan
from topoep_jax.plan.problem import Problem
from topoep_jax.plan.reference import solve
from topoep_jax.shapes import SHAPES
from train.experiments import gpu_trip, plans, trip_picture, trip_training
from train.experiments.figure import Figure
from train.experiments.record import Record
from train.experiments.settings import Settings

_NUMBER, _MODEL, _SKEW, _PLANNER = "4", "qwen3-30b-a3b", -4.0, "topoep_paper"
_WARMUPS, _RUNS = 5, 50


def run(settings: Settings) -> list[Record]:
    """Medians of equal plans and of equal steps, made in each way; and what the programs for GPUs do."""
    return [*_plans(), *trip_training.measured(_NUMBER, settings), *gpu_trip.run(_NUMBER, _MODEL, _PLANNER)]


def _plans() -> Iterator[Record]:
    shape = SHAPES[_MODEL]
    asked = plans.problem(shape)
    omega = plans.demand(shape, _SKEW, 0)
    ready = solve(omega, asked, _PLANNER)
    demand = jnp.asarray(omega, jnp.int32)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), np.asarray(leaf).dtype), ready)
    trip = jax.jit(lambda rows: jax.pure_callback(lambda _: ready, shapes, rows))
    calls: dict[str, Callable[[], Any]] = {
        **{way: functools.partial(program, demand) for way, program in programs(asked).items()},
        "planner": lambda: solve(omega, asked, _PLANNER),
        "trip": functools.partial(trip, demand),
    }
    for way, us in _median_us(calls).items():
        yield Record(_NUMBER, _MODEL, _PLANNER, {"way": way}, trip_picture.PLAN, us, "us", "measured")


def programs(asked: Problem) -> dict[str, Any]:
    """What makes a plan of the demand int32 [R, E], jitted, by the way that it is made."""
    plan = functools.partial(
        solve_plan, topology=asked.topology, cost=asked.cost, num_slots=asked.num_slots, planner=_PLANNER
    )
    return {
        way: jax.jit(functools.partial(plan, implementation=implementation))
        for way, implementation in trip_training.IMPLEMENTATIONS.items()
    }


def _median_us(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """The median of each call, all by turns, so that whatever else this machine does slows all of them."""
    times: dict[str, list[float]] = {way: [] for way in calls}
    for _ in range(_WARMUPS + _RUNS):
        for way, call in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(call())
            times[way].append(time.perf_counter() - began)
    return {way: 1e6 * statistics.median(own[_WARMUPS:]) for way, own in times.items()}


FIGURE = Figure(
    _NUMBER,
    "The host round trip: a planner in a host callback against one inside the program",
    "a minute; for the GPU programs the extra `cuda-aot` (`make setup EXTRA=cuda-aot`), and another half",
    "The paper draws a GPU that waits. The GPU programs here are compiled for 32 H200 and did not run, so their lengths"
    " mean nothing; what the host copies is what the call takes and returns, and that it waits twice is how JAX runs"
    " callbacks. A callback cannot be compiled where there is no GPU, so the call that JAX makes of it stands in its"
    " place. Times are of this machine, where host and device are one CPU: no copies and no idle GPU are in them, only"
    " what a callback costs beside its planner, which is NumPy where the custom call is C++; medians of 50 equal plans,"
    f" and of 30 equal steps (200 in the full set) of `{trip_training.RUN.model}` on 4 emulated devices, which plan 4"
    " layers each.",
    run,
    trip_picture.draw,
    inputs=gpu_trip.missing,
)
