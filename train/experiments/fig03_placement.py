"""Figure 3: what one replica moves between nodes, depending on where it is; from the cost model's byte counts."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from topoep_jax.plan import pulls
from topoep_jax.plan.hardware import Hardware
from topoep_jax.plan.problem import CostModel
from topoep_jax.shapes import SHAPES
from topoep_jax.topology import Topology
from train.experiments import style
from train.experiments.figure import Figure
from train.experiments.published import PLACEMENT_MIB
from train.experiments.record import Record, pick
from train.experiments.settings import Settings

_MODEL = "qwen3-30b-a3b"
_TOKENS = 4096
_MIB = 2**20
_MAIN = 2  # The first rank of node 1 has the expert; it is numbered so, that its main rank is that of the drawing.
_RANKS = Topology.uniform(2, 2)
PLACEMENTS = {"replica on node 1": 3, "replica on node 0": 0}
"""The rank that holds the replica."""


def run(settings: Settings) -> list[Record]:
    """Bytes of both placements, and the paper's."""
    del settings
    shape = SHAPES[_MODEL]
    cost = CostModel.from_model(shape.hidden, shape.ffn, Hardware.h800())
    records = []
    for placement, holder in PLACEMENTS.items():
        held = np.full((4, 1), -1)
        held[holder, 0] = _MAIN
        copies = pulls.schedule(held, 1, _RANKS, cost)
        crosses = _RANKS.crosses_domains()
        pulled = int((pulls.moved_bytes(copies, _RANKS, cost) * crosses).sum())
        # Node 0's tokens stay there if it has the replica; else all of them cross, in four exchanges.
        crossing = _TOKENS if _RANKS.domain_of_rank[holder] == 1 else 0
        moved = {
            "tokens": 4 * crossing * cost.token_bytes,
            "parameters": 2 * pulled,
            "gradients": pulled,  # As the paper sends them: in bf16, once.
        }
        records += [
            Record(
                "3",
                _MODEL,
                "",
                {"placement": placement, "what": what},
                "bytes between nodes",
                moved[what] / _MIB,
                "MiB",
                "simulated",
            )
            for what in moved
        ]
        total = sum(moved.values()) / _MIB
        records.append(
            Record(
                "3",
                _MODEL,
                "",
                {"placement": placement, "what": "all"},
                "bytes between nodes",
                total,
                "MiB",
                "simulated",
            )
        )
        printed = PLACEMENT_MIB[placement]
        records.append(
            Record(
                "3",
                _MODEL,
                "",
                {"placement": placement, "what": "all"},
                "bytes between nodes",
                printed.number,
                "MiB",
                "paper",
                mark=printed.mark,
            )
        )
    return records


def draw(records: Sequence[Record]) -> Any:
    """Stacked bars, and the paper's totals."""
    figure, (axes,) = style.canvas(9, 4.2)
    colors = {"tokens": "#0072b2", "parameters": "#e69f00", "gradients": "#f0e442"}
    hatches = {"tokens": "", "parameters": "//", "gradients": ".."}
    for y, placement in enumerate(PLACEMENTS):
        left = 0.0
        for what, shade in colors.items():
            (record,) = pick(records, placement=placement, what=what, kind="simulated")
            axes.barh(
                y,
                record.value,
                0.5,
                left=left,
                color=shade,
                hatch=hatches[what],
                edgecolor="white",
                label=what if not y else None,
            )
            left += record.value
        (paper,) = pick(records, placement=placement, kind="paper")
        axes.text(left, y, f"   {left:.0f} MiB", va="center")
        axes.plot(paper.value, y, **style.PAPER, label="printed in the paper" if not y else None)
    axes.set_yticks(range(2), list(PLACEMENTS))
    axes.invert_yaxis()
    axes.set(xlim=(0, 80), xlabel="MiB between nodes, forward and backward (counted from sizes)")
    figure.legend(loc="outside upper center", ncols=4, fontsize=13, frameon=False)
    return figure


FIGURE = Figure(
    "3",
    "The placement example",
    "nothing; it is arithmetic",
    "Nothing differs; the gradient counts as the paper sends it, in bf16, where this library sends f32 (18 MiB, so 36"
    " MiB in all).",
    run,
    draw,
)
