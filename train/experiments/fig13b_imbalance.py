"""Figure 13b: load of the busiest rank over the mean at skew -4, for all planners."""

from collections.abc import Sequence
from typing import Any

from topoep_jax.shapes import SHAPES
from topoep_jax.simulate.published import IMBALANCE
from train.experiments import bars, plans
from train.experiments.figure import Figure
from train.experiments.record import Record, of_paper
from train.experiments.settings import MODELS, Settings

_SKEW = -4.0


def run(settings: Settings) -> list[Record]:
    """Every planner on every draw, two slots."""
    records = []
    for model in MODELS:
        shape = SHAPES[model]
        for seed in settings.draws:
            for planner in plans.ALL:
                plan = plans.scored(shape, _SKEW, seed, planner, plans.problem(shape))
                values = {"imbalance": plan.imbalance, "slots used": float(plans.slots_of(plan))}
                records += [
                    Record("13b", model, planner, {"skew": _SKEW}, metric, value, "", "measured", seed)
                    for metric, value in values.items()
                ]
        records += of_paper("13b", IMBALANCE[model], model=model, metric="imbalance", skew=_SKEW)
    return records


def draw(records: Sequence[Record]) -> Any:
    """Bars, and the paper's values."""
    return bars.draw(records, {"imbalance": "rows of the busiest rank / mean"}, ideal=1.0)


FIGURE = Figure(
    "13b",
    "Load of the busiest rank over the mean, skew -4, two slots",
    "no training; a few seconds of planning per model and seed",
    "Forced routing has the paper's distribution but not its draws, whose number it does not print; our Megatron-LM is"
    " less even than the paper's in all three models, and our FlexMoE and EPLB plan better than its numbers say of"
    " theirs.",
    run,
    draw,
)
