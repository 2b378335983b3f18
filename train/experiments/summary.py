"""The checks, and the means that have a value of the paper beside them: small enough to be kept with the code."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from train.experiments.checks import Outcome
from train.experiments.record import Record, Summary, summarize


def summary(records: Sequence[Record], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The summary for JSON: every check, and the means that the paper has values of, in the order of records."""
    beside = sorted((found for found in summarize(records) if found.paper), key=lambda found: found.first.key())
    return {
        "checks": [dataclasses.asdict(outcome) | {"verdict": outcome.verdict} for outcome in outcomes],
        "compared": [_compared(found, found.paper) for found in beside if found.paper],
    }


def _compared(found: Summary, paper: Record) -> dict[str, Any]:
    first = found.first
    return {
        "figure": first.figure,
        "model": first.model,
        "planner": first.planner,
        "setting": dict(first.setting),
        "metric": first.metric,
        "unit": first.unit,
        "kind": first.kind,
        "seeds": len(found.values) if first.seed is not None else None,
        "mean": found.mean,
        "deviation": found.deviation,
        "paper": paper.value,
        "mark": paper.mark,
    }
