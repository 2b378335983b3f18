"""`topoep simulate --fit`: what the model of the paper's cluster gives where the paper has a number."""

import json
import textwrap
from collections.abc import Iterator, Sequence

from topoep_jax.cli.flags import Flags
from topoep_jax.cli.output import plural, table
from topoep_jax.simulate.calibration import CALIBRATIONS, R
from topoep_jax.simulate.fit import (
    CANNOT_EXPLAIN,
    SKEWS,
    Point,
    forced_demand,
    planned_works,
    point_of_plans,
    points_of_paper,
    rms_error,
)
from topoep_jax.simulate.published import LAYERS, PLANNERS

_SEEDS = 3
_FLAGS = ("fit", "seeds", "json")
_TITLE = """the model of the paper's cluster against the paper (arXiv 2609.35481, 32 H800); MODELLED, not measured
mark   of the paper's value: C printed and unambiguous, I one reading survives, A printed, but whose it is is a guess
role   how that value was used: base (spent on the model's base, exact), calibration (fitted to), held out (of the
       constants, not of the choice of their form: treat these errors as optimistic)
"""
_OF_PAPER = "with the load ratios and inter-node shares that the paper prints; at skew 0, topoep_paper's own plans"
_OF_PLANS = "with the plans of this library's planners for the same forced routing, mean of"


def run(values: Flags) -> Iterator[str]:
    """What the command prints, piece by piece.

    Raises:
      ValueError: a flag of another comparison.
    """
    others = [f"--{name}" for name in values if values[name].present and name not in _FLAGS]
    if others:
        raise ValueError(
            f"{', '.join(others)} does nothing with --fit, which compares the paper's own models and layers: leave it"
            " out; only --seeds and --json go with --fit"
        )
    seeds = range(values.seeds or _SEEDS)
    demand = {model: forced_demand(model, seeds) for model in LAYERS}
    uniform = {model: planned_works(model, "topoep_paper", demand[model][0.0]) for model in LAYERS}
    of_paper = {c.name: list(points_of_paper(c, uniform)) for c in CALIBRATIONS}
    of_plans = [
        point_of_plans(model, planner, skew, planned_works(model, planner, demand[model][skew]), R)
        for model in LAYERS
        for skew in SKEWS
        for planner in (PLANNERS if skew else ("none",))
    ]
    if values.json:
        points = [*(point for points in of_paper.values() for point in points), *of_plans]
        yield json.dumps([point.record() for point in points], indent=1) + "\n"
        return
    yield _TITLE
    yield f"\n{_throughput(of_paper[R.name], f'calibration {R.name}, {_OF_PAPER}')}"
    yield f"\n{_throughput(of_plans, f'calibration {R.name}, {_OF_PLANS} ' + plural(len(seeds), 'seed'))}"
    yield f"\n{_breakdown(of_paper[R.name])}"
    yield f"\n{_calibrations(of_paper)}"
    yield "\nwhat the model cannot explain\n"
    for text in CANNOT_EXPLAIN:
        yield textwrap.fill(text, 118, initial_indent="- ", subsequent_indent="  ") + "\n"


def _throughput(points: Sequence[Point], title: str) -> str:
    shown = [point for point in points if point.metric == "throughput"]
    rows = [
        [
            point.model,
            point.planner,
            point.role,
            point.figure,
            f"{point.skew:g}",
            f"{point.paper.number:.1f}",
            point.paper.mark,
            f"{point.modelled:.1f}",
            f"{point.error_percent:+.1f}",
        ]
        for point in shown
    ]
    header = ["thousand tokens/s", "planner", "role", "figure", "skew", "paper", "mark", "modelled", "error %"]
    parts = [
        f"{rms_error(point for point in shown if point.role == role):.1f} % of the {role} points"
        for role in ("calibration", "held out")
    ]
    return f"{title}\n{table(header, rows, left=3)}rms error: {', '.join(parts)}\n"


def _breakdown(points: Sequence[Point]) -> str:
    shown = [point for point in points if point.metric != "throughput"]
    rows = [
        [
            point.model,
            point.planner,
            point.metric,
            f"{point.paper.number:.2f}",
            point.paper.mark,
            f"{point.modelled:.2f}",
            f"{point.error_percent:+.1f}",
        ]
        for point in shown
    ]
    header = ["Figure 15, ms of a layer", "planner", "phase", "paper", "mark", "modelled", "error %"]
    return f"{table(header, rows, left=3)}rms error: {rms_error(shown):.1f} %, all of it calibration\n"


def _calibrations(points: dict[str, list[Point]]) -> str:
    """Errors of the three calibrations side by side."""
    columns = [[point for point in own if point.metric == "throughput"] for own in points.values()]
    rows = [
        [row[0].model, row[0].planner, f"{row[0].skew:g}", *(f"{point.error_percent:+.1f}" for point in row)]
        for row in zip(*columns, strict=True)
        if row[0].role != "base"
    ]
    notes = (
        "R: the recommended one; A: no term of the experts' size, planning and all layers' factor fitted instead;\n"
        "C: as R, fitted to all three models\n"
    )
    return f"{table(['error % by calibration', 'planner', 'skew', *points], rows, left=2)}{notes}"
