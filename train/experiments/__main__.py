"""Runs figures and writes records, pictures and the report: `python -m train.experiments`, `--help` for its flags."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from absl import flags

from topoep_jax.cli import execute
from train.experiments import checks, report
from train.experiments.figure import Figure
from train.experiments.figures import FIGURES
from train.experiments.record import Record, from_json, to_json
from train.experiments.settings import Settings
from train.experiments.summary import summary

MEANING = "the paper's experiments: records, pictures, and a report with the paper's values beside ours"


def define() -> flags.FlagValues:
    """Flags of the command."""
    values = flags.FlagValues()
    flags.DEFINE_list(
        "figures", ["all"], f"comma list of figures to run: all, or some of {', '.join(FIGURES)}", flag_values=values
    )
    flags.DEFINE_bool("full", False, "everything, in hours, instead of a subset in minutes", flag_values=values)
    flags.DEFINE_integer(
        "seeds", None, "draws of each setting, instead of what each figure takes", 1, flag_values=values
    )
    flags.DEFINE_string(
        "out", None, "folder (default: runs/experiments, with --full runs/experiments-full)", flag_values=values
    )
    flags.DEFINE_bool("resume", False, "keep figures of equal settings that are in the folder", flag_values=values)
    return values


def run(values: flags.FlagValues) -> Iterator[str]:
    """What the command prints, figure by figure."""
    jax.config.update("jax_platforms", "cpu")  # Times are of the CPU, and no accelerator is needed.
    out = Path(values.out or f"runs/experiments{'-full' * values.full}")
    settings = Settings(values.full, values.seeds, out, values.resume)
    chosen = list(FIGURES) if "all" in values.figures else list(values.figures)
    if unknown := [number for number in chosen if number not in FIGURES]:
        raise ValueError(f"--figures has {unknown}: take all, or some of {', '.join(FIGURES)}")
    failures = {}
    for number in chosen:
        store = Store(out, FIGURES[number], settings)
        yield f"figure {number:<4} {FIGURES[number].title} ... "
        if values.resume and store.finished():
            yield "kept\n"
            continue
        store.remove()
        began = time.perf_counter()
        try:  # One that fails after hours must not take the others with it.
            store.write(FIGURES[number].run(settings))
        except (ValueError, OSError) as error:
            failures[number] = str(error)
            yield "failed\n"
        else:
            yield f"{time.perf_counter() - began:.1f} s\n"
    # Figures that were not asked for stay in the report, if they are of the same settings.
    found = {n: store.read() for n, f in FIGURES.items() if (store := Store(out, f, settings)).finished()}
    records = [record for own in found.values() for record in own]
    write_records(out, records)
    outcomes = checks.check(records)
    (out / "summary.json").write_text(json.dumps(summary(records, outcomes), indent=1) + "\n")
    path = report.write(out, settings, found, outcomes)
    yield "\n" + checks.text(outcomes)
    yield f"\n{path} and {out / 'records.json'} are written\n"
    if failures:
        reasons = "\n".join(f"figure {number}: {reason}" for number, reason in failures.items())
        raise ValueError(f"{len(failures)} of {len(chosen)} figures failed; --resume runs them again alone\n{reasons}")


class Store:
    """The records of one figure in the folder of a run."""

    def __init__(self, out: Path, figure: Figure, settings: Settings) -> None:
        self._path = out / "figures" / f"{figure.name}.json"
        self._settings = repr(settings)

    def finished(self) -> bool:
        """Whether it is there, of the same settings."""
        return self._path.is_file() and self._load()["settings"] == self._settings

    def read(self) -> list[Record]:
        """What was written."""
        return from_json(json.dumps(self._load()["records"]))

    def write(self, records: Any) -> None:
        """Writes all of them, or nothing: an interrupted run leaves no half."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        half = self._path.with_suffix(".half")
        half.write_text(json.dumps({"settings": self._settings, "records": to_json(records)}, indent=1) + "\n")
        half.replace(self._path)

    def remove(self) -> None:
        """What an earlier run wrote must not pass for what this one failed to."""
        self._path.unlink(missing_ok=True)

    def _load(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(self._path.read_text())
        return loaded


def write_records(out: Path, records: list[Record]) -> None:
    """records.json: two runs are equal but for the list `timed`, which has what a clock said."""
    timed = [record for record in records if record.timed]
    lists = {"records": [record for record in records if not record.timed], "timed": timed}
    text = json.dumps({name: to_json(some) for name, some in lists.items()}, indent=1)
    (out / "records.json").write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(execute("python -m train.experiments", MEANING, lambda: sys.modules[__name__], sys.argv[1:]))
