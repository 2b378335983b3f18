"""What a run leaves behind: a line per step, a summary with the comparison against no balancing, and three plots."""

import json
import pathlib
from typing import Any, TextIO

import matplotlib
import numpy as np

from topoep_jax import Status, Topology
from train.state import StepMetrics

matplotlib.use("Agg")  # Files only; a run must not need a display.
import matplotlib.pyplot as plt

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


def make_record(step: int, metrics: StepMetrics, *, tokens: int, seconds: float, rerun: bool) -> dict[str, Any]:
    """The line of one step.

    Args:
      step: steps done, from 1.
      metrics: NumPy copies.
      tokens: tokens of the step.
      seconds: its duration.
      rerun: whether it overflowed with overflow="flag", and `metrics` are those of its second run.

    Returns:
      Losses and norms; imbalances and shares as means over the layers, rows and slots as sums, `passes` as maximum;
      `status` with CAP_MET and EMPTY where all layers agree and the other bits where any has them; `expert_load`
      by layer; `rerun`.
    """
    moe = metrics.moe
    agreed = int(Status.CAP_MET | Status.EMPTY)
    every, some = int(np.bitwise_and.reduce(moe.status)), int(np.bitwise_or.reduce(moe.status))
    record: dict[str, Any] = {
        "step": step,
        "loss": float(metrics.loss),
        "balance_loss": float(metrics.balance),
        "grad_norm": float(metrics.grad_norm),
        "tokens_per_s": round(tokens / seconds, 1),
    }
    for name in ("imbalance_before", "imbalance", "inter_domain_before", "inter_domain", "replica"):
        record[name] = float(np.mean(getattr(moe, name)))
    for name in ("overflow_rows", "slots_used", "dropped_rows"):
        record[name] = int(np.sum(getattr(moe, name)))
    record["passes"] = int(np.max(moe.passes))
    record["rerun"] = rerun
    record["status"] = (every & agreed) | (some & ~agreed)
    record["expert_load"] = moe.expert_load.tolist()
    return record


