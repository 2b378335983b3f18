"""Figure 11: how long planning takes, against the number of ranks and of experts."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from topoep_jax.cli import timed
from topoep_jax.plan.cost import CostModel
from topoep_jax.plan.hardware import Hardware
from topoep_jax.plan.problem import Problem
from topoep_jax.plan.topoep import dependent_steps, dependent_steps_of_paper
from topoep_jax.topology import Topology
from train.experiments import style
from train.experiments.figure import Figure
from train.experiments.published import SOLVER_US, SOLVER_US_OF_32_RANKS
from train.experiments.record import Record, pick
from train.experiments.settings import SLOTS, Settings

RANKS, EXPERTS = (8, 16, 32, 64, 128), (64, 128, 256, 384, 512, 640, 768, 1024)
_OF_RANKS, _OF_EXPERTS = 640, 32
"""Experts where ranks vary, and ranks where experts do."""
_ASKED = (("topoep_paper", "-"), ("topoep", "fast"), ("topoep", "default"))
_GPU_RESULTS = Path("results/gpu")
_HIDDEN, _FFN, _ROWS = 2048, 768, 4096 * 8


def run(settings: Settings) -> list[Record]:
    """CPU times of all sizes, dependent steps, the paper's values, and times of a GPU where somebody took some."""
    del settings
    sizes = {(ranks, _OF_RANKS) for ranks in RANKS} | {(_OF_EXPERTS, experts) for experts in EXPERTS}
    records = [record for ranks, experts in sorted(sizes) for record in _of_size(ranks, experts)]
    for ranks, value in SOLVER_US.items():
        records.append(_record("topoep_paper", ranks, _OF_RANKS, "GPU, H800", value.number, "paper", value.mark))
    return [*records, *gpu_times(_GPU_RESULTS)]


def _of_size(ranks: int, experts: int) -> Iterator[Record]:
    cost = CostModel.from_model(_HIDDEN, _FFN, Hardware.h800())
    rng = np.random.default_rng(0)
    share = np.exp(rng.normal(0, 1, experts))
    omega = rng.multinomial(_ROWS, share / share.sum(), size=ranks)
    for planner, effort in _ASKED:
        asked = Problem(
            Topology.uniform(ranks // 8, 8),
            cost,
            experts,
            SLOTS,
            None,
            128,
            "bottleneck",
            "fast" if effort == "-" else effort,
        )
        us = 1e3 * timed.solve(planner, omega, asked).milliseconds
        yield _record(planner, ranks, experts, "CPU, one process", us, "measured", effort=effort)
        steps = dependent_steps(asked) if planner == "topoep" else dependent_steps_of_paper(omega, asked)
        if steps is not None:
            setting: dict[str, str | float] = {"ranks": ranks, "experts": experts, "effort": effort}
            yield Record("11", "", planner, setting, "dependent steps", steps, "", "measured")


def gpu_times(folder: Path) -> list[Record]:
    """What runs of tools/gpu_check.sh on a GPU left in `folder`, if any did: medians of plans, in microseconds."""
    records = []
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text())
        for check in report["checks"]:
            if check["name"] != "plan_times" or check["status"] != "passed":
                continue
            for question, kinds in check["details"]["times"].items():
                ranks, experts, planner, *effort = question.split()
                for how, times in kinds.items():
                    place = f"GPU, {path.stem}, {how}"
                    records.append(
                        _record(
                            planner,
                            int(ranks.removeprefix("EP")),
                            int(experts.removeprefix("E")),
                            place,
                            times["median_us"],
                            "measured",
                            effort=effort[0] if effort else "-",
                        )
                    )
    return records


def _record(
    planner: str, ranks: int, experts: int, where: str, us: float, kind: Any, mark: str = "", effort: str = "-"
) -> Record:
    setting: dict[str, str | float] = {"ranks": ranks, "experts": experts, "effort": effort, "where": where}
    return Record("11", "", planner, setting, "time of a plan", us, "us", kind, mark=mark)


def draw(records: Sequence[Record]) -> Any:
    """Times above, steps below; against ranks on the left, against experts on the right."""
    figure, panels = style.canvas(14, 8.5, 2, 2, sharey="row")
    looks = {"-": ("topoep_paper", "-"), "fast": ("topoep", "-"), "default": ("topoep", "--")}
    sides = (("ranks", RANKS, "experts", _OF_RANKS), ("experts", EXPERTS, "ranks", _OF_EXPERTS))
    for column, (varied, values, fixed, of) in enumerate(sides):
        for row, metric in enumerate(("time of a plan", "dependent steps")):
            axes = panels[2 * row + column]
            own = list(pick(records, metric=metric, kind="measured", **{fixed: of}))
            for effort, (planner, line) in looks.items():
                points = [r for r in pick(own, effort=effort) if not str(r.setting.get("where", "")).startswith("GPU")]
                points = sorted(points, key=lambda r: float(r.setting[varied]))
                label = f"{planner}{f', effort {effort}' * (effort != '-')}"
                axes.plot(
                    [r.setting[varied] for r in points],
                    [r.value for r in points],
                    color=style.color(planner),
                    marker=style.marker(planner),
                    linestyle=line,
                    label=label + ", CPU here" if points and not row else None,
                )
            for record in own:
                if str(record.setting.get("where", "")).startswith("GPU"):
                    axes.plot(record.setting[varied], record.value, "x", color=style.color(record.planner))
            axes.set_xticks(values, [str(value) for value in values], fontsize=12)
            axes.set_xlabel(varied)
            if metric == "time of a plan":
                axes.set(title=f"({'ab'[column]}) against {varied}, {of} {fixed}", yscale="log", ylim=(50, 5e6))
            else:
                axes.set(title=f"({'cd'[column]}) steps: topoep fast at most, topoep_paper here")
                axes.set_ylim(bottom=0)
        panels[column].grid(axis="y", color="#e5e5e5")
    for record in pick(records, kind="paper"):
        panels[0].plot(record.setting["ranks"], record.value, **style.PAPER)
    low, high = (value.number for value in SOLVER_US_OF_32_RANKS)
    panels[1].axhspan(low, high, color="#cfe3f1", label=f"paper's range on an H800: {low:.0f} to {high:.0f} µs")
    panels[0].plot([], [], **style.PAPER, label="printed in the paper (kernel on an H800)")
    panels[0].set_ylabel("µs (log scale)")
    panels[2].set_ylabel("steps of a GPU that\nfollow one another")
    kept: dict[str, Any] = {}
    for axes in panels[:2]:
        kept |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(kept.values(), kept.keys(), loc="outside lower center", ncols=3, fontsize=12, frameon=False)
    return figure


FIGURE = Figure(
    "11",
    "How long a plan takes, and how many steps must follow one another",
    "no training; about half a minute, on an otherwise idle machine",
    "The paper times a kernel on an H800; ours is timed on one CPU, on which `topoep` works its candidates off one"
    " after another, so only the number of dependent steps says something about a GPU, and times do not compare: of"
    " `topoep` a bound for any demand (effort `fast`; `default` refines for as long as it pays, and has none), of"
    " `topoep_paper` the count for this demand, two steps for each move of its second stage; where its plan competes"
    " beside `topoep`'s candidates, as it does, the longer of the two counts.",
    run,
    draw,
)
