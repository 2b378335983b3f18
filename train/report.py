"""What a run leaves when it ends: a summary with the comparison against no balancing, and three plots."""

import json
import pathlib
from typing import Any

import matplotlib
import numpy as np

from topoep_jax import Topology
from train.log import LOADS, Columns, mean_load

matplotlib.use("Agg")  # Files only; a run must not need a display.
import matplotlib.pyplot as plt

SUMMARY = "summary.json"
_BEFORE, _AFTER, _INK, _FAINT = "#d1495b", "#00798c", "#2b2d42", "#8d99ae"
_LOAD_COLORS = matplotlib.colors.LinearSegmentedColormap.from_list("load", ["#eaf1f3", "#7fbcc4", _AFTER, "#0b2b3a"])
_STYLE: Any = {
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlepad": 14,
    "axes.titlesize": 12,
    "font.size": 10,
    "savefig.dpi": 150,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


def summarize(columns: Columns, *, topology: Topology) -> dict[str, Any]:
    """Figures of a whole run. The "before" figures are what the same demand would have been without balancing.

    What depends on the planner is of the steps of one: of the last, if the run went on with another.
    """
    steps, loss = len(columns["step"]), columns["loss"]
    few = max(1, steps // 20)
    planner = columns["planner"][-1]
    compared = columns["planner"] == planner
    same = {name: values[compared] for name, values in columns.items()}
    names = ("imbalance_before", "imbalance", "inter_domain_before", "inter_domain", "replica")
    return {
        "planner": str(planner),
        "domain_of_rank": list(topology.domain_of_rank),
        "steps": steps,
        **({} if compared.all() else {"steps_of_planner": int(compared.sum())}),
        "first_loss": float(loss[0]),
        "last_loss": float(loss[-1]),
        "mean_of_first_losses": float(np.mean(loss[:few])),
        "mean_of_last_losses": float(np.mean(loss[-few:])),
        "tokens_per_s": float(np.median(same["tokens_per_s"])),
        **{name: float(np.mean(same[name])) for name in names},
        "share_of_steps_improved": float(np.mean(same["imbalance"] < same["imbalance_before"])),
        "overflow_rows": int(same["overflow_rows"].sum()),
        "dropped_rows": int(same["dropped_rows"].sum()),
        "most_passes": int(same["passes"].max()),
        "share_of_steps_overflowing": float(np.mean(same["passes"] > 1)),
        "steps_run_again": int(same["rerun"].sum()),
    }


def comparison(summary: dict[str, Any]) -> str:
    """The summary as a small table for the terminal."""
    planner, steps = summary["planner"], summary.get("steps_of_planner", summary["steps"])
    rows = [
        ("rank load, max / mean", f"{summary['imbalance_before']:.3f}", f"{summary['imbalance']:.3f}"),
        ("inter-domain share", f"{summary['inter_domain_before']:.1%}", f"{summary['inter_domain']:.1%}"),
        ("served by replicas", f"{0:.1%}", f"{summary['replica']:.1%}"),
    ]
    table = [f"  {name:<24}{before:>12}{after:>16}" for name, before, after in [("", "no balancing", planner), *rows]]
    return "\n".join(
        [
            f"Balancing over {steps} steps, means over steps and layers, both from the same demand:",
            *table,
            f"  Imbalance fell in {summary['share_of_steps_improved']:.1%} of the steps;"
            f" extra passes for rows beyond the receive buffer ran in {summary['share_of_steps_overflowing']:.1%}"
            f"{', by a second run of the step' if summary['steps_run_again'] else ''}.",
            f"  Loss {summary['first_loss']:.3f} -> {summary['last_loss']:.3f} nats per token.",
        ]
    )


def write_report(run_dir: pathlib.Path, columns: Columns, summary: dict[str, Any]) -> list[pathlib.Path]:
    """Writes the plots and, when they are there, `summary.json`; returns their paths."""
    paths = [run_dir / SUMMARY]
    with plt.rc_context(_STYLE):
        figures = {"loss": _draw_loss(columns), "imbalance": _draw_imbalance(columns, summary)}
        recent = columns["step"][-max(1, len(columns["step"]) // 4) :]
        if (load := mean_load(run_dir / LOADS, recent)) is not None:
            figures["expert_load"] = _draw_expert_load(load, len(recent), summary)
        for name, figure in figures.items():
            paths.append(run_dir / f"{name}.png")
            figure.savefig(paths[-1])
            plt.close(figure)
    # Its presence says that the run has reported.
    partial = run_dir / f".{SUMMARY}"
    partial.write_text(json.dumps(summary, indent=2) + "\n")
    partial.replace(paths[0])
    return paths


def _smooth(values: np.ndarray) -> np.ndarray:
    """Centred moving mean over a fifteenth of the run; windows shrink at the ends, so that those are not bent."""
    last = len(values) - 1
    reach = [min(i, last - i, max(1, len(values) // 30)) for i in range(len(values))]
    return np.array([values[i - r : i + r + 1].mean() for i, r in enumerate(reach)])


def _draw_loss(columns: Columns) -> plt.Figure:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    step, loss = columns["step"], columns["loss"]
    axes.plot(step, loss, color=_AFTER, alpha=0.35, linewidth=1)
    axes.plot(step, _smooth(loss), color=_AFTER, linewidth=2)
    axes.annotate(
        f"{loss[-1]:.2f}", (step[-1], loss[-1]), (6, 0), textcoords="offset points", va="center", color=_AFTER
    )
    axes.set(title="Training loss", xlabel="step", ylabel="nats per token", xlim=(0, step[-1] * 1.04))
    return figure


def _draw_imbalance(columns: Columns, summary: dict[str, Any]) -> plt.Figure:
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    step = columns["step"]
    balanced = f"balanced ({summary['planner']})"
    titles = {"imbalance": "Rank load, max / mean", "inter_domain": "Assignments that leave their domain"}
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        for key, color, label in ((f"{name}_before", _BEFORE, "no balancing"), (name, _AFTER, balanced)):
            values = columns[key]
            smooth = _smooth(values)
            axes.plot(step, values, color=color, alpha=0.3, linewidth=0.8)
            axes.plot(step, smooth, color=color, linewidth=2, label=label)
        axes.set(title=title, xlabel="step", xlim=(0, step[-1] * 1.02))
        axes.legend(frameon=False, labelcolor="linecolor", handlelength=1.2)
    panels[0].axhline(1, color=_FAINT, linewidth=0.8, linestyle=(0, (4, 3)))
    panels[1].yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1, decimals=0))
    panels[1].set_ylim(bottom=0)
    return figure


def _draw_expert_load(load: np.ndarray, steps: int, summary: dict[str, Any]) -> plt.Figure:
    load = load / load.mean(axis=1, keepdims=True)
    num_layers, num_experts = load.shape
    figure, axes = plt.subplots(figsize=(10, 1.6 + 0.5 * min(num_layers, 12)), layout="constrained")
    image = axes.imshow(load, aspect="auto", cmap=_LOAD_COLORS, vmin=0, interpolation="nearest")
    domain = summary["domain_of_rank"]
    for rank in range(1, len(domain)):
        edge = rank * num_experts / len(domain) - 0.5
        axes.axvline(edge, color="white", linewidth=9 if domain[rank] != domain[rank - 1] else 2.5)
    ticks = [(rank + 0.5) * num_experts / len(domain) - 0.5 for rank in range(len(domain))]
    axes.set_xticks(ticks, [f"rank {rank}" for rank in range(len(domain))])
    axes.set_yticks(range(num_layers), [f"layer {layer}" for layer in range(num_layers)])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(f"Load of every expert under its main rank, last {steps} steps; the wide gap parts the domains")
    figure.colorbar(image, ax=axes, label="load / mean", pad=0.01).outline.set_visible(False)
    return figure
