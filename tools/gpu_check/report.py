"""What a run of checks says: a line for each, and one JSON."""

import dataclasses
import datetime
import json
from collections.abc import Sequence
from pathlib import Path

from tools.gpu_check import machine
from tools.gpu_check.runner import FAILED, PASSED, SKIPPED, Result


def tell(result: Result) -> None:
    """One line, and the reason where it did not pass."""
    print(f"{result.name:18} {result.status:8} {result.seconds:7.1f} s  {result.reason}", flush=True)


def verdict(results: Sequence[Result]) -> str:
    """The counts, and which checks were not made: a run without failures proves nothing about them."""
    names = {status: [r.name for r in results if r.status == status] for status in (PASSED, FAILED, SKIPPED)}
    skipped = f" (nothing is known of {', '.join(names[SKIPPED])})" if names[SKIPPED] else ""
    return f"{len(names[PASSED])} passed, {len(names[FAILED])} failed, {len(names[SKIPPED])} skipped{skipped}"


def status_of(results: Sequence[Result]) -> int:
    """The exit status: 1 if a check failed."""
    return 1 if any(result.status == FAILED for result in results) else 0


def write_report(
    path: Path,
    label: str,
    started: datetime.datetime,
    planted: str,
    results: Sequence[Result],
    **more: object,
) -> int:
    """Writes the JSON of a run that ends now, says where and how it went, and returns its exit status."""
    minutes = (datetime.datetime.now(datetime.UTC) - started).total_seconds() / 60
    report = {
        "label": label,
        "started": started.isoformat(timespec="seconds"),
        "commit": machine.commit(),
        "minutes": round(minutes, 2),
        "planted": planted,
        **more,
        "machine": machine.facts(),
        "versions": machine.versions(),
        "checks": [dataclasses.asdict(result) for result in results],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{path}: {verdict(results)}")
    return status_of(results)
