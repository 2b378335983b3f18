"""Runs figures and writes records, pictures and the report: `python -m train.experiments`, `--help` for its flags."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from topoep_jax.cli import execute
from topoep_jax.cli.flags import Flags
from train.experiments import checks, report
from train.experiments.figures import FIGURES
from train.experiments.record import Record, to_json
from train.experiments.settings import Settings
from train.experiments.store import Store
from train.experiments.summary import summary
from train.lock import sole_writer

MEANING = "the paper's experiments: records, pictures, and a report with the paper's values beside ours"


def define() -> Flags:
    """Flags of the command."""
    values = Flags()
    values.add("figures", list, f"comma list of figures to run: all, or some of {', '.join(FIGURES)}", ["all"])
    values.add("full", bool, "everything, in hours, instead of a subset in minutes", False)
    values.add("seeds", int, "draws of each setting, instead of what each figure takes", least=1)
    values.add("out", str, "folder (default: runs/experiments, with --full runs/experiments-full)")
    values.add("resume", bool, "keep figures of equal settings that are in the folder", False)
    return values


def run(values: Flags) -> Iterator[str]:
    """What the command prints, figure by figure."""
    jax.config.update("jax_platforms", "cpu")  # Times are of the CPU, and no accelerator is needed.
    out = Path(values.out or f"runs/experiments{'-full' * values.full}").expanduser()
    settings = Settings(values.full, values.seeds, out, values.resume)
    chosen = _chosen(values.figures)
    with sole_writer(out, "--out"):
        yield from _run(settings, chosen)


def _run(settings: Settings, chosen: list[str]) -> Iterator[str]:
    out = settings.folder
    failures: dict[str, str] = {}
    for number in chosen:
        store = Store(out, FIGURES[number], settings)
        yield f"figure {number:<4} {FIGURES[number].title} ... "
        if settings.resume and store.finished():
            yield "kept\n"
            continue
        store.remove()
        began = time.perf_counter()
        try:
            store.write(FIGURES[number].run(settings))
        except KeyboardInterrupt:
            raise ValueError("interrupted: the same command with --resume goes on where this one stopped") from None
        except Exception as error:  # noqa: BLE001
            # Whatever it is, it must not take hours of other figures with it.
            failures[number] = _said(error)
            yield "failed\n"
        else:
            yield f"{time.perf_counter() - began:.1f} s\n"
    found = {}
    for number, figure in FIGURES.items():
        # Figures that were not asked for stay in the report, if they are of the same settings.
        store = Store(out, figure, settings)
        if not store.finished():
            continue
        try:
            records = store.read()
            report.draw(out, figure, records)
        except Exception as error:  # noqa: BLE001
            # Records of other code, for one.
            failures[number] = f"{_said(error)}, while its records were drawn: run it without --resume"
        else:
            found[number] = records
    records = [record for own in found.values() for record in own]
    write_records(out, records)
    outcomes = checks.check(records)
    (out / "summary.json").write_text(json.dumps(summary(records, outcomes), indent=1) + "\n")
    path = report.write(out, settings, found, outcomes)
    yield "\n" + checks.text(outcomes)
    yield f"\n{path} and {out / 'records.json'} are written\n"
    if failures:
        reasons = "\n".join(f"figure {number}: {reason}" for number, reason in failures.items())
        raise ValueError(f"the report lacks figures that failed; --resume runs only these again\n{reasons}")


def _chosen(asked: list[str]) -> list[str]:
    """Numbers of figures, each once."""
    known = {number.lower(): number for number in FIGURES}
    unknown = [number for number in asked if number.lower() not in (*known, "all")]
    if unknown or not asked:
        raise ValueError(f"--figures has {unknown or 'nothing'}: take all, or some of {', '.join(FIGURES)}")
    return list(FIGURES) if "all" in asked else list(dict.fromkeys(known[number.lower()] for number in asked))


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"


def write_records(out: Path, records: list[Record]) -> None:
    """records.json: two runs are equal but for the list `timed`, which has what a clock said."""
    timed = [record for record in records if record.timed]
    lists = {"records": [record for record in records if not record.timed], "timed": timed}
    text = json.dumps({name: to_json(some) for name, some in lists.items()}, indent=1)
    (out / "records.json").write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(execute("python -m train.experiments", MEANING, lambda: sys.modules[__name__], sys.argv[1:]))
