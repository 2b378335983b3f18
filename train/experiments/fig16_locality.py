"""Figure 16: how much leaves its node, and how much replicas serve, at skew -4, for all planners."""

from collections.abc import Sequence
from typing import Any

from topoep_jax.shapes import SHAPES
from topoep_jax.simulate.published import INTER_NODE
from train.experiments import bars, plans
from train.experiments.figure import Figure
from train.experiments.published import REPLICA_SERVED
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
                values = {"inter-node share": plan.inter_domain, "replica-served share": plan.replica}
                records += [
                    Record("16", model, planner, {"skew": _SKEW}, metric, 100 * value, "%", "measured", seed)
                    for metric, value in values.items()
                ]
        for metric, printed in (("inter-node share", INTER_NODE), ("replica-served share", REPLICA_SERVED)):
            records += of_paper("16", printed[model], model=model, metric=metric, unit="%", factor=100, skew=_SKEW)
    return records


def draw(records: Sequence[Record]) -> Any:
    """Bars, and the paper's values."""
    metrics = {
        "inter-node share": "(a) % executed on another node",
        "replica-served share": "(b) % executed by replicas",
    }
    return bars.draw(records, metrics)


FIGURE = Figure(
    "16",
    "Inter-node and replica-served shares of the assignments, skew -4, two slots",
    "no training; shares its plans with Figure 13b",
    "Same draws as Figure 13b; `topoep` minimises time and not traffic, and on DeepSeek-V2, whose experts of 47 MB take"
    " long to copy, lets about half of the rows cross in 4 of the first 10 draws (46.8 to 49.8 %) and under 5 % in the"
    " others: a fifth in the mean alone. `eplb_fixed_main` and `flexmoe` follow their published programs and papers"
    " (docs/planners.md), the paper has versions of its own: our EPLB leaves copies in the node of their main, so that"
    " nothing becomes more local, and our FlexMoE keeps more in its node than the paper's.",
    run,
    draw,
)
