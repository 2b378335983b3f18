"""Beyond the paper: domains of different sizes, and ranks that are slower than others."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from topoep_jax.plan.evaluate import evaluate
from topoep_jax.plan.hardware import Hardware
from topoep_jax.plan.run import run_planner
from topoep_jax.shapes import SHAPES
from topoep_jax.topology import Topology
from train.experiments import plans, style
from train.experiments.figure import Figure
from train.experiments.record import Record, mean_of
from train.experiments.settings import Settings

_MODEL, _SKEW = "qwen3-30b-a3b", -1.0
_RANKS = 32


def _sizes(*sizes: int) -> Topology:
    return Topology(tuple(domain for domain, size in enumerate(sizes) for _ in range(size)))


def _speeds(slow: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(slow.get(rank, 1000) for rank in range(_RANKS))


CLUSTERS: dict[str, tuple[Topology, tuple[int, ...] | None]] = {
    "4 nodes of 8": (_sizes(8, 8, 8, 8), None),
    "nodes of 12, 8, 8, 4": (_sizes(12, 8, 8, 4), None),
    "nodes of 16, 8, 4, 4": (_sizes(16, 8, 4, 4), None),
    "one rank at 80 %": (_sizes(8, 8, 8, 8), _speeds({5: 800})),
    "one node at 80 %": (_sizes(8, 8, 8, 8), _speeds(dict.fromkeys(range(8, 16), 800))),
    "one rank at 50 %": (_sizes(8, 8, 8, 8), _speeds({5: 500})),
}
"""By name: domains, and the speed of each rank in permille."""
_ROWS = ("none", "topoep_paper", "topoep, not told of speeds", "topoep")


def run(settings: Settings) -> list[Record]:
    """Predicted layer time of each cluster, whatever the planner was told of the ranks' speeds."""
    records = []
    for name, (topology, speeds) in CLUSTERS.items():
        shape = dataclasses.replace(SHAPES[_MODEL], topology=topology)
        nominal = plans.problem(shape)
        told = plans.problem(shape, hardware=dataclasses.replace(Hardware.h800(), rank_speed=speeds))
        for seed in settings.few_draws:
            omega = plans.demand(shape, _SKEW, seed)
            for row in _ROWS:
                asked = nominal if "not told" in row else told
                plan = evaluate(run_planner(omega, asked, row.partition(",")[0]), omega, told)
                setting: dict[str, str | float] = {"cluster": name, "skew": _SKEW}
                ms = plan.objective_ps / 1e9
                records.append(Record("C", _MODEL, row, setting, "layer on uneven ranks", ms, "ms", "simulated", seed))
    return records


def draw(records: Sequence[Record]) -> Any:
    """Grouped bars by cluster."""
    figure, (axes,) = style.canvas(14, 6)
    hatches = dict(zip(_ROWS, ("", "", "//", ""), strict=True))
    for number, row in enumerate(_ROWS):
        planner = row.partition(",")[0]
        for x, cluster in enumerate(CLUSTERS):
            ms = mean_of(records, planner=row, cluster=cluster)
            at = x + 0.2 * (number - 1.5)
            label = (style.name(planner) if planner == row else row) if not x else None
            axes.bar(
                at,
                ms,
                0.18,
                color=style.color(planner),
                hatch=hatches[row],
                edgecolor="white",
                linewidth=0,
                label=label,
            )
            axes.text(at, ms, f"{ms:.1f}", ha="center", va="bottom", fontsize=11)
    axes.set_xticks(range(len(CLUSTERS)), [name.replace(" of ", " of\n").replace(" at ", "\nat ") for name in CLUSTERS])
    axes.set_ylabel("predicted ms per layer, MODELLED")
    figure.legend(loc="outside lower center", ncols=4, fontsize=13, frameon=False)
    return figure


FIGURE = Figure(
    "C",
    f"Uneven nodes and slow ranks, Qwen3-30B-A3B at skew {_SKEW:g}",
    "no training; a few seconds",
    "Not in the paper, whose nodes are equal and whose planner knows no speeds: predicted with nominal rates of an"
    " H800; `not told` plans as if all ranks were equal, and is judged on the ranks as they are.",
    run,
    draw,
    modelled=True,
)
