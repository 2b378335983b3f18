"""Figure 14: training loss with and without balancing: same parameters, same data, same schedule."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from train.experiments import style
from train.experiments.figure import Figure
from train.experiments.published import LOSS_DIFFERENCE_PERCENT
from train.experiments.record import Record, pick
from train.experiments.settings import Settings
from train.experiments.training import MODEL, trained

_PLANNERS = ("none", "topoep")
_MOST_POINTS = 500


def run(settings: Settings) -> list[Record]:
    """Losses, thinned out to what a picture shows, and the relative differences over all steps."""
    losses = {}
    for planner in _PLANNERS:
        log = trained(settings, planner, "code") / "metrics.jsonl"
        losses[planner] = np.array([json.loads(line)["loss"] for line in log.read_text().splitlines()])
    difference = 100 * np.abs(losses["topoep"] / losses["none"] - 1)
    records = []
    stride = max(1, settings.steps // _MOST_POINTS)
    for planner, loss in losses.items():
        for step in range(stride, settings.steps + 1, stride):
            place: dict[str, str | float] = {"step": step}
            records.append(Record("14", MODEL, planner, place, "loss", float(loss[step - 1]), "nats", "measured"))
    for metric, value in (("mean", difference.mean()), ("max", difference.max())):
        name, printed = f"{metric} relative difference of the loss", LOSS_DIFFERENCE_PERCENT[metric]
        over: dict[str, str | float] = {"steps": settings.steps}
        records.append(Record("14", MODEL, "topoep", over, name, float(value), "%", "measured"))
        records.append(Record("14", MODEL, "topoep", {}, name, printed.number, "%", "paper", mark=printed.mark))
    return records


def draw(records: Sequence[Record]) -> Any:
    """Both curves, and their difference."""
    figure, (above, below) = style.canvas(11, 7.5, 1, 2, sharex=True, height_ratios=(2, 1))
    curves = {}
    for planner, width, line in zip(_PLANNERS, (4, 1.5), ("-", "-"), strict=True):
        points = sorted((float(r.setting["step"]), r.value) for r in pick(records, planner=planner, metric="loss"))
        steps, curves[planner] = map(np.array, zip(*points, strict=True))
        above.plot(steps, curves[planner], color=style.color(planner), linewidth=width, linestyle=line, label=planner)
    above.set(ylabel="loss, nats per byte")
    above.legend()
    below.plot(steps, 100 * np.abs(curves["topoep"] / curves["none"] - 1), color=style.color("topoep"), linewidth=1)
    for record in pick(records, kind="paper"):
        below.axhline(record.value, color=style.INK, linewidth=1, linestyle="--" if "mean" in record.metric else ":")
    below.plot([], [], color=style.INK, linewidth=1, linestyle="--", label="the paper's mean")
    below.plot([], [], color=style.INK, linewidth=1, linestyle=":", label="the paper's largest")
    below.set(xlabel="training step", ylabel="difference, %")
    below.legend(ncols=2)
    return figure


FIGURE = Figure(
    "14",
    "Training loss with and without balancing",
    "two training runs; one of them is that of Figure 2",
    "A real run, but of a model of four layers that fits a laptop, on emulated ranks, 500 steps in the quick set and"
    " the paper's 10,000 in the full one; balancing changes only the order in which sums are rounded.",
    run,
    draw,
)
