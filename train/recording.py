"""Records what the routers chose into the run's folder, for `topoep trace` and `topoep plan`."""

import pathlib
from types import TracebackType

import jax

from topoep_jax import TraceWriter
from train.config import TrainConfig
from train.mesh import make_topology
from train.state import StepMetrics
from train.step import Program


class Recorder:
    """Writes every n-th step to `routing.npz`, in the first process alone; nothing where the run does not ask for it.

    A resumed run goes on behind the last step of its checkpoint, as `metrics.jsonl` does.
    """

    FILE = "routing.npz"

    def __init__(self, config: TrainConfig, program: Program, *, done: int) -> None:
        """Opens the file. Raises ValueError where a file that is there was recorded of another model or mesh."""
        self._every, self._writer = config.record_routing, None
        if not self._every or jax.process_index():
            return
        shapes = config.shapes()
        self._writer = TraceWriter(
            pathlib.Path(config.run_dir, self.FILE),
            num_experts=shapes.num_experts,
            num_ranks=config.ep,
            num_groups=config.dp,
            layers=range(shapes.dense_layers, shapes.num_layers),
            topology=make_topology(config, program.mesh),
            model=config.model,
            hidden=shapes.hidden,
            ffn=shapes.ffn,
            resume_after=done if done else None,
        )

    def wants(self, step: int) -> bool:
        """Whether this step is recorded."""
        return self._every > 0 and step % self._every == 0

    def record(self, step: int, metrics: StepMetrics) -> None:
        """Appends the microbatches of a step, NumPy copies, if it is one of those to record."""
        if self._writer is None or not self.wants(step):
            return
        for expert_idx in metrics.expert_idx:
            self._writer.append(expert_idx, step=step)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()
