"""The picture of Figure 4: steps of both GPU programs in order, and times of plans and of training steps."""

import textwrap
from collections.abc import Sequence
from typing import Any

from train.experiments import gpu_trip, style, trip_training
from train.experiments.record import Record, mean_of, pick

PLAN = "from demand to plan"
_PLANS = {
    "inside": "custom call (C++)",
    "callback": "host callback (NumPy)",
    "planner": "its planner alone",
    "trip": "a callback alone",
}
_STEPS = {way: _PLANS[way] for way in ("inside", "callback")}
_TITLES = {"inside": "custom call", "callback": "host callback"}
_COLORS = {"kernel": "#56b4e9", "collective": "#cc79a7", "plan": style.color("topoep")}
_PLAN_WIDTH, _HEIGHT = 8, 0.62


def draw(records: Sequence[Record]) -> Any:
    """The programs above, bars below."""
    figure, (programs, plan, step) = style.canvas(13, 9.6, rows=3, height_ratios=(5, 3.4, 2.1))
    _draw_programs(programs, list(pick(records, kind="compiled")))
    _draw_bars(plan, list(pick(records, metric=PLAN)), _PLANS, "µs")
    plan.set(xscale="log", xlabel="one plan for 32 ranks: µs on this machine's CPU (log scale)")
    plan.set(title="(b) measured: a plan", xlim=(10, 4 * plan.dataLim.x1))
    _draw_bars(step, list(pick(records, metric=trip_training.STEP)), _STEPS, "ms")
    (differ,) = pick(records, metric=trip_training.DIFFER)
    step.set(
        xlabel="one training step on 4 emulated devices: ms on this machine's CPU",
        title=f"(c) measured: a training step; losses differ in {differ.value:.0f} of {differ.setting['steps']} steps",
    )
    return figure


def _draw_bars(axes: Any, records: Sequence[Record], names: dict[str, str], unit: str) -> None:
    colors = {"inside": style.color("topoep"), "callback": style.color("none")}
    for y, way in enumerate(names):
        (record,) = pick(records, way=way)
        axes.barh(y, record.value, 0.62, color=colors.get(way, style.OTHER))
        axes.text(record.value, y, f" {record.value:,.0f} {unit}", va="center")
    axes.set_yticks(range(len(names)), list(names.values()))
    axes.invert_yaxis()
    axes.margins(x=0.12)


def _draw_programs(axes: Any, records: Sequence[Record]) -> None:
    axes.set_title(
        "(a) compiled: two GPU programs, from the router to the first exchange of rows; order, not time", pad=12
    )
    axes.spines[:].set_visible(False)
    axes.set(xticks=[], yticks=[])
    for record in pick(records, metric=gpu_trip.NONE):
        reason = textwrap.fill(f"none was compiled: {record.setting['because']}", 80)
        axes.text(0.5, 0.5, reason, ha="center", va="center")
        return
    for base, way in ((3.1, "inside"), (0, "callback")):
        _draw_program(axes, list(pick(records, way=way)), base, way)
    axes.legend(loc="upper center", bbox_to_anchor=(0.42, 0), ncols=3, fontsize=13)


def _draw_program(axes: Any, records: Sequence[Record], base: float, way: str) -> None:
    """The GPU's lane at `base`, and that of the host above it."""
    host, first = base + 1.2, way == "callback"
    x, launched = 0, False
    for row in sorted(pick(records, metric=gpu_trip.ROW), key=lambda record: record.setting["place"]):
        what, count = str(row.setting["what"]), int(row.value)
        on_host = what == "plan" and way == "callback"
        width = count * (_PLAN_WIDTH if what == "plan" else 1)
        if row.setting["in_graph"]:
            axes.plot([x - 0.2 * launched, x + width - 0.2], [base - 0.45] * 2, color=style.INK)
        launched = bool(row.setting["in_graph"])
        if on_host:
            _draw_trip(axes, records, x, base, host)
        else:
            for place in range(count):
                axes.barh(base, width / count - 0.2, _HEIGHT, left=x + place * width / count, color=_COLORS[what])
        if what == "plan" and not on_host:
            axes.text(x + width / 2 - 0.1, base, "planner", ha="center", va="center", color="white")
        x += width
    axes.text(-0.6, base, "GPU", ha="right", va="center")
    axes.text(-0.6, host, "host", ha="right", va="center")
    axes.plot([0, x], [host, host], color=style.FAINT, linewidth=1, linestyle=":", zorder=0)
    axes.text(-4, base + 0.6, _TITLES[way], ha="right", va="center", fontsize=15)
    if first:
        for what, label in (("kernel", "kernel or copy"), ("collective", "exchange among ranks"), ("plan", "planner")):
            axes.barh([base], [0], color=_COLORS[what], label=label)
        axes.plot([], [], color=style.INK, label="one launch (CUDA graph)")


def _draw_trip(axes: Any, records: Sequence[Record], x: float, base: float, host: float) -> None:
    width = _PLAN_WIDTH - 0.2
    axes.barh(
        base,
        width,
        _HEIGHT,
        left=x,
        color="white",
        edgecolor=style.FAINT,
        hatch="//",
        linewidth=0,
        label="GPU waits for the host: JAX's handler",
    )
    axes.barh(host, width - 1.2, _HEIGHT, left=x + 0.6, color=_COLORS["plan"])
    axes.text(x + width / 2, host, "planner", ha="center", va="center", color="white")
    arrow = {"arrowstyle": "-|>", "color": style.INK, "linewidth": 1.5}
    for place, metric, down in ((x + 0.3, gpu_trip.TO_HOST, False), (x + width - 0.3, gpu_trip.FROM_HOST, True)):
        ends = [(place, host), (place, base + _HEIGHT / 2)]
        axes.annotate("", xy=ends[down], xytext=ends[not down], arrowprops=arrow)
        copies = mean_of(records, metric=metric)
        kib = mean_of(records, metric=f"bytes of {metric}") / 1024
        text = f"{copies:.0f} {'copy' if copies == 1 else 'copies'}, {kib:.0f} KiB"
        axes.text(place + (0.5 if down else -0.5), base + 0.62, text, ha="left" if down else "right", va="center")
