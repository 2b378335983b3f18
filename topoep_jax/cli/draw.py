"""Draws one plan: loads, traffic and time before and after, and a map of who holds and runs what."""

from typing import Any

import numpy as np

from topoep_jax._needs import to_install
from topoep_jax.cli.output import milliseconds
from topoep_jax.cli.story import Story

_BEFORE, _AFTER = "#b8bec7", "#1f6fb4"
_TERMS = ("#1f6fb4", "#d1495b", "#f0a3ad", "#e09f3e", "#f3d6a4")
_MOST_EXPERTS = 28


def draw(story: Story, path: str) -> None:
    """Writes a PNG.

    Raises:
      ImportError: Matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"--png needs Matplotlib: {to_install('matplotlib')}") from error
    figure = Figure(figsize=(14, 13), layout="constrained")
    grid = figure.add_gridspec(3, 2, height_ratios=(1.0, 0.85, 1.7))
    summary = story.summary().replace("->", "\N{RIGHTWARDS ARROW}")
    figure.suptitle("\n".join([story.title, summary, story.setting]), fontsize=12)
    _draw_load(figure.add_subplot(grid[0, :]), story)
    _draw_nics(figure.add_subplot(grid[1, 0]), story)
    _draw_time(figure.add_subplot(grid[1, 1]), story)
    _draw_map(figure, figure.add_subplot(grid[2, :]), story)
    figure.savefig(path, dpi=110)


def _draw_load(axes: Any, story: Story) -> None:
    ranks = np.arange(story.problem.topology.num_ranks)
    for offset, plan, color, label in (
        (-0.2, story.before, _BEFORE, "without copies"),
        (0.2, story.after, _AFTER, "with copies"),
    ):
        axes.bar(ranks + offset, plan.rank_load / story.mean_load, 0.4, color=color, label=label)
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--", label=f"mean: {story.mean_load:,.0f} rows")
    axes.set_ylabel("load / mean load")
    axes.set_title("Load: rows each rank executes; the layer waits for the tallest bar", loc="left")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False)
    _mark_domains(axes, story)


def _draw_nics(axes: Any, story: Story) -> None:
    ranks = np.arange(story.problem.topology.num_ranks)
    before, after = story.nic_bytes()
    for offset, moved, color in ((-0.2, before, _BEFORE), (0.2, after, _AFTER)):
        axes.bar(ranks + offset, moved.max(axis=0) / 1e6, 0.4, color=color)
    axes.set_ylabel("MB sent or received")
    axes.set_title("Network: what each rank moves between domains, forward pass", loc="left")
    _mark_domains(axes, story)


def _draw_time(axes: Any, story: Story) -> None:
    left = np.zeros(2)
    for (cause, both), color in zip(story.terms().items(), _TERMS, strict=True):
        width = np.array(both) / 1e9
        axes.barh([1, 0], width, left=left, color=color, label=cause, height=0.6)
        left += width
    for y, total in zip((1, 0), left, strict=True):
        axes.text(total, y, f" {milliseconds(total)} ms", va="center")
    axes.set_yticks([1, 0], ["without\ncopies", "with\ncopies"])
    axes.set_xlim(0, left.max() * 1.18 or 1)
    axes.set_xlabel("ms of one layer: compute of forward and backward, traffic of the forward pass")
    axes.set_title("Predicted time", loc="left")
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.2), ncols=3, frameon=False, fontsize=9)


def _draw_map(figure: Any, axes: Any, story: Story) -> None:
    """Experts (rows) over ranks (columns): colour is rows executed, a box is the main rank."""
    problem = story.problem
    ranks, mains = problem.topology.num_ranks, problem.mains_per_rank
    copied = [copy.expert for copies in story.copies.values() for copy in copies]
    axes.set_title(
        "Placement: where copied experts run. Red box: the rank that owns the expert; the others hold copies",
        loc="left",
    )
    if not copied:
        axes.text(0.5, 0.5, "nothing is copied", ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    slot_expert, quota = np.asarray(story.after.plan.slot_expert), np.asarray(story.after.plan.quota)
    rows = np.zeros((problem.num_experts, ranks))
    experts = np.arange(problem.num_experts)
    rows[experts.reshape(ranks, mains), np.arange(ranks)[:, None]] = quota[:, :, :mains].sum(axis=0)
    for rank, slot in np.argwhere(slot_expert >= 0):
        rows[slot_expert[rank, slot], rank] = quota[:, rank, mains + slot].sum()
    wanted = sorted(set(copied), key=lambda expert: (-rows[expert].sum(), expert))[:_MOST_EXPERTS]
    shown = rows[wanted]
    image = axes.imshow(np.where(shown > 0, shown, np.nan), aspect="auto", cmap="viridis_r", vmin=0)
    figure.colorbar(image, ax=axes, label="rows of the expert that the rank executes", pad=0.01)
    for y, expert in enumerate(wanted):
        axes.add_patch(_box(expert // mains, y))
    axes.set_yticks(range(len(wanted)), [f"{e} ({rows[e].sum():,.0f})" for e in wanted], fontsize=8)
    hidden = len(set(copied)) - len(wanted)
    axes.set_ylabel("expert (its rows), most wanted first" + (f" ({hidden} more not shown)" if hidden else ""))
    for y in range(1, len(wanted)):
        axes.axhline(y - 0.5, color="#dddddd", linewidth=0.6, zorder=0)
    _mark_domains(axes, story)


def _box(x: int, y: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor="#d1495b", linewidth=1.5)


def _mark_domains(axes: Any, story: Story) -> None:
    """Ranks below the axes, domains named below them and parted by lines."""
    domains = story.problem.topology.domain_of_rank
    axes.set_xlim(-0.6, len(domains) - 0.4)
    axes.set_xticks(range(0, len(domains), 1 if len(domains) <= 16 else 2 if len(domains) <= 32 else 8))
    axes.tick_params(axis="x", labelsize=8)
    starts = [rank for rank in range(len(domains)) if rank == 0 or domains[rank] != domains[rank - 1]]
    short = len(starts) > 8
    for start, end in zip(starts, [*starts[1:], len(domains)], strict=True):
        if start:
            axes.axvline(start - 0.5, color="#555555", linewidth=0.8)
        axes.annotate(
            f"d{domains[start]}" if short else f"domain {domains[start]}",
            ((start + end - 1) / 2, 0),
            xycoords=axes.get_xaxis_transform(),
            xytext=(0, -16),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=8,
            color="#555555",
        )
    axes.set_xlabel("rank", labelpad=10)
