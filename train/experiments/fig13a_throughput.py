"""Figure 13a: throughput of the paper's planners at skew -4, modelled, point by point with its role in the fit."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from topoep_jax.simulate.calibration import CALIBRATIONS, Calibration, R
from topoep_jax.simulate.fit import Point, point_of_plans, points_of_paper
from topoep_jax.simulate.published import PLANNERS
from train.experiments import fitted, style
from train.experiments.figure import Figure
from train.experiments.record import Record, pick
from train.experiments.settings import MODELS, Settings

_SKEW = -4.0
RATIOS = {"paper": "load and traffic as the paper prints them", "plans": "our plans"}


def run(settings: Settings) -> list[Record]:
    """The fit's points of Figures 13a and 12 (at skew 0), in all calibrations; with our plans, in one."""
    seeds = settings.few_draws
    points = [
        point
        for calibration in CALIBRATIONS
        for point in fit_points(calibration, seeds)
        if point.metric == "throughput"
    ]
    points += [
        point_of_plans(model, planner, _SKEW, fitted.works(model, planner, _SKEW, seeds), R)
        for model in MODELS
        for planner in PLANNERS
    ]
    return of_points("13a", points)


def fit_points(calibration: Calibration, seeds: range) -> Iterator[Point]:
    """All points of the fit."""
    uniform = {model: fitted.works(model, "topoep_paper", 0.0, seeds) for model in MODELS}
    return points_of_paper(calibration, uniform)


def of_points(figure: str, points: Iterable[Point]) -> list[Record]:
    """The modelled values with their errors, and each printed value once."""
    records = [record for point in points for record in _of_point(figure, point)]
    return list({record.key(): record for record in records}.values())


def _of_point(figure: str, point: Point) -> list[Record]:
    setting: dict[str, str | float] = {
        "skew": point.skew,
        "ratios": RATIOS[point.ratios],
        "calibration": point.calibration,
        "role": point.role,
    }
    printed: dict[str, str | float] = {"skew": point.skew}
    return [
        Record(figure, point.model, point.planner, setting, point.metric, point.modelled, point.unit, "simulated"),
        Record(figure, point.model, point.planner, setting, "error", point.error_percent, "%", "simulated"),
        Record(
            figure,
            point.model,
            point.planner,
            printed,
            point.metric,
            point.paper.number,
            point.unit,
            "paper",
            mark=point.paper.mark,
        ),
    ]


def draw(records: Sequence[Record]) -> Any:
    """For each model and planner: printed, modelled from the printed ratios, modelled from our plans."""
    figure, panels = style.canvas(15, 5.6, 3, sharey=True)
    shades = {"paper": "", "plans": "//"}
    for axes, model in zip(panels, MODELS, strict=True):
        own = list(pick(records, model=model, skew=_SKEW, metric="throughput"))
        for y, planner in enumerate(PLANNERS):
            for offset, (ratios, hatch) in zip((-0.18, 0.18), shades.items(), strict=True):
                (record,) = pick(own, planner=planner, ratios=RATIOS[ratios], calibration=R.name)
                axes.barh(
                    y + offset,
                    record.value,
                    0.34,
                    color=style.color(planner),
                    hatch=hatch,
                    edgecolor="white",
                    linewidth=0,
                )
                place = axes.get_yaxis_transform()
                axes.text(1, y + offset, f"{record.value:.1f}", transform=place, ha="right", va="center", fontsize=11)
            printed = next(pick(own, planner=planner, kind="paper"))
            held_out = record.setting["role"] == "held out"
            axes.plot(printed.value, y, **style.PAPER | {"marker": "D" if held_out else "s"})
        axes.set(title=fitted.title(model), xlabel="thousand tokens/s, MODELLED")
        axes.set_xlim(0, 1.22 * axes.get_xlim()[1])
        axes.set_yticks(range(len(PLANNERS)), [style.name(planner) for planner in PLANNERS], fontsize=13)
    panels[0].invert_yaxis()
    panels[0].plot([], [], **style.PAPER | {"marker": "s"}, label="printed in the paper, and fitted to")
    panels[0].plot([], [], **style.PAPER, label="printed in the paper, held out")
    panels[0].barh([-9], [0], color=style.FAINT, label=f"modelled, {RATIOS['paper']}")
    panels[0].barh([-9], [0], color=style.FAINT, hatch="//", edgecolor="white", label=f"modelled, {RATIOS['plans']}")
    panels[0].set_ylim(len(PLANNERS) - 0.4, -0.6)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=13, frameon=False)
    return figure


FIGURE = Figure(
    "13a",
    "Throughput at skew -4 on the paper's cluster, modelled, point by point",
    "no training; shares its plans with Figure 12",
    "Not measured: the model was fitted to Megatron-LM and TopoEP of Qwen3 and GLM (role calibration), spends one value"
    " a model on its base (role base), and predicts the rest (role held out, though its form was chosen after seeing"
    " them); owners of the nine other baseline values are a guess (mark A). Calibration R is the recommended one, A"
    " does without the term of the experts' size, C is fitted to all three models; marks are other letters.",
    run,
    draw,
    modelled=True,
)
