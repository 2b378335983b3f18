"""Figure 15: what a layer is spent on: modelled for the paper's cluster, measured for emulated devices."""

import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure as Canvas

from topoep_jax.simulate.calibration import Phases, R
from train.experiments import emulated, fitted, scopes, style
from train.experiments.fig13a_throughput import RATIOS, fit_points, of_points
from train.experiments.figure import Figure
from train.experiments.record import Record, pick
from train.experiments.settings import Settings

_MODELS, _PLANNERS, _SKEW = ("qwen3-30b-a3b", "glm-4.5-air"), ("none", "topoep_paper", "topoep"), -4.0
_PARTS = ("experts", "exchange", "replicas")
_LABELS = {"experts": "experts, straggler", "exchange": "dispatch + combine", "replicas": "replicas"}
_PASSES = scopes.PASSES
_GROUND = "#f4efe4"
"""Of what is measured, so that nobody takes it for the model's."""


def run(settings: Settings) -> list[Record]:
    """The fit's points, the same phases of our plans, and those of a profile."""
    seeds = settings.few_draws
    records = of_points("15", (point for point in fit_points(R, seeds) if point.figure == "15"))
    for model in _MODELS:
        for planner in _PLANNERS:
            found = [fitted.layer(model).phases(work) for work in fitted.works(model, planner, _SKEW, seeds)]
            setting: dict[str, str | float] = {"skew": _SKEW, "ratios": RATIOS["plans"], "calibration": R.name}
            for metric in _of(found[0]):
                ms = statistics.mean(_of(phases)[metric] for phases in found)
                records.append(Record("15", model, planner, setting, metric, ms, "ms", "simulated"))
    return [*records, *emulated.measured(settings)]


def _of(phases: Phases) -> dict[str, float]:
    """The breakdown as the paper counts it: two exchanges a pass."""
    return {
        "experts forward": phases.experts_forward,
        "experts backward": phases.experts_backward,
        "exchange forward": 2 * phases.exchange,
        "exchange backward": 2 * phases.exchange,
        "replicas forward": phases.replicas,
        "replicas backward": phases.replicas,
    }


def draw(records: Sequence[Record]) -> Any:
    """The paper's four panels above, a measured one for each pass below, on a ground of another colour."""
    figure = Canvas(figsize=(15, 15.5), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(9.5, 6))
    _draw_modelled(parts[0], records)
    _draw_measured(parts[1], list(pick(records, kind="measured")))
    return figure


def _draw_modelled(figure: Any, records: Sequence[Record]) -> None:
    """Model by pass; three parts of each planner."""
    figure.suptitle("MODELLED for 32 H800", fontweight="bold")
    panels = list(figure.subplots(2, 2).flat)
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


def _draw_measured(figure: Any, records: Sequence[Record]) -> None:
    """Phases of a pass, of each planner: the mean of the ranks as a bar, the slowest as a line above it."""
    figure.set_facecolor(_GROUND)
    ranks, share = emulated.LAYER.num_ranks, min(r.value for r in pick(records, metric=emulated.SHARE))
    figure.suptitle(
        f"MEASURED on this machine's CPU: a small layer on {ranks} emulated devices, not the times of any cluster\n"
        f"(at least {share:.1f} % of the work is in a phase)",
        fontweight="bold",
    )
    phases = [*scopes.SCOPES, scopes.WAITING]
    panels = figure.subplots(1, 2)
    for letter, way, axes in zip("ef", _PASSES, panels, strict=True):
        axes.set_facecolor(_GROUND)
        for number, planner in enumerate(emulated.PLANNERS):
            for x, phase in enumerate(phases):
                at = x + 0.26 * (number - 1)
                for record in pick(records, planner=planner, metric=f"{phase} {way}"):
                    if record.setting["over"] == scopes.MEAN:
                        axes.bar(at, record.value, 0.2, color="white", edgecolor=style.color(planner), linewidth=2.5)
                    elif phase != scopes.WAITING:
                        axes.hlines(record.value, at - 0.13, at + 0.13, color=style.INK, linewidth=2)
        axes.axvline(len(phases) - 1.5, color=style.FAINT, linewidth=1, linestyle=":")
        axes.set_xticks(range(len(phases)), phases, rotation=25)
        axes.set(title=f"({letter}) {emulated.MODEL}, {way}", ylabel="ms of a rank's thread, MEASURED")
    for planner in emulated.PLANNERS:
        label = f"{style.name(planner)}, mean of the ranks"
        panels[0].bar([0], [0], color="white", edgecolor=style.color(planner), linewidth=2.5, label=label)
    panels[0].plot([], [], color=style.INK, linewidth=2, label="slowest rank")
    figure.legend(loc="outside lower center", ncols=2, fontsize=13, frameon=False)


FIGURE = Figure(
    "15",
    "What a layer is spent on, skew -4: modelled for H800, measured for emulated devices",
    "no training; compiles and profiles three programs, under a minute on an otherwise idle machine; shares its plans"
    " with Figure 12",
    "Above, not measured: phases of the model that was fitted to these very bars, 15 % off in the root mean square and"
    " 51 % at worst (GLM's exchanges forward, which the paper prints faster than its own wire). Below, measured, but of"
    " a small layer whose eight ranks are threads that share this machine's cores: what a rank computes is real, so"
    " that on an otherwise idle machine the slowest rank's experts show the straggler; exchanges and pulls are no"
    " link's, since the emulation hands whole buffers to all ranks, and buffers are as large as each plan needs; who"
    " waits for a straggler leaves it the cores, so waiting is apart, and a collective counts as long as the last"
    " rank to come was in it; each time is that of the quickest step, and still, on a busy machine, differs from run"
    " to run by more than planners do.",
    run,
    draw,
    modelled=True,
)
