"""Figure 4: what it costs to leave the program for a planner on the host, against one inside the program."""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from topoep_jax.plan import solve_plan
from topoep_jax.plan.problem import Problem
from topoep_jax.plan.reference import solve
from topoep_jax.shapes import SHAPES
from train.experiments import plans, style
from train.experiments.figure import Figure
from train.experiments.record import Record, pick
from train.experiments.settings import Settings

_MODEL, _SKEW, _PLANNER = "qwen3-30b-a3b", -4.0, "topoep_paper"
_METRIC = "from demand to plan"
_WARMUPS, _RUNS = 5, 50
WAYS = {
    "inside": "custom call inside the program (C++)",
    "callback": "host callback (NumPy)",
    "planner": "the same planner, called directly (NumPy)",
    "trip": "host callback with nothing to plan",
}


def run(settings: Settings) -> list[Record]:
    """Medians of equal plans, made in each way."""
    del settings
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
    return [Record("4", _MODEL, _PLANNER, {"way": way}, _METRIC, us, "us", "measured") for way, us in found.items()]


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


def draw(records: Sequence[Record]) -> Any:
    """Bars on a logarithmic axis."""
    figure, (axes,) = style.canvas(12, 3.8)
    colors = {"inside": "topoep", "callback": "none"}
    for y, way in enumerate(WAYS):
        (record,) = pick(records, way=way)
        axes.barh(y, record.value, 0.6, color=style.color(colors.get(way, "")))
        axes.text(record.value, y, f" {record.value:,.0f} µs", va="center")
    axes.set_yticks(range(len(WAYS)), list(WAYS.values()))
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="µs on this machine's CPU (log scale)")
    axes.set_xlim(10, 6 * axes.dataLim.x1)
    return figure


FIGURE = Figure(
    "4",
    "The host round trip: a planner in a host callback against one inside the program",
    "nothing; a second",
    "The paper draws a GPU that waits; here host and device are one CPU, so no copies and no idle GPU are in these"
    " times, only what a callback costs beside its planner, which is NumPy where the custom call is C++; medians of 50"
    " equal plans.",
    run,
    draw,
)
