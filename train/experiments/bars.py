"""Horizontal bars of all planners for each model: the form of the paper's Figures 13 and 16, with room for names."""

from collections.abc import Sequence
from typing import Any

from topoep_jax.cli.output import plural
from train.experiments import plans, style
from train.experiments.record import Record, Summary, summarize
from train.experiments.settings import MODELS


def draw(records: Sequence[Record], metrics: dict[str, str], *, factor: float = 1.0, ideal: float | None = None) -> Any:
    """One row of panels for each metric (with the label of its axis), one column for each model.

    Args:
      records: of ours and of the paper.
      metrics: metric -> label.
      factor: what values are multiplied by.
      ideal: where a dashed line is drawn.
    """
    found = summarize(records)
    shown = {summary.first.planner for summary in found}
    planners = [planner for planner in plans.ALL if planner in shown]
    figure, panels = style.canvas(15, 1.2 + 6.0 * len(metrics), 3, len(metrics), sharey=True)
    for place, axes in enumerate(panels):
        metric, label = list(metrics.items())[place // 3]
        model = MODELS[place % 3]
        own = {s.first.planner: s for s in found if s.first.model == model and s.first.metric == metric}
        _panel(axes, planners, own, factor)
        if ideal is not None:
            axes.axvline(ideal, color=style.INK, linewidth=1, linestyle="--")
        axes.set(title=style.MODELS[model], xlabel=label)
        axes.set_yticks(range(len(planners)), [style.name(planner) for planner in planners], fontsize=13)
    panels[0].invert_yaxis()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=13, frameon=False)
    return figure


def _panel(axes: Any, planners: Sequence[str], own: dict[str, Summary], factor: float) -> None:
    texts = []
    for y, planner in enumerate(planners):
        if planner not in own:
            continue
        summary = own[planner]
        mean, spread = factor * summary.mean, factor * (summary.deviation or 0)
        axes.barh(y, mean, 0.62, xerr=spread, color=style.color(planner), ecolor=style.FAINT, capsize=3)
        texts.append((y, f"{mean:.3g}"))
        if summary.paper:
            axes.plot(factor * summary.paper.value, y, **style.PAPER, clip_on=False)
    axes.plot([], [], **style.PAPER, label="printed in the paper")
    count = max(len(summary.values) for summary in own.values())
    axes.errorbar(
        [],
        [],
        xerr=1,
        color=style.FAINT,
        capsize=3,
        label=f"ours: mean and standard deviation, {plural(count, 'seed')}",
    )
    axes.plot([], [], " ", label="† takes more replicas than there are slots")
    axes.set_xlim(0, 1.2 * axes.get_xlim()[1])
    for y, mean_text in texts:  # In a column of their own, where no bar and no mark is.
        axes.text(1, y, mean_text, transform=axes.get_yaxis_transform(), ha="right", va="center", fontsize=12)
