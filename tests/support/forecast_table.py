"""The forecasts of the three models as the tables of docs/layer.md.

    python -m tests.support.forecast_table     # prints results/full/forecast.json as Markdown

`tests/aot/forecast_models_test.py` computes and writes that file with `-m full`.
"""

import dataclasses
import json

from tests.support.quality import RESULTS
from topoep_jax.rates import Rates

REPORT = "forecast.json"
_LOSSES = 5


def markdown(report: dict) -> str:
    """One row for each model, transport and skew: modelled milliseconds, and the largest losses in percent."""
    lines = [
        "| model, transport | skew | total ms | forward | bound | range | largest losses, % of the total |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in report.items():
        for skew, total in found["forecast_ms"].items():
            quick, slow = found["range_ms"][skew]
            losses = "; ".join(f"{loss['what']} {loss['percent']:.0f}" for loss in found["losses"][skew][:_LOSSES])
            cells = [f"{found[key][skew]:.1f}" for key in ("forward_ms", "bound_ms")]
            lines.append(
                f"| {name} | {skew} | {total:.1f} | {' | '.join(cells)} | {quick:.1f} .. {slow:.1f} | {losses} |"
            )
    return "\n".join(lines) + "\n"


def constants() -> str:
    """The table of docs/forecast.md."""
    lines = ["| constant | value | range | what | source |", "| --- | --- | --- | --- | --- |"]
    for field in dataclasses.fields(Rates):
        about = field.metadata
        value = f"{field.default:g} {about['unit']}".strip()
        cells = (
            f"`{field.name}`",
            value,
            f"{about['quickest']:g} .. {about['slowest']:g}",
            about["meaning"],
            about["source"],
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(json.loads((RESULTS / REPORT).read_text())), end="")
