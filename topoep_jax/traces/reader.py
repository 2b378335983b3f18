"""Reads traces: files of `TraceWriter`, and arrays that users saved with NumPy."""

import abc
import os
import pathlib
import tokenize
import zipfile
from types import TracebackType
from typing import IO

import numpy as np

from topoep_jax.plan.problem import MAX_ROWS
from topoep_jax.traces import container
from topoep_jax.traces.info import TraceInfo
from topoep_jax.traces.layout import HEAD, decode, microbatch_of, read_head


class Trace(abc.ABC):
    """An open trace file, read microbatch by microbatch; close it, or use it in a `with`.

    Attributes:
      info: sizes and names. Of a user's arrays, layers are numbered from 0.
      steps: the step of each microbatch; of a user's arrays, they are numbered from 0.
      recorded: whether a `TraceWriter` made it, so that its layers are those of a model.
      holds_demand: whether it tells only how many rows go where, not the experts of each token.
      cut_off: whether the file does not end as its writer ends it: that one died, and these are the whole microbatches.
    """

    info: TraceInfo
    steps: tuple[int, ...]
    recorded: bool = False
    holds_demand: bool = False
    cut_off: bool = False

    def __len__(self) -> int:
        """Number of microbatches."""
        return len(self.steps)

    @abc.abstractmethod
    def expert_idx(self, microbatch: int) -> np.ndarray:
        """int32 [layers, R, T, K], the experts of each rank's tokens; -1 is padding.

        Raises:
          ValueError: the file is damaged there, or holds demand alone.
        """

    def omega(self, microbatch: int) -> np.ndarray:
        """int64 [layers, R, E]: assignments from each source rank to each expert.

        Raises:
          ValueError: the file is damaged there.
        """
        return demand_of(self.expert_idx(microbatch), self.info.num_experts)

    def replay(self, step: int) -> np.ndarray:
        """int32 [layers, tokens, K] of all tokens of a step, in the order of the batch: reshaped, what models replay.

        Raises:
          ValueError: no such step.
        """
        parts = [index for index, recorded in enumerate(self.steps) if recorded == step]
        if not parts:
            first, last = self.steps[0], self.steps[-1]
            raise ValueError(f"step {step} is not recorded: there are {len(set(self.steps))} of {first}..{last}")
        arrays = [self.expert_idx(index) for index in parts]
        return np.concatenate([array.reshape(array.shape[0], -1, array.shape[-1]) for array in arrays], axis=1)

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the file."""

    def __enter__(self) -> "Trace":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_trace(path: str | os.PathLike[str], num_experts: int | None = None) -> Trace:
    """Opens a trace file of any kind.

    Args:
      path: a file of `TraceWriter`; or `.npz` with an array `omega` [..., R, E] or `expert_idx` [..., R, T, K]; or
        `.npy` with omega. Of the leading axes the last is the layers, the others are microbatches; a single one is
        microbatches.
      num_experts: E, needed for a user's `expert_idx`, and checked where the file knows it.

    Raises:
      ValueError: another kind of file or array, a later version, values out of range. OSError: it cannot be read.
    """
    path = pathlib.Path(path)
    if path.suffix not in (".npy", ".npz"):
        raise ValueError(f"{path}: a trace is a .npy or .npz file")
    recorded = _open_recorded(path) if path.suffix == ".npz" else None
    trace = _Arrays(path, num_experts) if recorded is None else recorded
    if num_experts not in (None, trace.info.num_experts):
        trace.close()
        raise ValueError(f"{path} has {trace.info.num_experts} experts, but {num_experts} were asked for")
    return trace


def read_trace(path: str | os.PathLike[str], num_experts: int | None = None) -> np.ndarray:
    """int64 [samples, R, E], the demand of every layer of every microbatch of a trace file, see `open_trace`.

    Raises:
      ValueError: as `open_trace`. OSError: the file cannot be read.
    """
    with open_trace(path, num_experts) as trace:
        return np.concatenate([trace.omega(microbatch) for microbatch in range(len(trace))])


def demand_of(expert_idx: np.ndarray, num_experts: int) -> np.ndarray:
    """int64 [layers, R, E] of integers [layers, R, T, K], of which those below 0 are padding."""
    num_layers, num_ranks = expert_idx.shape[:2]
    omega = np.empty((num_layers, num_ranks, num_experts), np.int64)
    for layer, rank in np.ndindex(num_layers, num_ranks):
        chosen = expert_idx[layer, rank].ravel()
        omega[layer, rank] = np.bincount(chosen[chosen >= 0], minlength=num_experts)
    return omega


class _Recorded(Trace):
    """A file of `TraceWriter`."""

    recorded = True

    def __init__(self, path: pathlib.Path, file: IO[bytes], infos: list[zipfile.ZipInfo], cut_off: bool) -> None:
        self._path, self._file, self.cut_off = path, file, cut_off
        self.info = read_head(file, infos)
        # Others may have packed it again, in another order and with more beside it.
        entries = {microbatch_of(i.filename): i for i in infos if i.filename.startswith("expert_idx/")}
        self._entries = [entries[key] for key in sorted(entries)]
        self.steps = tuple(step for step, _ in sorted(entries))
        if not entries:
            raise ValueError("it holds no microbatch" + " that is whole: it was cut off" * cut_off)

    def expert_idx(self, microbatch: int) -> np.ndarray:
        try:
            return decode(container.read(self._file, self._entries[microbatch]), self.info)
        except ValueError as error:
            raise ValueError(f"{self._path}, step {self.steps[microbatch]}: {error}") from error

    def close(self) -> None:
        self._file.close()


def _open_recorded(path: pathlib.Path) -> Trace | None:
    """None where it is another kind of file, or no whole one."""
    file = path.open("rb")
    try:
        infos, cut_off = container.find(file)
    except container.DamagedError as error:
        ours = container.begins_with(file, HEAD)
        file.close()
        if ours:
            raise ValueError(f"{path} is damaged: {error}") from error
        return None
    if not any(info.filename == f"{HEAD}.npy" for info in infos):
        file.close()
        return None
    try:
        return _Recorded(path, file, infos, cut_off)
    except ValueError as error:
        file.close()
        raise ValueError(f"{path}: {error}") from error


class _Arrays(Trace):
    """What a user saved."""

    def __init__(self, path: pathlib.Path, num_experts: int | None) -> None:
        name, array = _load(path)
        if not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"{path}: {name} has dtype {array.dtype}, but a trace holds integers")
        axes = {"omega": ("R", "E"), "expert_idx": ("R", "T", "K")}[name]
        if array.ndim < len(axes) or 0 in array.shape:
            raise ValueError(
                f"{path}: {name} has shape {array.shape}, expected [..., {', '.join(axes)}], none of them 0"
            )
        *leading, num_ranks = array.shape[: array.ndim - len(axes) + 1]
        num_layers = leading[-1] if len(leading) > 1 else 1
        self._samples = array.reshape(-1, num_layers, *array.shape[len(leading) :])
        self._path, self.holds_demand = path, name == "omega"
        if self.holds_demand:
            num_experts = array.shape[-1]
            _check_demand(path, array.reshape(-1, *array.shape[-2:]))
        elif num_experts is None:
            raise ValueError(f"{path}: expert_idx does not say how many experts there are: give their number")
        elif array.max() >= num_experts:
            raise ValueError(f"{path}: expert_idx names expert {array.max()}, but there are {num_experts}")
        try:
            self.info = TraceInfo(num_experts, num_ranks, layers=tuple(range(num_layers)))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        self.steps = tuple(range(len(self._samples)))

    def expert_idx(self, microbatch: int) -> np.ndarray:
        if self.holds_demand:
            raise ValueError(f"{self._path} holds demand, omega, which does not tell the experts of each token")
        return np.maximum(self._samples[microbatch].astype(np.int64), -1).astype(np.int32)

    def omega(self, microbatch: int) -> np.ndarray:
        if self.holds_demand:
            return self._samples[microbatch].astype(np.int64)
        return super().omega(microbatch)

    def close(self) -> None:
        """Nothing is open."""


def _load(path: pathlib.Path) -> tuple[str, np.ndarray]:
    """Name and values of the array in a user's file."""
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return "omega", loaded
        with loaded:
            names = [name for name in ("omega", "expert_idx") if name in loaded]
            if len(names) == 1:
                return names[0], loaded[names[0]]
            held = sorted(loaded)
    except (ValueError, EOFError, SyntaxError, tokenize.TokenError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: not a readable NumPy file ({error})") from error
    raise ValueError(f"{path} holds {held}, expected exactly one of 'omega' and 'expert_idx'")


def _check_demand(path: pathlib.Path, omega: np.ndarray) -> None:
    """Refuses demand [samples, R, E] that is negative, or 2^31 rows and more."""
    if (omega < 0).any():
        sample, rank, expert = np.argwhere(omega < 0)[0]
        value = omega[sample, rank, expert]
        raise ValueError(f"{path}: omega[{rank}, {expert}]={value} of sample {sample} is negative; demand counts rows")
    # Compared before any cast or sum, which could wrap.
    if (omega > MAX_ROWS).any() or (omega.astype(np.float64).sum(axis=(1, 2)) > MAX_ROWS).any():
        raise ValueError(f"{path}: a sample of omega holds 2^31 rows or more; plan smaller microbatches")
