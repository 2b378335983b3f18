"""Beyond the paper: memory of a compiled layer against one whose receive buffers hold any routing."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from topoep_jax.aot import command
from topoep_jax.shapes import SHAPES
from train.experiments import gpu_trip, style
from train.experiments.figure import Figure
from train.experiments.record import Record, pick
from train.experiments.settings import MODELS, Settings

_TABLE = Path(__file__).resolve().parents[2] / "docs" / "layer.md"
_LINE = re.compile(r"\| (?P<model>[\w.-]+) \| [^|]+ \| (?P<mib>[\d,]+) \| (?P<worst>[\d,]+) \| [\d.]+ \|")
_METRIC = "temporaries and results"
DESIGNS = ("topoep", "worst case")


def run(settings: Settings) -> list[Record]:
    """Bytes of compiled programs: anew in the full set, where that is possible, else those of docs/layer.md."""
    if settings.full and not gpu_trip.missing():
        found, source = {model: compiled(model) for model in MODELS}, gpu_trip.SOURCE
    else:
        found, source = stored(), "docs/layer.md"
    return [
        Record("D", model, "", {"design": design, "tokens": 4096, "from": source}, _METRIC, value, "MiB", "compiled")
        for model, values in found.items()
        for design, value in zip(DESIGNS, values, strict=True)
    ]


def compiled(model: str) -> tuple[float, float]:
    """MiB of this layer and of the worst case, as `python -m topoep_jax.aot --compare` finds them."""
    topology = SHAPES[model].topology
    gpus = topology.num_ranks // topology.num_domains
    values = command.define()
    values(["", f"--model={model}", f"--topology=1x{topology.num_domains}x{gpus}", "--compare", "--json"])
    report = json.loads("".join(command.run(values)))
    return report["layer_bytes"] / 2**20, report["worst_case_layer_bytes"] / 2**20


def stored() -> dict[str, tuple[float, float]]:
    """The same of each model, from the table of docs/layer.md.

    Raises:
      ValueError: the table is not where it was.
    """
    values = {
        found["model"].lower(): (float(found["mib"].replace(",", "")), float(found["worst"].replace(",", "")))
        for found in _LINE.finditer(_TABLE.read_text())
    }
    if missing := [model for model in MODELS if model not in values]:
        raise ValueError(f"{_TABLE} has no memory of {missing}")
    return {model: values[model] for model in MODELS}


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
    "nothing, and takes the numbers of docs/layer.md; with --full and the extra `cuda-aot` it compiles the layers anew,"
    " in minutes",
    "Not in the paper; programs compiled for H200 nodes that never ran. The stored ones are of jax 0.12.0, and other"
    " versions of its compiler need other memory.",
    run,
    draw,
    inputs=lambda: f"{stored()}; {gpu_trip.missing()}",
)
