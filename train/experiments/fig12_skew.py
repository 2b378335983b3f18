"""Figure 12: throughput against skew on the paper's cluster, modelled, with its printed values beside it."""

from collections.abc import Mapping, Sequence
from typing import Any

from topoep_jax.simulate.calibration import TOKENS
from topoep_jax.simulate.published import THROUGHPUT, UNIFORM_THROUGHPUT, Value
from train.experiments import fitted, style
from train.experiments.figure import Figure
from train.experiments.published import NATURAL_GAIN
from train.experiments.record import Record, of_paper, pick
from train.experiments.settings import MODELS, SKEWS, Settings

_PLANNERS = ("none", "topoep_paper", "topoep")
_PRINTED = ("none", "topoep_paper")


def run(settings: Settings) -> list[Record]:
    """Steps of our plans, all skews, all calibrations."""
    records = []
    for model in MODELS:
        for skew in SKEWS:
            for outcome in fitted.outcomes(model, _PLANNERS, skew, settings.few_draws):
                setting: dict[str, str | float] = {"skew": skew}
                values = {
                    ("throughput", "thousand tokens/s"): outcome.tokens_per_second(TOKENS) / 1e3,
                    ("layer", "ms"): outcome.layer_ms,
                }
                if outcome.planner != "none":
                    values |= {
                        ("gain", "%"): outcome.verdict.gain,
                        ("least gain over the calibrations", "%"): outcome.verdict.low,
                        ("most gain over the calibrations", "%"): outcome.verdict.high,
                    }
                records += [
                    Record("12", model, outcome.planner, setting, metric, value, unit, "simulated")
                    for (metric, unit), value in values.items()
                ]
        for skew, printed in ((-4.0, THROUGHPUT[model]), (0.0, UNIFORM_THROUGHPUT[model])):
            shown = {planner: printed[planner] for planner in _PRINTED}
            records += of_paper("12", shown, model=model, metric="throughput", unit="thousand tokens/s", skew=skew)
            records += of_paper("12", _gain(printed), model=model, metric="gain", unit="%", skew=skew)
        natural = {"topoep_paper": NATURAL_GAIN[model]}
        records += of_paper("12", natural, model=model, metric="gain", unit="%", routing="natural")
    return records


def _gain(printed: Mapping[str, Value]) -> dict[str, Value]:
    """Percent of throughput by TopoEP, with the weaker mark of the two values that it is made of."""
    ours, plain = printed["topoep_paper"], printed["none"]
    return {"topoep_paper": Value(100 * (ours.number / plain.number - 1), max(ours.mark, plain.mark, key="CIA".index))}


def draw(records: Sequence[Record]) -> Any:
    """One panel a model; the band is what the other calibrations make of the same gain."""
    figure, panels = style.canvas(15, 6, 3)
    for axes, model in zip(panels, MODELS, strict=True):
        own = list(pick(records, model=model))
        plain = [_value(own, "none", skew, "throughput") for skew in SKEWS]
        for planner in _PLANNERS:
            line = [_value(own, planner, skew, "throughput") for skew in SKEWS]
            axes.plot(
                range(len(SKEWS)),
                line,
                color=style.color(planner),
                marker=style.marker(planner),
                markersize=11 if planner == "topoep" else 7,
                label=f"{style.name(planner)}, modelled",
            )
            if planner != "none":
                band = [
                    [
                        base * (1 + _value(own, planner, skew, f"{end} gain over the calibrations") / 100)
                        for skew, base in zip(SKEWS, plain, strict=True)
                    ]
                    for end in ("least", "most")
                ]
                axes.fill_between(range(len(SKEWS)), *band, color=style.color(planner), alpha=0.15, linewidth=0)
        for record in pick(own, kind="paper", metric="throughput"):
            edge = {"markeredgecolor": style.color(record.planner)}
            axes.plot(SKEWS.index(float(record.setting["skew"])), record.value, **style.PAPER | edge)
        axes.plot([], [], **style.PAPER, label="printed in the paper (edge: whose)")
        axes.set_xticks(range(len(SKEWS)), [f"{skew:g}" for skew in SKEWS])
        axes.set(title=fitted.title(model), xlabel="router skew")
    panels[0].set_ylabel("thousand tokens/s, MODELLED\n(axes do not begin at 0)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=13, frameon=False)
    return figure


def _value(records: Sequence[Record], planner: str, skew: float, metric: str) -> float:
    (found,) = pick(records, planner=planner, skew=skew, metric=metric, kind="simulated")
    return found.value


FIGURE = Figure(
    "12",
    "Throughput against skew on the paper's cluster, modelled",
    "no training; a minute of planning",
    "Not measured: our plans in a model whose constants were fitted to the four Qwen3 and GLM values of this figure and"
    " of Figure 13a; DeepSeek-V2 was held out, and its modelled gains are not to be quoted. Bands are the same gains in"
    " the two other calibrations. Natural routing is missing, since the paper prints neither its load nor its traffic."
    " `topoep` knows the fitted rates, but neither the time of planning nor the term of the experts' size, and so is"
    " below none at mild skew; nor does it know what overlaps in the fitted rates, and at skew -2 and -4 is up to two"
    " points below `topoep_paper` on DeepSeek-V2, level on GLM. Gains at skew -4 exceed the paper's since without"
    " replicas our draws are less even than its own (13b).",
    run,
    draw,
    modelled=True,
)
