"""Draws the paper's Figure 2 of a trace: who gets each layer's assignments, how skewed that is, and how much moves."""

from typing import Any

import numpy as np

from topoep_jax._needs import to_install
from topoep_jax.traces import Skew

_LINE, _BAND, _GRAY = "#1f6fb4", "#bcd5ec", "#33373d"
_STYLE: Any = {"axes.spines.right": False, "axes.spines.top": False, "axes.titlesize": 14, "font.size": 13}
_CLIP = 99.5
"""Percentile of the shares at which the colours end where the largest is far above, but not below its quarter: a few
experts would leave all others white."""


def draw(skew: Skew, title: str, path: str) -> None:
    """Writes a PNG.

    Raises:
      ImportError: Matplotlib is missing.
    """
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise ImportError(f"--png needs Matplotlib: {to_install('matplotlib')}") from error
    with rc_context(_STYLE):
        figure_of(skew, title).savefig(path, dpi=110)


def figure_of(skew: Skew, title: str) -> Any:
    """The Matplotlib figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 7.5), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.2, 1))
    figure.suptitle(title, fontsize=14)
    _draw_share(figure, figure.add_subplot(grid[:, 0]), skew)
    _draw_imbalance(figure.add_subplot(grid[0, 1]), skew)
    _draw_turnover(figure.add_subplot(grid[1, 1]), skew)
    return figure


def _draw_share(figure: Any, axes: Any, skew: Skew) -> None:
    info, share = skew.info, skew.share.filled(0)
    even = 1 / info.num_experts
    most = float(share.max())
    usual = float(np.percentile(share, _CLIP))
    clip = most if most < 1.5 * usual else max(usual, most / 4, 2 * even)
    image = axes.imshow(share, aspect="auto", cmap="Blues", vmin=0, vmax=clip, interpolation="nearest")
    bar = figure.colorbar(image, ax=axes, pad=0.02, extend="max" if most > clip else "neither")
    bar.set_label(f"share of the layer's assignments (even: {even:.2g})")
    axes.set(title="(a) Assignments to each expert, all microbatches", xlabel="expert", ylabel="MoE layer")
    axes.title.set_ha("left")
    axes.title.set_x(0)
    stride = -(-len(info.layers) // 16)
    places = range(0, len(info.layers), stride)
    axes.set_yticks(places, [str(info.layers[place]) for place in places])
    axes.set_xticks(range(0, info.num_experts, -(-info.num_experts // 8)))


def _draw_imbalance(axes: Any, skew: Skew) -> None:
    """What planners of single microbatches see, and what one placement for all of them would."""
    total = skew.share.max(axis=1) * skew.info.num_experts
    layers = np.array(skew.info.layers)
    axes.set_title("(b) Load of the busiest expert over the mean", loc="left")
    _draw_range(axes, layers, skew.imbalance, "microbatches")
    axes.plot(layers, total.filled(np.nan), color=_GRAY, linestyle="--", label="all microbatches as one")
    _place_legend(axes)
    axes.set(xlabel="MoE layer", ylabel="max / mean (even: 1)")


def _draw_turnover(axes: Any, skew: Skew) -> None:
    chance = 1 - skew.top / skew.info.num_experts
    busiest = f"the {skew.top} busiest experts" if skew.top > 1 else "the busiest expert"
    axes.set_title(f"(c) Turnover of {busiest}", loc="left")
    if np.ma.getmaskarray(skew.turnover).all():
        axes.text(0.5, 0.5, "needs two steps", ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    _draw_range(axes, np.array(skew.steps[1:]), 100 * skew.turnover.T, "layers")
    _place_legend(axes)
    axes.set(xlabel="recorded step, against the one before", ylabel=f"% changed (by chance: {100 * chance:.0f})")


def _draw_range(axes: Any, x: np.ndarray, values: np.ma.MaskedArray, of_what: str) -> None:
    """Mean and range of `values` [samples, x] over their first axis."""
    style: Any = {"color": _LINE, "linewidth": 2, "marker": "o" if len(x) <= 60 else "", "markersize": 4}
    axes.plot(x, values.mean(axis=0).filled(np.nan), **style, label=f"mean of {of_what}")
    if len(values) > 1:
        known = (column.compressed() for column in values.T)
        low, high = np.transpose([np.percentile(some, (10, 90)) if some.size else (np.nan, np.nan) for some in known])
        axes.fill_between(x, low, high, color=_BAND, linewidth=0, label="10 to 90 %")


def _place_legend(axes: Any) -> None:
    """Above the lines, where room is made for it."""
    axes.set_ylim(0, 1.5 * axes.dataLim.y1 or 1)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize=11, loc="upper left", ncols=2)
