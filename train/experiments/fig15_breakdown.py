"""Figure 15: what a layer of the paper's cluster is spent on, modelled."""

import statistics
from collections.abc import Sequence
from typing import Any

from topoep_jax.simulate.calibration import Phases, R
from train.experiments import fitted, style
from train.experiments.fig13a_throughput import RATIOS, fit_points, of_points
from train.experiments.figure import Figure
from train.experiments.record import Record, pick
from train.experiments.settings import Settings

_MODELS, _PLANNERS, _SKEW = ("qwen3-30b-a3b", "glm-4.5-air"), ("none", "topoep_paper", "topoep"), -4.0
_PARTS = ("experts", "exchange", "replicas")
_LABELS = {"experts": "experts, straggler", "exchange": "dispatch + combine", "replicas": "replicas"}
_PASSES = ("forward", "backward")


def run(settings: Settings) -> list[Record]:
    """The fit's points, and the same phases of our plans."""
    seeds = settings.grid_draws
    records = of_points("15", (point for point in fit_points(R, seeds) if point.figure == "15"))
    for model in _MODELS:
        for planner in _PLANNERS:
            found = [fitted.layer(model).phases(work) for work in fitted.works(model, planner, _SKEW, seeds)]
            setting: dict[str, str | float] = {"skew": _SKEW, "ratios": RATIOS["plans"], "calibration": R.name}
            for metric in _of(found[0]):
                ms = statistics.mean(_of(phases)[metric] for phases in found)
                records.append(Record("15", model, planner, setting, metric, ms, "ms", "simulated"))
    return records


def _of(phases: Phases) -> dict[str, float]:
    """As the paper counts: two exchanges a pass."""
    return {
        "experts forward": phases.experts_forward,
        "experts backward": phases.experts_backward,
        "exchange forward": 2 * phases.exchange,
        "exchange backward": 2 * phases.exchange,
        "replicas forward": phases.replicas,
        "replicas backward": phases.replicas,
    }


def draw(records: Sequence[Record]) -> Any:
    """The paper's four panels: model by pass; three parts of each planner."""
    figure, panels = style.canvas(15, 9.5, 2, 2)
    bars = [(planner, ratios) for planner in _PLANNERS for ratios in ("paper", "plans")]
    bars.remove(("topoep", "paper"))
    for place, axes in enumerate(panels):
        model, way = _MODELS[place // 2], _PASSES[place % 2]
        for x, part in enumerate(_PARTS):
            for number, (planner, ratios) in enumerate(bars):
                own = list(pick(records, model=model, planner=planner, metric=f"{part} {way}", skew=_SKEW))
                at = x + 0.16 * (number - 2)
                for record in pick(own, ratios=RATIOS[ratios]):
                    axes.bar(
                        at,
                        record.value,
                        0.15,
                        color=style.color(planner),
                        hatch="//" if ratios == "plans" else "",
                        edgecolor="white",
                        linewidth=0,
                    )
                if ratios == "paper":
                    for record in pick(own, kind="paper"):
                        axes.plot(at, record.value, **style.PAPER)
        axes.set_xticks(range(len(_PARTS)), [_LABELS[part] for part in _PARTS])
        axes.set(title=f"({'abcd'[place]}) {style.MODELS[model]}, {way}", ylabel="ms per layer, MODELLED")
    for planner, ratios in bars:
        hatch, words = ("//", RATIOS["plans"]) if ratios == "plans" else ("", "the paper's load and traffic")
        panels[0].bar(
            [0],
            [0],
            color=style.color(planner),
            hatch=hatch,
            edgecolor="white",
            linewidth=0,
            label=f"{style.name(planner)}, {words}",
        )
    panels[0].plot([], [], **style.PAPER, label="printed in the paper")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=13, frameon=False)
    return figure


FIGURE = Figure(
    "15",
    "What a layer is spent on, skew -4, modelled for H800",
    "no training; shares its plans with Figure 12",
    "Not measured: phases of the model that was fitted to these very bars, 15 % off in the root mean square and 51 % at"
    " worst (GLM's exchanges forward, which the paper prints faster than its own wire); measured scopes of an emulated"
    " run are not built yet.",
    run,
    draw,
    modelled=True,
)
