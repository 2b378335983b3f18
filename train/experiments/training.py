"""Training runs of a small model, each in a process of its own with emulated devices, for figures that need one."""

import functools
import pydoc_data.topics
import shutil
from pathlib import Path

from train.experiments import process
from train.experiments.settings import Settings
from train.experiments.store import environment

MODEL = "qwen3-tiny"
_FLAGS = (f"--model={MODEL}", "--seq_len=64", "--record_routing=10")
_RANKS = 4
"""In two domains; eight sequences of 64 bytes a step: a step takes about a tenth of a second."""
CORPORA = {"code": "Python's own library", "prose": "Python's own language reference"}


def trained(settings: Settings, planner: str, corpus: str, steps: int, *, ranks: int = _RANKS) -> Path:
    """The folder of a finished run; a run that `settings.resume` finds goes on behind its last checkpoint.

    The schedule of the learning rate depends on the number of steps: no run goes on to be a longer one.

    Raises:
      ValueError: the run failed; the message ends as its log does.
    """
    folder = (settings.folder / "training" / f"{corpus}_{planner}_{ranks}_{steps}").resolve()
    flags = (*_FLAGS, f"--ep={ranks}", f"--planner={planner}", *_data(folder.parent, corpus))
    return _trained(folder, flags, steps, resume=settings.resume)


@functools.cache  # Two figures may ask for the same run.
def _trained(folder: Path, flags: tuple[str, ...], steps: int, *, resume: bool) -> Path:
    noted, wanted = folder.with_suffix(".flags"), "\n".join([*flags, environment()])
    if not (resume and noted.is_file() and noted.read_text() == wanted):
        shutil.rmtree(folder, ignore_errors=True)
        noted.write_text(wanted)
    if _steps_done(folder) < steps:
        saved = any((folder / "checkpoints").glob("[0-9]*"))
        if not saved:
            shutil.rmtree(folder, ignore_errors=True)
        _run(folder, [*flags, f"--steps={steps}", *(["--resume"] if saved else [])])
    return folder


def _data(folder: Path, corpus: str) -> list[str]:
    """Flags of a corpus that every machine has: its size depends on the version of Python."""
    folder.mkdir(parents=True, exist_ok=True)
    if corpus == "code":
        return []
    topics = pydoc_data.topics.topics
    text = folder / "prose.txt"
    text.write_text("\n\n".join(topics[name] for name in sorted(topics)))
    return [f"--data={text}"]


def _steps_done(folder: Path) -> int:
    """The steps that a run has done when it has ended: `summary.json` is the last thing that it writes."""
    log = folder / "metrics.jsonl"
    return len(log.read_text().splitlines()) if (folder / "summary.json").is_file() and log.is_file() else 0


def _run(folder: Path, flags: list[str]) -> None:
    process.run("train.pretrain", f"--run_dir={folder}", *flags, log=folder.with_suffix(".log"))
