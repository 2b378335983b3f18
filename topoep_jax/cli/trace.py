"""`topoep trace`: how skewed recorded routing is, where, and whether it moves; as text, JSON, and drawn with --png."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from topoep_jax.cli.flags import Flags
from topoep_jax.cli.output import check_writable, plural, table
from topoep_jax.traces import Skew, open_trace, skew_of

_MOST_LAYERS = 20
_BAR = 20
_NOTES = """
means over the microbatches:
max/mean    load of the busiest expert over the mean load of an expert; then the least and the most of a microbatch
busiest {top:<3} share of the assignments that go to the {top} busiest experts; {even:.0%} if routing were even
experts     so many experts under equal loads have the same entropy; {num_experts} if routing were even
turnover    share of the {top} busiest experts that are others in the next recorded step; {chance:.0%} by chance
            (microbatches and groups of one step are added up for it)
rank load   of the busiest rank over the mean, every expert on its main rank: the layer waits for it
"""


def define() -> Flags:
    """Flags of the command."""
    values = Flags()
    values.add("trace", str, "file of recorded routing, as for `topoep plan`")
    values.add_knob("num_experts", None, note="where the file does not say it")
    values.add("top", int, "how many experts count as the busiest (default: 8, at most half of them)", least=1)
    values.add("png", str, "draw the paper's Figure 2 to this file too")
    values.add("json", bool, "print one record instead: figures of each layer, means over the microbatches", False)
    return values


def run(values: Flags) -> Iterator[str]:
    """What the command prints, piece by piece."""
    if values.trace is None:
        raise ValueError("--trace is missing: write --trace=routing.npz")
    path = pathlib.Path(values.trace)
    if not path.is_file():
        raise ValueError(f"--trace={path}: there is no such file")
    if values.png is not None:
        check_writable("png", values.png, ".png")
    with open_trace(path, values.num_experts) as trace:
        skew, cut_off = skew_of(trace, top=values.top), trace.cut_off
    if values.json:
        yield json.dumps(_record(skew, path.name, cut_off), indent=1) + "\n"
    else:
        yield _head(skew, path.name, cut_off) + _layers(skew) + _notes(skew)
    if values.png is not None:
        from topoep_jax.cli import draw_skew

        draw_skew.draw(skew, title(skew, path.name), values.png)
        if not values.json:
            yield f"\ndrawn to {values.png}\n"


def title(skew: Skew, name: str) -> str:
    """File, model and sizes in a line."""
    info = skew.info
    domains = "" if info.topology is None else f" in {plural(info.topology.num_domains, 'domain')}"
    parts = [
        plural(len(info.layers), "layer"),
        f"{plural(info.num_experts, 'expert')} on {plural(info.num_ranks, 'rank')}{domains}",
        f"{plural(len(skew.rows), 'microbatch', 'microbatches')} of {skew.rows.mean():,.0f} assignments",
    ]
    return f"{name}: {', '.join(filter(None, [info.model, *parts]))}"


def _figures(skew: Skew) -> dict[str, np.ma.MaskedArray]:
    """f64 [L] of each layer, means over the microbatches where nothing else is said; masked where unknown."""
    return {
        "imbalance": skew.imbalance.mean(axis=0),
        "imbalance_least": skew.imbalance.min(axis=0),
        "imbalance_most": skew.imbalance.max(axis=0),
        "imbalance_of_all": skew.share.max(axis=1) * skew.info.num_experts,
        "busiest": skew.busiest.mean(axis=0),
        "effective_experts": skew.effective.mean(axis=0),
        "turnover": np.ma.atleast_1d(skew.turnover.mean(axis=0)),
        "drift": skew.drift if len(skew.steps) > 1 else np.ma.masked_all_like(skew.drift),
        "rank_imbalance": skew.rank_imbalance.mean(axis=0),
    }


def _record(skew: Skew, name: str, cut_off: bool) -> dict[str, Any]:
    """What --json prints; null where nothing is known."""
    info, figures = skew.info, _figures(skew)
    columns = {key: values.tolist() for key, values in figures.items()}
    return {
        "trace": name,
        "model": info.model,
        "num_experts": info.num_experts,
        "num_ranks": info.num_ranks,
        "domain_of_rank": None if info.topology is None else info.topology.domain_of_rank,
        "microbatches": len(skew.rows),
        "steps": len(skew.steps),
        "cut_off": cut_off,
        "top": skew.top,
        "mean": {key: _mean(values) for key, values in figures.items()},
        "layers": [
            {"layer": layer, **{key: column[index] for key, column in columns.items()}}
            for index, layer in enumerate(info.layers)
        ],
    }


def _mean(values: np.ma.MaskedArray) -> float | None:
    return None if np.ma.getmaskarray(values).all() else float(values.mean())


def _head(skew: Skew, name: str, cut_off: bool) -> str:
    """The answers, a line each."""
    figures, info, top = _figures(skew), skew.info, skew.top
    lines = [title(skew, name)]
    if cut_off:
        lines.append("the file was cut off: these are the microbatches that are whole")
    imbalance, ranks = figures["imbalance"], figures["rank_imbalance"]
    most, least, worst = (info.layers[index] for index in (imbalance.argmax(), imbalance.argmin(), ranks.argmax()))
    lines.append(
        f"\nHow skewed     the busiest expert has {imbalance.mean():.2f} x the mean load; the {top} busiest take"
        f" {figures['busiest'].mean():.0%} of all assignments, {top / info.num_experts:.0%} if even"
    )
    if len(info.layers) > 1:
        lines.append(
            f"Where          most in layer {most}, {imbalance.max():.2f}; least in layer {least}, {imbalance.min():.2f}"
        )
    if np.ma.getmaskarray(figures["turnover"]).all():
        lines.append("Does it move   one step does not tell")
    else:
        lines.append(
            f"Does it move   {figures['turnover'].mean():.0%} of the {top} busiest change from one recorded step to the"
            f" next, {_cell(_mean(figures['drift']), '.0%')} from the first to the last; {_chance(skew):.0%} by chance"
        )
    lines.append(
        f"What it costs  without replicas the busiest rank has {ranks.mean():.2f} x the mean load"
        + f", in layer {worst} {ranks.max():.2f} x" * (len(info.layers) > 1)
    )
    return "\n".join(lines) + "\n"


def _chance(skew: Skew) -> float:
    """Turnover if the busiest were drawn anew in every microbatch."""
    return 1 - skew.top / skew.info.num_experts


def _layers(skew: Skew) -> str:
    """A line for each layer, or for the most skewed of many."""
    figures = _figures(skew)
    imbalance = figures["imbalance"].filled(0)
    shown = sorted(np.argsort(-imbalance, kind="stable")[:_MOST_LAYERS].tolist())
    columns = {
        "max/mean": ("imbalance", ".2f"),
        "least": ("imbalance_least", ".2f"),
        "most": ("imbalance_most", ".2f"),
        f"busiest {skew.top}": ("busiest", ".0%"),
        "experts": ("effective_experts", ".1f"),
        "turnover": ("turnover", ".0%"),
        "rank load": ("rank_imbalance", ".2f"),
    }
    rows = [
        [
            str(skew.info.layers[index]),
            *(_cell(figures[name][index], form) for name, form in columns.values()),
            f"{'#' * round(_BAR * imbalance[index] / imbalance.max()):<{_BAR}}",
        ]
        for index in shown
    ]
    text = "\n" + table(["layer", *columns, ""], rows)
    hidden = np.delete(imbalance, shown)
    if hidden.size:
        text += (
            f"{plural(hidden.size, 'layer')} less skewed not shown, max/mean {hidden.min():.2f}..{hidden.max():.2f}\n"
        )
    return text


def _cell(value: Any, form: str) -> str:
    return "-" if value is None or value is np.ma.masked else format(value, form)


def _notes(skew: Skew) -> str:
    num_experts = skew.info.num_experts
    return _NOTES.format(top=skew.top, even=skew.top / num_experts, num_experts=num_experts, chance=_chance(skew))