class Log:
    """`metrics.jsonl`, one line per step; a resumed run keeps the lines up to its checkpoint and goes on below them."""

    def __init__(self, path: pathlib.Path | None, *, keep: int) -> None:
        """Opens `path`, or with None only collects; raises ValueError where fewer than `keep` lines are there."""
        self.records: list[dict[str, Any]] = []
        self._file: TextIO | None = None
        if path is None:
            return
        lines = path.read_text().splitlines(keepends=True) if keep else []
        if len(lines) < keep:
            raise ValueError(f"{path} has {len(lines)} lines, but the checkpoint is of step {keep}: restore the file")
        self.records += [json.loads(line) for line in lines[:keep]]
        self._file = path.open("a", buffering=1)
        self._file.truncate(sum(len(line.encode()) for line in lines[:keep]))

    def append(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        if self._file:
            self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        if self._file:
            self._file.close()


def summarize(records: list[dict[str, Any]], *, planner: str, topology: Topology) -> dict[str, Any]:
    """Figures of a whole run. The "before" figures are what the same demand would have been without balancing."""
    few = max(1, len(records) // 20)
    loss = [record["loss"] for record in records]
    mean = {
        name: float(np.mean([record[name] for record in records]))
        for name in ("imbalance_before", "imbalance", "inter_domain_before", "inter_domain", "replica")
    }
    return {
        "planner": planner,
        "domain_of_rank": list(topology.domain_of_rank),
        "steps": len(records),
        "first_loss": loss[0],
        "last_loss": loss[-1],
        "mean_of_first_losses": float(np.mean(loss[:few])),
        "mean_of_last_losses": float(np.mean(loss[-few:])),
        "tokens_per_s": float(np.median([record["tokens_per_s"] for record in records])),
        **mean,
        "share_of_steps_improved": float(np.mean([r["imbalance"] < r["imbalance_before"] for r in records])),
        "overflow_rows": sum(record["overflow_rows"] for record in records),
        "dropped_rows": sum(record["dropped_rows"] for record in records),
        "most_passes": max(record["passes"] for record in records),
        "share_of_steps_overflowing": float(np.mean([record["passes"] > 1 for record in records])),
        "steps_run_again": sum(record.get("rerun", False) for record in records),
    }


def comparison(summary: dict[str, Any]) -> str:
    """The summary as a small table for the terminal."""
    planner = summary["planner"]
    rows = [
        ("rank load, max / mean", f"{summary['imbalance_before']:.3f}", f"{summary['imbalance']:.3f}"),
        ("inter-domain share", f"{summary['inter_domain_before']:.1%}", f"{summary['inter_domain']:.1%}"),
        ("served by replicas", f"{0:.1%}", f"{summary['replica']:.1%}"),
    ]
    table = [f"  {name:<24}{before:>12}{after:>16}" for name, before, after in [("", "no balancing", planner), *rows]]
    return "\n".join(
        [
            f"Balancing over {summary['steps']} steps, means over steps and layers, both from the same demand:",
            *table,
            f"  Imbalance fell in {summary['share_of_steps_improved']:.1%} of the steps;"
            f" extra passes for rows beyond the receive buffer ran in {summary['share_of_steps_overflowing']:.1%}"
            f"{', by a second run of the step' if summary['steps_run_again'] else ''}.",
            f"  Loss {summary['first_loss']:.3f} -> {summary['last_loss']:.3f} nats per token.",
        ]
    )


def write_report(run_dir: pathlib.Path, records: list[dict[str, Any]], summary: dict[str, Any]) -> list[pathlib.Path]:
    """Writes `summary.json` and the plots; returns their paths."""
    path = run_dir / "summary.json"
    path.write_text(json.dumps(summary, indent=2) + "\n")
    paths = [path]
    for name, draw in (("loss", _draw_loss), ("imbalance", _draw_imbalance), ("expert_load", _draw_expert_load)):
        with plt.rc_context(_STYLE):
            figure = draw(records, summary)
            paths.append(run_dir / f"{name}.png")
            figure.savefig(paths[-1])
            plt.close(figure)
    return paths


def _smooth(values: np.ndarray) -> np.ndarray:
    """Centred moving mean over a fifteenth of the run; windows shrink at the ends, so that those are not bent."""
    last = len(values) - 1
    reach = [min(i, last - i, max(1, len(values) // 30)) for i in range(len(values))]
    return np.array([values[i - r : i + r + 1].mean() for i, r in enumerate(reach)])


def _column(records: list[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([record[name] for record in records])


def _draw_loss(records: list[dict[str, Any]], summary: dict[str, Any]) -> plt.Figure:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    step, loss = _column(records, "step"), _column(records, "loss")
    axes.plot(step, loss, color=_AFTER, alpha=0.35, linewidth=1)
    axes.plot(step, _smooth(loss), color=_AFTER, linewidth=2)
    axes.annotate(
        f"{loss[-1]:.2f}", (step[-1], loss[-1]), (6, 0), textcoords="offset points", va="center", color=_AFTER
    )
    axes.set(title="Training loss", xlabel="step", ylabel="nats per token", xlim=(0, step[-1] * 1.04))
    return figure


def _draw_imbalance(records: list[dict[str, Any]], summary: dict[str, Any]) -> plt.Figure:
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    step = _column(records, "step")
    balanced = f"balanced ({summary['planner']})"
    titles = {"imbalance": "Rank load, max / mean", "inter_domain": "Assignments that leave their domain"}
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        for key, color, label in ((f"{name}_before", _BEFORE, "no balancing"), (name, _AFTER, balanced)):
            values = _column(records, key)
            smooth = _smooth(values)
            axes.plot(step, values, color=color, alpha=0.3, linewidth=0.8)
            axes.plot(step, smooth, color=color, linewidth=2, label=label)
        axes.set(title=title, xlabel="step", xlim=(0, step[-1] * 1.02))
        axes.legend(frameon=False, labelcolor="linecolor", handlelength=1.2)
    panels[0].axhline(1, color=_FAINT, linewidth=0.8, linestyle=(0, (4, 3)))
    panels[1].yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1, decimals=0))
    panels[1].set_ylim(bottom=0)
    return figure


def _draw_expert_load(records: list[dict[str, Any]], summary: dict[str, Any]) -> plt.Figure:
    recent = records[-max(1, len(records) // 4) :]
    load = np.mean([record["expert_load"] for record in recent], axis=0)
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
    axes.set_title(
        f"Load of every expert under its main rank, last {len(recent)} steps; the wide gap parts the domains"
    )
    figure.colorbar(image, ax=axes, label="load / mean", pad=0.01).outline.set_visible(False)
    return figure
