"""The schedule of a program as a chart of text: which collective is in flight over which expert GEMMs."""

import dataclasses
from collections.abc import Iterator

from topoep_jax.aot.forecast import gemm_ps
from topoep_jax.aot.hlo import Run
from topoep_jax.aot.report import Report
from topoep_jax.aot.schedule import Collective, Gemm, events

_WIDTH = 60
_US = 1_000_000  # Picoseconds.


@dataclasses.dataclass
class _Bar:
    """A collective or a GEMM of the chart; microseconds."""

    label: str
    begin: float
    end: float
    mark: str


def timeline(report: Report) -> str:
    """One chart for each computation with collectives: bars begin and end where predicted times put them.

    The order is the compiler's; the lengths are predictions, and everything but collectives and expert GEMMs takes no
    time here. A bar of "=" is a collective, one of "#" a GEMM, one of "@" a loop that has a chart of its own.
    """
    module = report.program.module
    charts = []
    for run in module.scheduled():
        bars = list(_bars(report, run))
        if any(bar.mark == "=" for bar in bars):
            title = "the program" if run.computation == module.entry else f"a turn of {run.computation}"
            charts.append(_chart(title, bars))
    return "\n".join(charts)


def _bars(report: Report, run: Run) -> Iterator[_Bar]:
    now = 0.0
    flying: dict[str, _Bar] = {}
    for event in events(report.program.module, run):
        collective, gemm = event.collective, event.gemm
        if event.what == "loop":
            turns = event.turns or 1
            inner = list(_bars(report, Run(event.body, run.times * turns, turns)))
            bar = _Bar(f"{event.turns or '?'} x {event.body}", now, now + turns * _end(inner), "@")
            now = bar.end
            yield bar
        elif event.what == "gemm" and gemm is not None:
            took = _gemm_us(report, run, gemm)
            yield _Bar(f"  {gemm.kind} {gemm.result}", now, now + took, "#")
            now += took
        elif event.what == "start" and collective is not None:
            bar = _Bar(collective.phase, now, now + report.collective_us(collective), "=")
            flying[collective.name] = bar
            yield bar
        elif event.what == "done" and collective is not None:
            now = max(now, flying[collective.name].end)
        elif collective is not None:
            bar = _Bar(f"{collective.phase} (sync)", now, now + report.collective_us(collective), "=")
            now = bar.end
            yield bar


def _end(bars: list[_Bar]) -> float:
    return max((bar.end for bar in bars), default=0.0)


def _gemm_us(report: Report, run: Run, gemm: Gemm) -> float:
    if not report.works:
        return 0.0
    work = list(report.works.values())[-1]
    pieces = run.turns if _holds_push(report.collectives, run.computation) else 1
    return gemm_ps(gemm, work, pieces) / _US


def _holds_push(collectives: list[Collective], computation: str) -> bool:
    return any(c.phase == "push" and c.computation == computation for c in collectives)


def _chart(title: str, bars: list[_Bar]) -> str:
    total = _end(bars) or 1.0
    width = max(len(bar.label) for bar in bars)
    lines = [f"{title}: {total / 1e3:.2f} ms predicted, a column is {total / _WIDTH:.0f} us"]
    for bar in bars:
        begin = min(round(bar.begin / total * _WIDTH), _WIDTH - 1)
        length = max(round(bar.end / total * _WIDTH) - begin, 1)
        lines.append(f"{bar.label:<{width}} |{' ' * begin}{bar.mark * length}")
    return "\n".join(lines) + "\n"
