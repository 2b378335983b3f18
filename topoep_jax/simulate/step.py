"""A whole step: dense parts, every MoE layer forward and backward, the optimizer; and what it comes to."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from topoep_jax.simulate.program import LINKS, Links, Program
from topoep_jax.simulate.timeline import Share, Timeline
from topoep_jax.simulate.work import Work

MS = 1_000_000_000
"""Picoseconds."""


class Design(Protocol):
    """How a layer spends its time: `pipeline.PipelinedLayer` or `paper.PaperLayer`."""

    def links(self, work: Work) -> Links:
        """What carries its exchanges."""

    def add_forward(self, program: Program, work: Work, after: int) -> int:
        """Adds the forward pass of a layer after a task; returns the task that others may need."""

    def add_backward(self, program: Program, work: Work, after: int) -> int:
        """The same of the backward pass."""


MAX_TURNS = 1024
"""Most layers times microbatches of a step: each is simulated, and takes time and memory."""


@dataclasses.dataclass(frozen=True)
class Step:
    """What a step is made of.

    Attributes:
      layers: MoE layers.
      microbatches: each goes forward and backward through all layers, one after the other.
      dense_ms: whatever else a microbatch takes, forward and backward: attention, norms, embeddings, loss.
      optimizer_ms: once a step.

    Raises:
      ValueError: a value out of range.
    """

    layers: int = 1
    microbatches: int = 1
    dense_ms: float = 0.0
    optimizer_ms: float = 0.0

    def __post_init__(self) -> None:
        for name in ("layers", "microbatches"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.layers * self.microbatches > MAX_TURNS:
            raise ValueError(
                f"layers={self.layers} times microbatches={self.microbatches} is more than {MAX_TURNS}, the"
                " longest step that is simulated: take fewer microbatches, and their part of optimizer_ms"
            )
        for name in ("dense_ms", "optimizer_ms"):
            if not 0 <= getattr(self, name) <= 1e6:
                raise ValueError(f"{name}={getattr(self, name)} must be within 0..10^6 milliseconds")

    @property
    def outside_ms(self) -> float:
        """All that is not an MoE layer."""
        return self.microbatches * self.dense_ms + self.optimizer_ms


@dataclasses.dataclass(frozen=True)
class Simulation:
    """A step in time. Everything here is modelled.

    Attributes:
      step: what it is made of.
      timeline: when what happens.
    """

    step: Step
    timeline: Timeline

    @property
    def step_ms(self) -> float:
        """Milliseconds until the last rank has ended."""
        return self.timeline.step_ps / MS

    @property
    def layer_ms(self) -> float:
        """Mean time of one layer and microbatch, forward and backward."""
        return (self.step_ms - self.step.outside_ms) / (self.step.layers * self.step.microbatches)

    def layer_shares(self, rank: int) -> dict[str, Share]:
        """What a rank's mean layer was spent on; picoseconds, exposed parts sum to the layer's time."""
        times = self.step.layers * self.step.microbatches
        shares = self.timeline.breakdown(rank)
        return {
            phase: Share(share.busy_ps // times, share.exposed_ps // times)
            for phase, share in shares.items()
            if phase not in ("dense", "optimizer")
        }

    def busiest_bytes(self) -> tuple[int, int]:
        """Bytes on the busiest NIC and on the busiest NVLink port, per layer and microbatch."""
        nic, nvlink = self.timeline.link_bytes().max(axis=1) // (self.step.layers * self.step.microbatches)
        return int(nic), int(nvlink)

    def busiest_link(self) -> tuple[str, int, float]:
        """The link that carries longest: its class, its rank, and the milliseconds per layer and microbatch."""
        busy = self.timeline.link_busy_ps()
        which, rank = divmod(int(busy.argmax()), busy.shape[1])
        return LINKS[which], rank, int(busy.max()) / MS / (self.step.layers * self.step.microbatches)


def simulate(design: Design, works: Sequence[Work], step: Step, *, overlap: bool = True) -> Simulation:
    """Runs a step.

    Args:
      design: how a layer spends its time.
      works: of the layers, in the order (microbatch, layer); if they are fewer, they begin again.
      step: what it is made of.
      overlap: whether communication has a stream of its own.
    """
    if not works:
        raise ValueError("works is empty: a step has at least one layer with work")
    program = Program(works[0].config.num_ranks)
    forward_ps = round(step.dense_ms * MS / (3 * step.layers))
    backward_ps = round(step.dense_ms * MS * 2 / (3 * step.layers))
    last = program.compute("begin", "dense", 0)
    forward, backward = _Pass(program, design.add_forward), _Pass(program, design.add_backward)
    for microbatch in range(step.microbatches):
        layers = [works[(microbatch * step.layers + layer) % len(works)] for layer in range(step.layers)]
        for work in layers:
            last = program.compute("dense forward", "dense", forward_ps, [last])
            last = forward.add(work, last)
        for work in reversed(layers):
            last = backward.add(work, last)
            last = program.compute("dense backward", "dense", backward_ps, [last])
    program.compute("optimizer", "optimizer", round(step.optimizer_ms * MS), [last])
    return Simulation(step, Timeline.of(program, design.links(works[0]), overlap=overlap))


class _Pass:
    """Adds one pass of layers. Where a work comes again its tasks do, which is much quicker than to make them."""

    def __init__(self, program: Program, make: Callable[[Program, Work, int], int]) -> None:
        self._program, self._make = program, make
        self._made: dict[int, tuple[range, int]] = {}  # by identity of the work

    def add(self, work: Work, after: int) -> int:
        if id(work) in self._made:
            tasks, result = self._made[id(work)]
            return result + self._program.repeat(tasks, after)
        first = len(self._program.tasks)
        result = self._make(self._program, work, after)
        self._made[id(work)] = range(first, len(self._program.tasks)), result
        return result
