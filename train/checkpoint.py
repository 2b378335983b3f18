"""Checkpoints of logical global arrays under logical names, so that a run goes on with any number of ranks.

A checkpoint is a folder that gets its name, the step, once it is complete and the digests of its files lie in it:
whenever a process is killed, a folder of that name is a whole checkpoint, and what is damaged later is noticed.
"""

import contextlib
import itertools
import json
import pathlib
import re
import shutil
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from models.checkpoint import digests
from models.checkpoint.export import sync
from models.checkpoint.parameters import flat
from models.checkpoint.trainer import ITEM, MASTERS, steps_in
from train.state import TrainState
from train.step import Program
from train.together import together

_KEPT = 2
_HALF = ".half"
_MOST_SHOWN = 3


class CheckpointError(ValueError):
    """A checkpoint that is missing or damaged, or does not fit the model; the message says where, and how to go on."""


class Checkpoints:
    """The checkpoints of one run: `folder`/<step>. The last two are kept. Use as a context manager.

    All processes of a run call `save` and `restore`.
    """

    notes: list[str]
    """What `restore` found that somebody should know, though it went on."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder.absolute()
        # Saved in the foreground: the state is donated to the next step, and a run must be able to stop at any moment.
        self._orbax = ocp.Checkpointer(ocp.StandardCheckpointHandler())
        self.notes = []

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._orbax.close()

    def latest(self) -> int | None:
        """The step of the newest checkpoint, None if there is none."""
        return max(steps_in(self._folder), default=None)

    def prepare(self) -> None:
        """Makes sure that the run can save here. Collective.

        Raises:
          CheckpointError: on all processes, if nothing can be written.
        """
        with together():
            if _is_lead():
                with self._written("nothing can be saved"):
                    self._make(f".test{_HALF}").rmdir()

    def set_aside(self, done: int) -> None:
        """Gives other names to the checkpoints behind step `done`, which the run does not go on from. Collective."""
        with together():
            for step in sorted(steps_in(self._folder)) if _is_lead() else []:
                if step > done:
                    with self._written(f"the checkpoint of step {step} cannot be set aside"):
                        aside = self._free(f"{step}.aside")
                        (self._folder / str(step)).rename(aside)
                        self.notes.append(f"the checkpoint of step {step} is now {aside}; remove it some day")

    def save(self, state: TrainState) -> None:
        """Writes the state under its own step, unless that is there already. Collective.

        Raises:
          CheckpointError: on all processes, if it cannot be written; those that were saved before are unharmed.
        """
        step = int(state.step)
        half, fault = self._folder / f".{step}{_HALF}", f"step {step} cannot be saved"
        with together():
            there = step in steps_in(self._folder)
            if _is_lead() and not there:
                with self._written(fault):
                    self._make(half.name)
        if there:
            return
        with together(), self._written(fault):
            self._orbax.save(half / ITEM, args=ocp.args.StandardSave(flat(state)))
        with together(), self._written(fault):
            files = list(filter(_is_mine, digests.names(half / ITEM)))
            for name in files:
                sync(half / ITEM / name)  # Orbax does so for some.
            mine = digests.make(half / ITEM, files)
            (half / str(jax.process_index())).write_text(json.dumps(mine))
        with together():
            if _is_lead():
                with self._written(fault):
                    self._commit(step, half)

    def _commit(self, step: int, half: pathlib.Path) -> None:
        """Collects the digests of all processes, and gives the folder its name."""
        entries: dict[str, tuple[int, str]] = {}
        for process in range(jax.process_count()):
            part = half / str(process)
            entries |= json.loads(part.read_text())
            part.unlink()
        digests.write(half / ITEM, entries)
        for path in (*filter(pathlib.Path.is_dir, half.rglob("*")), half):
            sync(path)
        half.rename(self._folder / str(step))
        sync(self._folder)
        for old in sorted(steps_in(self._folder))[:-_KEPT]:
            # First the name: half of a checkpoint must not be taken for one.
            (self._folder / str(old)).rename(self._folder / f".{old}{_HALF}")
        self._clear()

    def restore(self, program: Program, *, step: int | None = None) -> TrainState:
        """A state, placed as `program` wants it, whatever the number of ranks that saved it. Collective.

        Args:
          program: of the run.
          step: of the checkpoint; None for the latest.

        Raises:
          CheckpointError: on all processes. There is none, it is damaged, or it belongs to a model of other shapes.
        """
        with together():
            step = self._choose(step)
        wanted = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            program.abstract,
            program.shardings,
        )
        named = flat(wanted)
        self._verify(step)
        with together(), self._readable(step):
            arrays = self._folder / str(step) / ITEM
            self._check(step, self._orbax.metadata(arrays).item_metadata.tree, named)
            restored = self._orbax.restore(arrays, args=ocp.args.StandardRestore(named))
        return jax.tree.unflatten(jax.tree.structure(wanted), [restored[name] for name in named])

    def _choose(self, step: int | None) -> int:
        there = sorted(steps_in(self._folder))
        if not there:
            if self._folder.exists() and not self._folder.is_dir():
                raise CheckpointError(f"{self._folder} is no folder: move it away, and start anew in another --run_dir")
            raise CheckpointError(f"{self._folder} holds no checkpoint: start without --resume in another --run_dir")
        if step is not None and step not in there:
            known = " or ".join(f"--restore={other}" for other in there)
            raise CheckpointError(f"{self._folder} holds no checkpoint of step {step}: take {known}")
        return there[-1] if step is None else step

    def _verify(self, step: int) -> None:
        """Raises CheckpointError on all processes if any finds damage; each reads a share of the files."""
        folder = self._folder / str(step)
        found = digests.compare(folder / ITEM, share=(jax.process_index(), jax.process_count()))
        self.notes += [f"checkpoint {folder} {note}" for note in found.notes]
        with together():
            if found.faults:
                raise CheckpointError(f"checkpoint {folder} is damaged: {_listed(found.faults)}. {self._way_on(step)}")

    @contextlib.contextmanager
    def _readable(self, step: int) -> Iterator[None]:
        """Names damage of what has no digests: it is noticed here, or never."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            # Orbax has no class for it: it raises `Exception`, with pages of text.
            reason = _first_line(error.__cause__ or error)
            raise CheckpointError(
                f"checkpoint {self._folder / str(step)} cannot be read ({reason}). {self._way_on(step)}"
            ) from error

    def _way_on(self, step: int) -> str:
        """What to do without the checkpoint of a step. That of another is verified when it is taken."""
        for older in sorted(steps_in(self._folder), reverse=True):
            if older < step and not digests.compare(self._folder / str(older) / ITEM, read=False).faults:
                return f"Go on from the one before it, with --resume --run_dir={self._folder.parent} --restore={older}"
        return "There is none before it that is whole: start anew in another --run_dir"

    @contextlib.contextmanager
    def _written(self, fault: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            latest = self.latest()
            saved = f"--resume, which goes on from step {latest}" if latest is not None else "a new run: none was saved"
            where = f"{fault} in {self._folder} ({_first_line(error)})"
            raise CheckpointError(f"{where}: make room there, or it writable, and start again with {saved}") from error

    def _make(self, name: str) -> pathlib.Path:
        """A new folder, once what a process that was killed had begun is gone."""
        self._clear()
        path = self._folder / name
        path.mkdir(parents=True)
        return path

    def _clear(self) -> None:
        for path in self._folder.glob(f".*{_HALF}"):
            shutil.rmtree(path)

    def _free(self, name: str) -> pathlib.Path:
        """A path for this name, with a number behind it where others have it."""
        names = (f"{name}{number or ''}" for number in itertools.count())
        return next(path for path in map(self._folder.joinpath, names) if not path.exists())

    def _check(self, step: int, saved: dict[str, Any], wanted: dict[str, jax.ShapeDtypeStruct]) -> None:
        narrow, now = (any(name.startswith(MASTERS) for name in names) for names in (saved, wanted))
        faults, resume = [], "--model and --shape of that run"
        if narrow != now:
            # Nothing in the optimizer's state has its name then.
            saved, wanted = ({k: v for k, v in d.items() if k.startswith("params/")} for d in (saved, wanted))
            kept, missed = ("f32 masters", "no f32 masters")[:: 1 if narrow else -1]
            faults = [f"it holds {kept} of the parameters, and this run {missed}"]
            resume = f"--param_dtype={'bfloat16' if narrow else 'float32'}, and the {resume}"
        faults += [f"{name} is missing" for name in wanted if name not in saved]
        faults += [f"{name} is not part of this model" for name in saved if name not in wanted]
        faults += [
            f"{name} has shape {tuple(saved[name].shape)}, this model wants {leaf.shape}"
            for name, leaf in wanted.items()
            if name in saved and tuple(saved[name].shape) != leaf.shape
        ]
        if faults:
            raise CheckpointError(
                f"checkpoint {self._folder / str(step)} is of another shape: {_listed(faults)}."
                f" Resume with the {resume}, or start anew in another --run_dir"
            )


def _is_lead() -> bool:
    return jax.process_index() == 0


def _is_mine(name: str) -> bool:
    """Whether this process wrote a file: Orbax says in names which one did, but for those of the first."""
    writer = re.search(r"process_(\d+)", name)
    return (int(writer[1]) if writer else 0) == jax.process_index()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _listed(faults: list[str]) -> str:
    more = f" (and {len(faults) - _MOST_SHOWN} more)" if len(faults) > _MOST_SHOWN else ""
    return "; ".join(faults[:_MOST_SHOWN]) + more
