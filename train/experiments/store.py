"""What the folder of a run keeps of each figure, and when that may be kept."""

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from train.experiments.figure import Figure
from train.experiments.record import Record, from_json, to_json
from train.experiments.settings import Settings


def environment() -> str:
    """What numbers depend on beside settings and code: JAX rounds as its version does, a corpus is Python's library."""
    return f"jax {jax.__version__}, Python {platform.python_version()}"


class Store:
    """The records of one figure in the folder of a run."""

    def __init__(self, out: Path, figure: Figure, settings: Settings) -> None:
        self._path = out / "figures" / f"{figure.name}.json"
        self._wanted = "; ".join([repr(settings), environment(), figure.inputs()])

    def finished(self) -> bool:
        """Whether it is there, whole, and of the same settings, environment and inputs."""
        return self._load().get("settings") == self._wanted

    def read(self) -> list[Record]:
        """What was written."""
        return from_json(json.dumps(self._load()["records"]))

    def write(self, records: Sequence[Record]) -> None:
        """Writes all of them, or nothing: an interrupted run leaves no half."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        half = self._path.with_suffix(".half")
        half.write_text(json.dumps({"settings": self._wanted, "records": to_json(records)}, indent=1) + "\n")
        half.replace(self._path)

    def remove(self) -> None:
        """What an earlier run wrote must not pass for what this one failed to."""
        self._path.unlink(missing_ok=True)

    def _load(self) -> dict[str, Any]:
        try:
            loaded = json.loads(self._path.read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return loaded if isinstance(loaded, dict) else {}
