"""Tables of the report: what has a value of the paper beside it, and everything."""

from collections.abc import Sequence

from train.experiments import page, plans
from train.experiments.record import Record, Summary, summarize
from train.experiments.settings import MODELS


def compared(records: Sequence[Record]) -> str:
    """Ours and the paper's, in columns of their own; nothing where the paper prints nothing."""
    header = ["model", "planner", "setting", "", "kind", "ours", "±", "paper", "mark", "difference"]
    rows, met = [], set()
    for summary in _ordered(records):
        if printed := summary.paper:
            met.add(printed.key())
            away = f"{100 * (summary.mean / printed.value - 1):+.1f} %" if printed.value else ""
            rows.append([*_cells(summary), number(printed.value), printed.mark, away])
    for record in records:
        if record.kind == "paper" and record.key() not in met:
            names = map(page.escape, _names(record))
            rows.append([*names, "", "nothing comparable", "", number(record.value), record.mark, ""])
    return page.table(header, rows, numbers=(5, 6, 7, 9)) if rows else ""


def everything(records: Sequence[Record]) -> str:
    """Each of ours, means over seeds."""
    header = ["model", "planner", "setting", "", "kind", "ours", "±", "seeds"]
    rows = [[*_cells(s), str(len(s.values)) if s.first.seed is not None else ""] for s in _ordered(records)]
    return page.table(header, rows, numbers=(5, 6, 7))


def number(value: float) -> str:
    """Four digits, without an exponent where a reader does not need one."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _cells(summary: Summary) -> list[str]:
    spread = "" if summary.deviation is None else number(summary.deviation)
    return [*map(page.escape, _names(summary.first)), summary.first.kind, number(summary.mean), spread]


def _names(record: Record) -> tuple[str, str, str, str]:
    setting = ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in record.setting.items()
    )
    return record.model, record.planner, setting, record.metric + (f", {record.unit}" if record.unit else "")


def _ordered(records: Sequence[Record]) -> list[Summary]:
    """The rows ordered by metric, model, setting and planner, as readers compare."""
    models = {model: place for place, model in enumerate(MODELS)}
    planners = {planner: place for place, planner in enumerate(plans.ALL)}

    def order(summary: Summary) -> tuple:
        first = summary.first
        setting = [
            (name, value if isinstance(value, int | float) else 0, str(value))
            for name, value in sorted(first.setting.items())
        ]
        return (
            first.metric,
            models.get(first.model, 9),
            first.model,
            setting,
            planners.get(first.planner, 99),
            first.planner,
        )

    return sorted(summarize(records), key=order)
