"""Modules of the experiments in processes of their own: emulated devices are set once in each."""

import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def run(module: str, *arguments: str, log: Path) -> None:
    """Runs a module as `python -m` does, with what it prints in `log`, whose folder is made.

    Raises:
      ValueError: it failed; the message ends as its log does.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        command = [sys.executable, "-m", module, *arguments]
        done = subprocess.run(command, cwd=_ROOT, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        raise ValueError(f"python -m {module} failed; {log} ends: {log.read_text()[-800:]}")
