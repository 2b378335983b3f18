"""Beyond the paper: memory of a compiled layer against one whose receive buffers hold any routing."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.experiments import style
from train.experiments.figure import Figure
from train.experiments.record import Record, pick
from train.experiments.settings import MODELS, Settings

_TABLE = Path(__file__).resolve().parents[2] / "docs" / "layer.md"
_LINE = re.compile(r"\| (?P<model>[\w.-]+) \| [^|]+ \| (?P<mib>[\d,]+) \| (?P<worst>[\d,]+) \| [\d.]+ \|")
DESIGNS = {"mib": "topoep", "worst": "worst case"}


def run(settings: Settings) -> list[Record]:
    """Bytes of the programs that were compiled for docs/layer.md; compiling them anew takes an extra that is not here.

    Raises:
      ValueError: the table is not where it was.
    """
    del settings
    records = []
    for found in _LINE.finditer(_TABLE.read_text()):
        model = found["model"].lower()
        if model not in MODELS:
            continue
        for group, design in DESIGNS.items():
            value = float(found[group].replace(",", ""))
            setting: dict[str, str | float] = {"design": design, "tokens": 4096}
            records.append(Record("D", model, "", setting, "temporaries and results", value, "MiB", "compiled"))
    if len(records) != 2 * len(MODELS):
        raise ValueError(f"{_TABLE} has {len(records)} numbers of memory where {2 * len(MODELS)} are wanted")
    return records


def draw(records: Sequence[Record]) -> Any:
    """Pairs of bars."""
    figure, (axes,) = style.canvas(11, 4.6)
    looks = {
        "topoep": (style.color("topoep"), "", "this layer, buffers for 1.05 of the mean load"),
        "worst case": (style.OTHER, "//", "the same kernels without a plan, buffers for any routing"),
    }
    for y, model in enumerate(MODELS):
        for offset, (design, (color, hatch, label)) in zip((-0.19, 0.19), looks.items(), strict=True):
            (record,) = pick(records, model=model, design=design)
            axes.barh(
                y + offset,
                record.value,
                0.36,
                color=color,
                hatch=hatch,
                edgecolor="white",
                linewidth=0,
                label=None if y else label,
            )
            axes.text(record.value, y + offset, f" {record.value:,.0f}", va="center")
    axes.set_yticks(range(len(MODELS)), [style.MODELS[model] for model in MODELS])
    axes.invert_yaxis()
    axes.set(xlabel="MiB on a GPU: temporaries and results of one layer, forward and backward (compiled)")
    axes.set_xlim(0, 1.12 * axes.get_xlim()[1])
    figure.legend(loc="outside lower center", ncols=1, fontsize=13, frameon=False)
    return figure


FIGURE = Figure(
    "D",
    "Memory of a layer against designs that receive whatever comes",
    "nothing; the numbers of docs/layer.md, from programs that were compiled ahead of time",
    "Not in the paper; stored figures of programs compiled for H200 nodes that never ran (`python -m topoep_jax.aot"
    " --compare` makes them anew where the CUDA packages are installed).",
    run,
    draw,
)
