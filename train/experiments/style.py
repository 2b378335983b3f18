"""How all figures look: colours that colour-blind readers can tell apart, markers, names, large text."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure as Canvas
from matplotlib.layout_engine import ConstrainedLayoutEngine

INK, FAINT, OTHER = "#222222", "#999999", "#b5b5b5"
RC: Any = {
    "font.size": 14,
    "axes.titlesize": 15,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "legend.frameon": False,
    "lines.linewidth": 2,
    "lines.markersize": 7,
}
# Okabe and Ito's palette, with a marker of its own each, so that no line depends on its colour.
STYLES = {
    "none": ("#000000", "s"),
    "fastermoe": ("#56b4e9", "v"),
    "flexmoe": ("#009e73", "D"),
    "eplb_fixed_main": ("#cc79a7", "^"),
    "topoep_paper": ("#0072b2", "o"),
    "topoep": ("#d55e00", "*"),
}
"""Colour and marker of the planners that the paper compares, and of ours."""
NAMES = {
    "none": "none (Megatron-LM)",
    "fastermoe": "fastermoe",
    "flexmoe": "flexmoe",
    "eplb_fixed_main": "eplb_fixed_main (DeepSeek-EPLB)",
    "topoep_paper": "topoep_paper (TopoEP)",
    "topoep": "topoep (ours)",
    "eplb": "eplb †",
    "moonep": "moonep †",
}
MODELS = {"qwen3-30b-a3b": "Qwen3-30B-A3B", "glm-4.5-air": "GLM-4.5-Air", "deepseek-v2": "DeepSeek-V2"}
PAPER = {
    "marker": "D",
    "color": "white",
    "markeredgecolor": INK,
    "markeredgewidth": 1.8,
    "linestyle": "",
    "zorder": 5,
}
"""How a value of the paper is marked wherever it stands beside ours."""


def color(planner: str) -> str:
    """The color of a planner."""
    return STYLES.get(planner, (OTHER, ""))[0]


def marker(planner: str) -> str:
    """The marker of a planner."""
    return STYLES.get(planner, ("", "."))[1]


def name(planner: str) -> str:
    """The name in legends and on axes; † marks planners that take more replicas than there are slots."""
    return NAMES.get(planner, planner)


def canvas(
    width: float, height: float, columns: int = 1, rows: int = 1, **options: Any
) -> tuple[Canvas, Sequence[Any]]:
    """An empty figure, and its axes in reading order; drawn to within `rc_context(RC)`."""
    # Numbers at the end of a panel must not look like those of the next.
    engine = ConstrainedLayoutEngine(wspace=0.06)
    figure = Canvas(figsize=(width, height), layout=engine)
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)
