"""Checkpoints of logical global arrays under logical names, so that a run goes on with any number of ranks."""

import pathlib
from types import TracebackType

import jax
import orbax.checkpoint as ocp

from models.checkpoint.parameters import flat
from models.checkpoint.trainer import MASTERS
from train.state import TrainState
from train.step import Program


class CheckpointError(ValueError):
    """A checkpoint that is missing or does not fit the model; the message says where, and with which flags it would."""


class Checkpoints:
    """The checkpoints of one run: `folder`/<step>. The last two are kept. Use as a context manager."""

    def __init__(self, folder: pathlib.Path) -> None:
        # Saved in the foreground: the state is donated to the next step, and a run must be able to stop at any moment.
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(
            folder.absolute(), options=options, item_handlers=ocp.StandardCheckpointHandler()
        )
        self._folder = folder

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._manager.close()

    def save(self, state: TrainState) -> None:
        """Writes the state under its own step, unless that is there already."""
        step = int(state.step)
        if step not in self._manager.all_steps():
            self._manager.save(step, args=ocp.args.StandardSave(flat(state)))

    def latest(self) -> int | None:
        """The step of the newest checkpoint, None if there is none."""
        step: int | None = self._manager.latest_step()
        return step

    def restore(self, program: Program) -> TrainState:
        """The latest state, placed as `program` wants it, whatever the number of ranks that saved it.

        Raises:
          CheckpointError: none was saved, or it belongs to a model of other shapes.
        """
        step = self.latest()
        if step is None:
            raise CheckpointError(f"{self._folder} holds no checkpoint: start without --resume in another --run_dir")
        wanted = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            program.abstract,
            program.shardings,
        )
        named = flat(wanted)
        self._check(step, named)
        restored = self._manager.restore(step, args=ocp.args.StandardRestore(named))
        return jax.tree.unflatten(jax.tree.structure(wanted), [restored[name] for name in named])

    def _check(self, step: int, wanted: dict[str, jax.ShapeDtypeStruct]) -> None:
        saved = self._manager.item_metadata(step).tree
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
            more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
            raise CheckpointError(
                f"checkpoint {self._folder / str(step)} is of another shape: {'; '.join(faults[:3])}{more}."
                f" Resume with the {resume}, or start anew in another --run_dir"
            )
