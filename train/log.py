"""What a run measures, step by step: lines in `metrics.jsonl`, and beside them the loads of all experts.

The loads are nearly all of it. They are one array, int32 [steps, layers with experts, experts], in a file that grows
with the run: `np.load("expert_load.npy")[step - 1]` is what each expert was assigned in a step, -1 if that was lost.
"""

import io
import json
import math
import os
import pathlib
from array import array
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from topoep_jax import Status
from train.state import StepMetrics

METRICS = "metrics.jsonl"
LOADS = "expert_load.npy"
_MEANS = ("imbalance_before", "imbalance", "inter_domain_before", "inter_domain", "replica")
_SUMS = ("overflow_rows", "slots_used", "dropped_rows")
_FLOATS = ("loss", "tokens_per_s", *_MEANS)
_INTEGERS = ("step", "passes", "rerun", *_SUMS)
_LOAD = np.dtype("<i4")

Columns = dict[str, np.ndarray]
"""The figures of the steps of a run under their names."""


def make_record(
    step: int, metrics: StepMetrics, *, tokens: int, seconds: float, rerun: bool, planner: str
) -> dict[str, Any]:
    """The line of one step.

    Args:
      step: steps done, from 1.
      metrics: NumPy copies.
      tokens: tokens of the step.
      seconds: its duration.
      rerun: whether it overflowed with overflow="flag", and `metrics` are those of its second run.
      planner: what planned it; a run may go on with another.

    Returns:
      Losses and norms; imbalances and shares as means over the layers, rows and slots as sums, `passes` as maximum;
      `status` with CAP_MET and EMPTY where all layers agree and the other bits where any has them; `rerun`, `planner`.
    """
    moe = metrics.moe
    agreed = int(Status.CAP_MET | Status.EMPTY)
    every, some = int(np.bitwise_and.reduce(moe.status)), int(np.bitwise_or.reduce(moe.status))
    record: dict[str, Any] = {
        "step": step,
        "loss": float(metrics.loss),
        "balance_loss": float(metrics.balance),
        "grad_norm": float(metrics.grad_norm),
        "tokens_per_s": round(tokens / seconds, 1),
    }
    for name in _MEANS:
        record[name] = float(np.mean(getattr(moe, name)))
    for name in _SUMS:
        record[name] = int(np.sum(getattr(moe, name)))
    record["passes"] = int(np.max(moe.passes))
    record["rerun"] = rerun
    record["status"] = (every & agreed) | (some & ~agreed)
    record["planner"] = planner
    return record


class Log:
    """Both files of a run. What is appended is in them at once, and not in memory.

    A resumed run keeps what they have up to its checkpoint and goes on behind it. Of what was lost it does without: the
    line that a crash tore, or a file.
    """

    lost: int
    """Steps before this start that `metrics.jsonl` has no whole line of."""

    def __init__(self, folder: pathlib.Path, *, layers: int, experts: int, keep: int) -> None:
        """Opens the files in `folder`.

        Args:
          folder: of the run.
          layers: of the model that have experts.
          experts: of a layer.
          keep: steps that were done before.

        Raises:
          ValueError: a line before the last is damaged.
        """
        lines = (folder / METRICS).open("r+b" if (folder / METRICS).exists() else "w+b")
        try:
            self.lost = keep - _cut_lines(lines, keep)
            self._loads = _Loads(folder / LOADS, layers, experts, keep)
        except BaseException:
            lines.close()
            raise
        self._lines = lines

    def append(self, record: dict[str, Any], load: np.ndarray) -> None:
        """Writes the record of the next step, and integers [layers, experts]."""
        self._loads.append(load)
        self._lines.write(json.dumps(record).encode() + b"\n")
        self._lines.flush()

    def __enter__(self) -> "Log":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.close()
        self._loads.close()


def _cut_lines(file: BinaryIO, keep: int) -> int:
    """Cuts off a torn line and those behind step `keep`, and stands where the next belongs; returns how many stay."""
    end = count = reached = 0
    for line in file:
        if reached >= keep:
            break
        try:
            step = json.loads(line)["step"]
            whole = line.endswith(b"\n") and isinstance(step, int)
        except (ValueError, KeyError, TypeError):
            whole = False
        if not whole:
            if file.read(1):
                raise ValueError(f"{file.name}, line {count + 1} is damaged: remove it, and the run goes on without it")
            break
        if step > keep:
            break
        end, count, reached = end + len(line), count + 1, step
    file.seek(end)
    file.truncate()
    return count


class _Loads:
    """The rows of `expert_load.npy`. Its header has the same length whatever their number, which it says."""

    def __init__(self, path: pathlib.Path, layers: int, experts: int, keep: int) -> None:
        self._shape = layers, experts
        self._row_bytes = math.prod(self._shape) * _LOAD.itemsize
        self._rows = 0
        self._start = len(self._header())
        self._file = path.open("r+b" if path.exists() else "w+b")
        there = self._rows_there() if keep else 0
        self._rows = min(there, keep)
        self._file.seek(self._end())
        self._file.truncate()
        for _ in range(keep - there):
            self.append(np.full(self._shape, -1))
        self._file.seek(0)
        self._file.write(self._header())
        self._file.flush()

    def append(self, load: np.ndarray) -> None:
        assert load.shape == self._shape
        self._file.seek(self._end())
        self._file.write(np.ascontiguousarray(load, _LOAD).data)
        # Only when the row is there does the header count it.
        self._file.flush()
        self._rows += 1
        self._file.seek(0)
        self._file.write(self._header())
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _rows_there(self) -> int:
        """Whole rows, of which the header may not know the last; none where the file is of something else."""
        try:
            np.lib.format.read_magic(self._file)
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(self._file)
        except ValueError:
            return 0
        if (shape[1:], fortran, dtype) != (self._shape, False, _LOAD):
            return 0
        return (os.fstat(self._file.fileno()).st_size - self._start) // self._row_bytes

    def _header(self) -> bytes:
        head = io.BytesIO()
        described = {"descr": _LOAD.str, "fortran_order": False, "shape": (self._rows, *self._shape)}
        np.lib.format.write_array_header_1_0(head, described)
        return head.getvalue()

    def _end(self) -> int:
        return self._start + self._rows * self._row_bytes


def read_columns(path: pathlib.Path) -> Columns:
    """The figures in a `metrics.jsonl`, and which planner made them; read line by line."""
    figures = {name: array("d") for name in _FLOATS} | {name: array("q") for name in _INTEGERS}
    planners: dict[str, int] = {}
    planned = array("q")
    with path.open("rb") as file:
        for line in file:
            record = {"planner": "unknown"} | json.loads(line)  # Lines did not always say it.
            for name, values in figures.items():
                values.append(record[name])
            planned.append(planners.setdefault(record["planner"], len(planners)))
    columns = {name: np.array(values) for name, values in figures.items()}
    return {**columns, "planner": np.array(list(planners), np.str_)[np.array(planned, np.intp)]}


def mean_load(path: pathlib.Path, steps: np.ndarray) -> np.ndarray | None:
    """Mean of the rows of an `expert_load.npy`, [layers, experts], of those of `steps` that it knows; None if none."""
    loads = np.load(path, mmap_mode="r")
    known = [step - 1 for step in steps.tolist() if loads[step - 1].min() >= 0]
    total = np.zeros(loads.shape[1:], np.int64)
    for row in known:
        total += loads[row]
    return total / len(known) if known else None
