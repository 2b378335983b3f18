"""Figure 11: how long planning takes, against the number of ranks and of experts."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from topoep_jax.plan.hardware import Hardware
from topoep_jax.plan.problem import CostModel, Problem
from topoep_jax.plan.run import time_planner
from topoep_jax.plan.topoep import dependent_steps, dependent_steps_of_paper
from topoep_jax.topology import Topology
from train.experiments import style
from train.experiments.figure import Figure
from train.experiments.published import SOLVER_US, SOLVER_US_OF_32_RANKS
from train.experiments.record import Kind, Record, mean_of, pick
from train.experiments.settings import SLOTS, Settings

RANKS, EXPERTS = (8, 16, 32, 64, 128), (64, 128, 256, 384, 512, 640, 768, 1024)
_OF_RANKS, _OF_EXPERTS = 640, 32
"""Experts where ranks vary, and ranks where experts do."""
_ASKED = (("topoep_paper", "-"), ("topoep", "fast"), ("topoep", "default"))
_PAPERS = "GPU, H800"
_RANGE = ("least time of a plan", "most time of a plan")
"""Over the numbers of experts on 32 ranks. It is not printed which of them has which, so none of ours is compared."""
_SPREADS = (0.5, 1.0, 2.0, 4.0)
"""Of the logarithm of an expert's share, where steps depend on the demand; times are of 1."""
_GPU_RESULTS = Path("results/gpu")
_HIDDEN, _FFN, _ROWS = 2048, 768, 4096 * 8


def run(settings: Settings) -> list[Record]:
    """CPU times of all sizes, dependent steps, the paper's values, and times of a GPU where somebody took some."""
    del settings
    sizes = {(ranks, _OF_RANKS) for ranks in RANKS} | {(_OF_EXPERTS, experts) for experts in EXPERTS}
    records = [record for ranks, experts in sorted(sizes) for record in of_size(ranks, experts)]
    return [*records, *printed(), *gpu_times(_GPU_RESULTS)]


def printed() -> Iterator[Record]:
    """The paper's values."""
    for ranks, value in SOLVER_US.items():
        yield _record("topoep_paper", ranks, _OF_RANKS, _PAPERS, value.number, "paper", value.mark)
    for metric, value in zip(_RANGE, SOLVER_US_OF_32_RANKS, strict=True):
        setting: dict[str, str | float] = {"ranks": _OF_EXPERTS, "experts": "64 to 1024", "where": _PAPERS}
        yield Record("11", "", "topoep_paper", setting, metric, value.number, "us", "paper", mark=value.mark)


def of_size(ranks: int, experts: int) -> Iterator[Record]:
    """Times and steps of one size, in domains of 8 ranks."""
    cost = CostModel.from_model(_HIDDEN, _FFN, Hardware.h800())
    omega = _demand(ranks, experts, 1.0)
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
        us = 1e3 * time_planner(omega, asked, planner).milliseconds
        yield _record(planner, ranks, experts, "CPU, one process", us, "measured", effort=effort)
        setting: dict[str, str | float] = {"ranks": ranks, "experts": experts, "effort": effort}
        if planner == "topoep_paper":
            for spread in _SPREADS:
                steps = dependent_steps_of_paper(_demand(ranks, experts, spread), asked)
                yield from _steps(planner, steps, "measured", setting | {"spread": spread})
        else:
            yield from _steps(planner, dependent_steps(asked), "simulated", setting)


def _demand(ranks: int, experts: int, spread: float) -> np.ndarray:
    """int64 [R, E]: rows whose experts are drawn with lognormal shares, the same for all ranks."""
    rng = np.random.default_rng(0)
    share = np.exp(rng.normal(0, spread, experts))
    return rng.multinomial(_ROWS, share / share.sum(), size=ranks)


def _steps(planner: str, steps: int | None, kind: Kind, setting: dict[str, str | float]) -> Iterator[Record]:
    """Those of the paper's planner are counted; a bound comes from a formula."""
    if steps is not None:
        yield Record("11", "", planner, setting, "dependent steps", steps, "", kind)


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
    planner: str, ranks: int, experts: int, where: str, us: float, kind: Kind, mark: str = "", effort: str = "-"
) -> Record:
    setting: dict[str, str | float] = {"ranks": ranks, "experts": experts, "effort": effort, "where": where}
    return Record("11", "", planner, setting, "time of a plan", us, "us", kind, mark=mark)


