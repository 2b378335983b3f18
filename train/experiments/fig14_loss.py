"""Figure 14: training loss with and without balancing: same parameters, same data, same schedule."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from train.experiments import style
from train.experiments.figure import Figure
from train.experiments.published import LOSS_DIFFERENCE_PERCENT
from train.experiments.record import Record, pick
from train.experiments.settings import Settings
from train.experiments.training import MODEL, trained

CONTROL = "none on 2 ranks"
"""The same training without balancing, whose sums are rounded in another order too."""
_DIFFERENCE = "relative difference of the loss"
_MOST_POINTS = 500


def run(settings: Settings) -> list[Record]:
    """Losses, thinned out to what a picture shows, and the relative differences over all steps."""
    losses = {
        "none": _losses(trained(settings, "none", "code", settings.steps)),
        "topoep": _losses(trained(settings, "topoep", "code", settings.steps)),
        CONTROL: _losses(trained(settings, "none", "code", settings.steps, ranks=2)),
    }
    records = []
    stride = max(1, settings.steps // _MOST_POINTS)
    for run_, loss in losses.items():
        for step in range(stride, settings.steps + 1, stride):
            place: dict[str, str | float] = {"step": step}
            records.append(Record("14", MODEL, run_, place, "loss", float(loss[step - 1]), "nats", "measured"))
    over: dict[str, str | float] = {"steps": settings.steps}
    for run_ in ("topoep", CONTROL):
        signed = 100 * (losses[run_] / losses["none"] - 1)
        size = np.abs(signed)
        for metric, value in (("mean", size.mean()), ("max", size.max()), ("signed mean", signed.mean())):
            records.append(Record("14", MODEL, run_, over, f"{metric} {_DIFFERENCE}", float(value), "%", "measured"))
    for metric, printed in LOSS_DIFFERENCE_PERCENT.items():
        name = f"{metric} {_DIFFERENCE}"
        records.append(Record("14", MODEL, "topoep", {}, name, printed.number, "%", "paper", mark=printed.mark))
    return records


def _losses(folder: Path) -> np.ndarray:
    """The loss of every step."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return np.array([json.loads(line)["loss"] for line in lines])


def draw(records: Sequence[Record]) -> Any:
    """Both curves, and their difference."""
    figure, (above, below) = style.canvas(11, 8.5, 1, 2, sharex=True, height_ratios=(1, 1))
    curves = {}
    for run_ in ("none", "topoep", CONTROL):
        points = sorted((float(r.setting["step"]), r.value) for r in pick(records, planner=run_, metric="loss"))
        steps, curves[run_] = map(np.array, zip(*points, strict=True))
    for run_, width in (("none", 4.0), ("topoep", 1.5)):
        above.plot(steps, curves[run_], color=style.color(run_), linewidth=width, label=run_)
    above.set(ylabel="loss, nats per byte")
    above.legend()
    for run_, color in ((CONTROL, style.OTHER), ("topoep", style.color("topoep"))):
        below.plot(steps, 100 * np.abs(curves[run_] / curves["none"] - 1), color=color, linewidth=1, label=run_)
    for record in pick(records, kind="paper"):
        below.axhline(record.value, color=style.INK, linewidth=1, linestyle="--" if "mean" in record.metric else ":")
    below.plot([], [], color=style.INK, linewidth=1, linestyle="--", label="the paper's mean")
    below.plot([], [], color=style.INK, linewidth=1, linestyle=":", label="the paper's largest")
    below.set(xlabel="training step", ylabel="difference from none, % (log)", yscale="log", ylim=(1e-3, 100))
    below.legend(ncols=2)
    return figure


FIGURE = Figure(
    "14",
    "Training loss with and without balancing",
    "three training runs; in the quick set one of them is that of Figure 2",
    "A real run, but of a model of four layers that fits a laptop, in bfloat16, of 512 bytes a step where the paper"
    " averages over many times more, so single steps differ more than its 0.407 %: rounding parts the runs after some"
    " ten steps, and then one of them learns a passage a step earlier than the other. Training without balancing on two"
    " ranks instead of four changes nothing but the order of sums, and differs as much (grey). What balancing could"
    " do to the loss would show in the mean with its sign, in the table.",
    run,
    draw,
)
