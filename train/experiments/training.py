"""Training runs of a small model, each in a process of its own with emulated devices, for figures that need one."""

import functools
import pydoc_data.topics
import shutil
import subprocess
import sys
from pathlib import Path

from train.experiments.settings import Settings

MODEL = "qwen3_tiny"
_ROOT = Path(__file__).resolve().parents[2]
_FLAGS = (f"--model={MODEL}", "--seq_len=64", "--record_routing=10")
_RANKS = 4
"""In two domains; eight sequences of 64 bytes a step: a step takes about a tenth of a second."""
CORPORA = {"code": "Python's own library", "prose": "Python's own language reference"}


def trained(
    settings: Settings,
    planner: str,
    corpus: str,
    *,
    ranks: int = _RANKS,
    implementation: str = "",
    steps: int | None = None,
) -> Path:
    """The folder of a finished run; a run that `settings.resume` finds goes on behind its last checkpoint.

    Args:
      settings: of the experiments.
      planner: of the run.
      corpus: one of `CORPORA`.
      ranks: devices that are emulated.
      implementation: of the planner; "" for the trainer's own choice.
      steps: instead of `settings.steps`.

    Raises:
      ValueError: the run failed; the message ends as its log does.
    """
    name = "_".join(filter(None, (corpus, planner, str(ranks), implementation)))
    folder = (settings.folder / "training" / name).resolve()
    flags = [*_FLAGS, f"--ep={ranks}", f"--planner={planner}", *_data(folder.parent, corpus)]
    if implementation:
        flags.append(f"--planner_implementation={implementation}")
    return _trained(folder, tuple(flags), steps or settings.steps, resume=settings.resume)


@functools.cache  # Two figures may ask for the same run.
def _trained(folder: Path, flags: tuple[str, ...], steps: int, *, resume: bool) -> Path:
    noted, wanted = folder.with_suffix(".flags"), "\n".join(flags)
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
    """Of a run that ended: `summary.json` is the last thing that it writes."""
    log = folder / "metrics.jsonl"
    return len(log.read_text().splitlines()) if (folder / "summary.json").is_file() and log.is_file() else 0


def _run(folder: Path, flags: list[str]) -> None:
    log = folder.with_suffix(".log")
    command = [sys.executable, "-m", "train.pretrain", f"--run_dir={folder}", *flags]
    with log.open("w") as file:
        done = subprocess.run(command, cwd=_ROOT, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        raise ValueError(f"the training run of {folder} failed; {log} ends: {log.read_text()[-800:]}")
