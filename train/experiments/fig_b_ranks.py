"""Beyond the paper: 64 to 512 ranks, by simulation of this library's layer."""

from collections.abc import Sequence
from typing import Any

from topoep_jax.plan.hardware import Hardware
from topoep_jax.shapes import Shape
from topoep_jax.simulate import LayerRates, Setting, Step, compare
from topoep_jax.topology import Topology
from train.experiments import plans, style
from train.experiments.figure import Figure
from train.experiments.record import Record, pick
from train.experiments.settings import Settings

_PLANNERS = ("none", "topoep_paper", "topoep")
_SKEWS = (-0.5, -2.0)
_EXPERTS, _RANKS_OF_A_DOMAIN = 512, 8
_TOKENS = 512


def run(settings: Settings) -> list[Record]:
    """Qwen3's experts, 512 of them, on more and more ranks; `topoep` at effort fast, as a layer takes it."""
    records = []
    hardware = Hardware.h800()
    for ranks in (64, 128, 256, 512) if settings.full else (64, 128, 256):
        shape = Shape(
            2048, 768, _EXPERTS, 8, Topology.uniform(ranks // _RANKS_OF_A_DOMAIN, _RANKS_OF_A_DOMAIN), tokens=_TOKENS
        )
        setting = Setting.of_library(LayerRates(hardware), Step(), shape.top_k, "h800")
        asked = plans.problem(shape, effort="fast")
        for skew in _SKEWS:
            for seed in range(settings.seeds or (3 if settings.full else 1)):
                found = {planner: plans.scored(shape, skew, seed, planner, asked) for planner in _PLANNERS}
                works = {p: [plans.work(shape, p, plan, asked, hardware)] for p, plan in found.items()}
                for outcome in compare(setting, works):
                    plan = found[outcome.planner]
                    place: dict[str, str | float] = {"ranks": ranks, "skew": skew}
                    values = {
                        ("layer", "ms"): outcome.layer_ms,
                        ("gain", "%"): outcome.verdict.gain,
                        ("least gain over the constants", "%"): outcome.verdict.low,
                        ("most gain over the constants", "%"): outcome.verdict.high,
                    }
                    for (metric, unit), value in values.items():
                        records.append(
                            Record("B", "512 experts", outcome.planner, place, metric, value, unit, "simulated", seed)
                        )
                    counted = {("imbalance", ""): plan.imbalance, ("inter-node share", "%"): 100 * plan.inter_domain}
                    for (metric, unit), value in counted.items():
                        records.append(
                            Record("B", "512 experts", outcome.planner, place, metric, value, unit, "measured", seed)
                        )
    return records


def draw(records: Sequence[Record]) -> Any:
    """Layer times over ranks, a panel for each skew; the band is what other constants make of the gain."""
    figure, panels = style.canvas(14, 5.8, 2)
    ranks = sorted({int(record.setting["ranks"]) for record in records})
    for axes, skew in zip(panels, _SKEWS, strict=True):
        own = list(pick(records, skew=skew))
        plain = [_mean(own, "none", count, "layer") for count in ranks]
        for planner in _PLANNERS:
            axes.plot(
                ranks,
                [_mean(own, planner, count, "layer") for count in ranks],
                color=style.color(planner),
                marker=style.marker(planner),
                markersize=11 if planner == "topoep" else 7,
                label=f"{style.name(planner)}, modelled",
            )
            if planner != "none":
                band = [
                    [
                        ms / (1 + _mean(own, planner, count, f"{end} gain over the constants") / 100)
                        for count, ms in zip(ranks, plain, strict=True)
                    ]
                    for end in ("most", "least")
                ]
                axes.fill_between(ranks, *band, color=style.color(planner), alpha=0.15, linewidth=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [str(count) for count in ranks])
        axes.set(title=f"skew {skew:g}", xlabel="ranks, eight to a node", ylim=(0, None))
    panels[0].set_ylabel("ms per layer, MODELLED")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=13, frameon=False)
    return figure


def _mean(records: Sequence[Record], planner: str, ranks: int, metric: str) -> float:
    values = [record.value for record in pick(records, planner=planner, ranks=ranks, metric=metric)]
    return sum(values) / len(values)


FIGURE = Figure(
    "B",
    "64 to 512 ranks, by simulation",
    "no training; a minute, and 512 ranks only with --full",
    "Not in the paper, which ends at 32 ranks (and 128 for the solver): this library's layer at nominal rates of an"
    f" H800, {_EXPERTS} experts of Qwen3's size, {_TOKENS} tokens a rank; the bands are what"
    " other links, products, launches and overlap make of the gain over none. `topoep` does not know of the 0.4 ms that"
    " planning is assumed to take, and so is below none where there is little to win: on 64 ranks at skew -0.5.",
    run,
    draw,
    modelled=True,
)
