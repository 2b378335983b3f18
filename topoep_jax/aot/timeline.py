"""The forecast as a chart of text: which exchange is in flight over what, and where the clock waits."""

import itertools

from topoep_jax.aot.forecast import MS, PRODUCTS, Forecast
from topoep_jax.aot.walk import Span

_WIDTH = 60
_MARKS = {"exchange": "=", "aside": "=", "wait": ".", "loop": "@"}


def timeline(forecast: Forecast) -> str:
    """A bar for each product, exchange and wait, and one for the kernels between them.

    The order is the compiler's; the lengths are predictions. A bar of "=" is an exchange or what runs aside, one of
    "#" a kernel or several, one of "." a wait, and one of "@" a loop, whose first two turns stand before it.
    """
    total = forecast.total_ps or 1
    bars = []
    for small, spans in itertools.groupby(forecast.walk.spans, _is_small):
        group = list(spans)
        bars += [_merged(group)] if small else group
    labels = [_label(bar) for bar in bars]
    width = max(map(len, labels), default=0)
    lines = [f"{total / MS:.2f} ms predicted, a column is {total / _WIDTH / 1e6:.0f} us"]
    for label, bar in zip(labels, bars, strict=True):
        begin = min(round(bar.begin / total * _WIDTH), _WIDTH - 1)
        length = max(round(bar.end / total * _WIDTH) - begin, 1)
        lines.append(f"{label:<{width}} |{' ' * begin}{_MARKS.get(bar.what, '#') * length}")
    return "\n".join(lines) + "\n"


def _is_small(span: Span) -> bool:
    return span.what == "kernel" and span.category not in PRODUCTS


def _merged(spans: list[Span]) -> Span:
    """Kernels that follow each other as one, named by what takes most of it."""
    if len(spans) == 1:
        return spans[0]
    most = max(spans, key=lambda span: span.end - span.begin)
    return most._replace(label=f"{len(spans)} kernels: {most.category}", begin=spans[0].begin, end=spans[-1].end)


def _label(span: Span) -> str:
    if span.what == "wait":
        return f"  wait for {span.label}"
    return f"  {span.label}" if span.what == "kernel" else span.label
