"""A forecast as tables."""

from topoep_jax.aot.forecast import MS, Forecast
from topoep_jax.cli.output import table

_MOST_LOSSES = 5
_US = 1_000_000


def tables(forecasts: dict[float, Forecast]) -> str:
    """Totals, where the time goes, what is waited for, and the largest losses, by skew."""
    skews = [f"skew {skew:g}" for skew in forecasts] if len(forecasts) > 1 else ["ms"]
    totals = [
        [
            name,
            f"{found.total_ps / MS:.2f}",
            f"{found.forward_ps / MS:.2f}",
            f"{(found.total_ps - found.forward_ps) / MS:.2f}",
            f"{found.bound_ps / MS:.2f}",
            " .. ".join(f"{ps / MS:.2f}" for ps in found.range_ps),
        ]
        for name, found in zip(skews, forecasts.values(), strict=True)
    ]
    head = ["modelled ms", "total", "forward", "backward", "bound", "range over the constants"]
    text = f"\n{table(head, totals)}"
    each = [found.categories for found in forecasts.values()]
    text += f"\n{table(['where the time goes, us', *skews], _rows(each))}"
    each = [found.waits for found in forecasts.values()]
    text += f"\n{table(['of that, waits by what is waited for, us', *skews], _rows(each))}"
    for name, found in zip(skews, forecasts.values(), strict=True):
        rows = [
            [loss.what, loss.best, f"{loss.us:,.0f}", f"{loss.percent:.1f}"] for loss in found.losses[:_MOST_LOSSES]
        ]
        title = "largest losses" if name == "ms" else f"largest losses at {name}"
        text += f"\n{table([title, 'if', 'us', '%'], rows, left=2)}"
    return text


def _rows(each: list[dict[str, int]]) -> list[list[str]]:
    """A row for every name, the longest of any column first."""
    names = {name: max(found.get(name, 0) for found in each) for found in each for name in found}
    ranked = sorted(names, key=lambda name: -names[name])
    return [[name, *(f"{found.get(name, 0) / _US:,.0f}" for found in each)] for name in ranked]
