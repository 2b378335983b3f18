"""Figure 2: which experts a trained model uses, how skewed that is, and how much of it moves, on code and on prose."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from topoep_jax.traces import open_trace, skew_of
from train.experiments import style
from train.experiments.figure import Figure
from train.experiments.published import EXPERT_SKEW, TURNOVER_PERCENT
from train.experiments.record import Record, pick
from train.experiments.settings import Settings
from train.experiments.training import CORPORA, MODEL, trained

_TOP = 8
_MARKED = 60
"""Points of a line that may have marks."""
_COLORS = {"code": ("#0072b2", "o"), "prose": ("#d55e00", "s")}


def run(settings: Settings) -> list[Record]:
    """Shares, ratios and turnover of what two training runs recorded, and the paper's means."""
    records = []
    for corpus in CORPORA:
        with open_trace(trained(settings, "topoep", corpus, settings.recorded_steps) / "routing.npz") as trace:
            skew = skew_of(trace, top=_TOP)

        def add(metric: str, value: float, unit: str = "", corpus: str = corpus, **setting: str | float) -> None:
            place = {"corpus": corpus, **setting}
            records.append(Record("2", MODEL, "", place, metric, float(value), unit, "measured"))

        for layer, shares in enumerate(skew.share):
            for expert, share in enumerate(shares):
                add("share of the assignments", 100 * share, "%", layer=layer, expert=expert)
            add("busiest expert / mean", skew.imbalance[:, layer].mean(), layer=layer)
        add("busiest expert / mean, all layers", skew.imbalance.mean())
        add("busiest expert / mean, most of a layer", skew.imbalance.mean(axis=0).max())
        for step, turnover in zip(skew.steps[1:], skew.turnover, strict=True):
            add("turnover", 100 * turnover.mean(), "%", step=step)
        add("turnover, all layers and steps", 100 * skew.turnover.mean(), "%")
    for corpus, (mean, most) in EXPERT_SKEW.items():
        for metric, value in ((", all layers", mean), (", most of a layer", most)):
            of_corpus: dict[str, str | float] = {"corpus": corpus}
            name = f"busiest expert / mean{metric}"
            records.append(
                Record("2", "Qwen3-30B-A3B", "", of_corpus, name, value.number, "", "paper", mark=value.mark)
            )
    for corpus, value in zip(EXPERT_SKEW, TURNOVER_PERCENT, strict=True):
        name = "turnover, all layers and steps"
        of_corpus = {"corpus": corpus}
        records.append(Record("2", "Qwen3-30B-A3B", "", of_corpus, name, value.number, "%", "paper", mark=value.mark))
    return records


def draw(records: Sequence[Record]) -> Any:
    """The paper's four panels."""
    figure, panels = style.canvas(15, 9, 2, 2)
    for axes, corpus, letter in zip(panels[:2], CORPORA, "ab", strict=True):
        shares = list(pick(records, corpus=corpus, metric="share of the assignments"))
        layers, experts = (1 + max(int(r.setting[name]) for r in shares) for name in ("layer", "expert"))
        grid = np.zeros((layers, experts))
        for record in shares:
            grid[int(record.setting["layer"]), int(record.setting["expert"])] = record.value
        image = axes.imshow(grid, aspect="auto", cmap="Blues", vmin=0, interpolation="nearest")
        figure.colorbar(image, ax=axes, label=f"% of the layer's assignments (even: {100 / experts:.3g})")
        axes.set(title=f"({letter}) {corpus}: {CORPORA[corpus]}", xlabel="expert", ylabel="MoE layer")
        axes.set_yticks(range(layers))
    for corpus, (color, marker) in _COLORS.items():
        own = list(pick(records, corpus=corpus))
        ratios = sorted((r.setting["layer"], r.value) for r in pick(own, metric="busiest expert / mean"))
        turnover = sorted((r.setting["step"], r.value) for r in pick(own, metric="turnover"))
        panels[2].plot(*zip(*ratios, strict=True), color=color, marker=marker, label=corpus)
        few = marker if len(turnover) <= _MARKED else ""
        panels[3].plot(*zip(*turnover, strict=True), color=color, marker=few, markersize=4, linewidth=1, label=corpus)
    panels[2].axhline(1, color=style.INK, linewidth=1, linestyle="--", label="even")
    panels[2].set(title="(c) Load of the busiest expert / mean", xlabel="MoE layer", ylim=(0, None))
    panels[2].set_xticks(range(layers))
    panels[3].set(
        title=f"(d) Turnover of the {_TOP} busiest experts",
        xlabel="training step, against the one recorded before",
        ylabel="% changed",
    )
    panels[3].set_ylim(0, None)
    for axes in panels[2:]:
        axes.legend(ncols=3)
    return figure


FIGURE = Figure(
    "2",
    "Routing skew of a model trained here, on code and on prose",
    "two training runs",
    "A model of four layers and 32 experts that is trained here from nothing on bytes, where the paper has"
    " Qwen3-30B-A3B with its released weights: skew and turnover are its own, and turnover is from one recorded step to"
    " the next, ten apart, where the paper's is from microbatch to microbatch; `topoep trace --png` draws the same of"
    " any recorded trace.",
    run,
    draw,
)