def draw(records: Sequence[Record]) -> Any:
    """Times above, steps below; against ranks on the left, against experts on the right."""
    figure, panels = style.canvas(14, 8.5, 2, 2, sharey="row")
    sides = (("ranks", RANKS, "experts", _OF_RANKS), ("experts", EXPERTS, "ranks", _OF_EXPERTS))
    for column, (varied, values, fixed, of) in enumerate(sides):
        own = [record for record in pick(records, **{fixed: of}) if record.kind != "paper"]
        times, steps = panels[column], panels[2 + column]
        _draw_times(times, list(pick(own, metric="time of a plan")), varied)
        _draw_steps(steps, list(pick(own, metric="dependent steps")), varied)
        times.set(title=f"({'ab'[column]}) against {varied}, {of} {fixed}", yscale="log", ylim=(50, 5e6))
        steps.set(title=f"({'cd'[column]}) steps that must follow one another", ylim=(0, 150))
        for axes in (times, steps):
            axes.set_xticks(values, [str(value) for value in values], fontsize=12)
            axes.set_xlabel(varied)
            axes.grid(axis="y", color="#e5e5e5")
    for record in pick(records, kind="paper", metric="time of a plan"):
        panels[0].plot(record.setting["ranks"], record.value, **style.PAPER)
    low, high = (mean_of(records, kind="paper", metric=metric) for metric in _RANGE)
    panels[1].axhspan(low, high, color="#cfe3f1", label=f"paper's range on an H800: {low:.0f} to {high:.0f} µs")
    panels[0].plot([], [], **style.PAPER, label="printed in the paper (kernel on an H800)")
    panels[0].set_ylabel("µs (log scale)")
    panels[2].set_ylabel("dependent steps on a GPU")
    kept: dict[str, Any] = {}
    for axes in panels:
        kept |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(kept.values(), kept.keys(), loc="outside lower center", ncols=3, fontsize=12, frameon=False)
    return figure


def _draw_times(axes: Any, records: Sequence[Record], varied: str) -> None:
    for planner, effort in _ASKED:
        points = [r for r in pick(records, planner=planner, effort=effort) if not _is_of_gpu(r)]
        points = sorted(points, key=lambda r: float(r.setting[varied]))
        axes.plot(
            [r.setting[varied] for r in points],
            [r.value for r in points],
            color=style.color(planner),
            marker=style.marker(planner),
            linestyle="--" if effort == "default" else "-",
            label=f"{planner}{f', effort {effort}' * (effort != '-')}, CPU here",
        )
    for record in filter(_is_of_gpu, records):
        axes.plot(record.setting[varied], record.value, "x", color=style.color(record.planner))


def _is_of_gpu(record: Record) -> bool:
    return str(record.setting["where"]).startswith("GPU")


def _draw_steps(axes: Any, records: Sequence[Record], varied: str) -> None:
    bound = sorted((r.setting[varied], r.value) for r in pick(records, planner="topoep"))
    look: dict[str, Any] = {"color": style.color("topoep"), "marker": style.marker("topoep"), "linestyle": ":"}
    axes.plot(*zip(*bound, strict=True), **look, label="topoep, effort fast: a bound on steps, from a formula")
    counted = list(pick(records, planner="topoep_paper"))
    sizes = sorted({r.setting[varied] for r in counted})
    counts = [[r.value for r in counted if r.setting[varied] == size] for size in sizes]
    low, high = [min(c) for c in counts], [max(c) for c in counts]
    axes.fill_between(sizes, low, high, color=style.color("topoep_paper"), alpha=0.2, hatch="//", linewidth=0)
    look = {"color": style.color("topoep_paper"), "marker": style.marker("topoep_paper"), "linestyle": ":"}
    axes.plot(sizes, high, **look, label=f"topoep_paper: most steps counted, of {len(_SPREADS)} demands (band: all)")


FIGURE = Figure(
    "11",
    "How long a plan takes, and how many steps must follow one another",
    "no training; about half a minute, on an otherwise idle machine",
    "The paper times a kernel on an H800; ours is timed on one CPU, on which `topoep` works its candidates off one"
    " after another, so only the number of dependent steps says something about a GPU, and times do not compare: of"
    " `topoep` a bound for any demand (effort `fast`; `default` refines for as long as it pays, and has none), of"
    " `topoep_paper` counts for four demands from even to skewed, two steps for each move of its second stage, of which"
    " there are none where the first takes all slots; its plan competes beside `topoep`'s candidates, so that the"
    " longer of the two is waited for.",
    run,
    draw,
    inputs=lambda: repr(gpu_times(_GPU_RESULTS)),
)
