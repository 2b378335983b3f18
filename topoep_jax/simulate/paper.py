"""The paper's layer as tasks: the phases of `calibration` one after the other, in which all ranks wait for each other.

Experts take each rank as long as its own rows do. Whatever overlaps on the paper's cluster is in its fitted rates, so
nothing overlaps here, and the step is the sum of the phases.
"""

import dataclasses

import numpy as np

from topoep_jax.shapes import Shape
from topoep_jax.simulate.calibration import Calibration, Phases, Traits, nodes_per_assignment, phases
from topoep_jax.simulate.program import Links, Program
from topoep_jax.simulate.work import Work

_MS = 1_000_000_000


@dataclasses.dataclass(frozen=True)
class PaperLayer:
    """The layer of the paper's cluster.

    Attributes:
      calibration: its constants.
      top_k: experts per token, from which follows how many tokens cross once.
    """

    calibration: Calibration
    top_k: int

    def links(self, work: Work) -> Links:
        """No exchange is simulated by its bytes: these rates price nothing."""
        return Links(work.config.topology, 0, 0)

    def add_forward(self, program: Program, work: Work, after: int) -> int:
        """Adds the forward pass of a layer after a task; returns the task that others may need."""
        times = self.phases(work).times(self.calibration.rho)
        if work.balanced:
            after = program.together("plan", "plan", round(times.plan * _MS), [after])
            after = program.together("pull", "pull", round(times.replicas * _MS), [after])
        after = program.together("dispatch", "dispatch", round(times.exchange * _MS), [after])
        after = program.compute("experts", "experts forward", self._experts(work, times.experts_forward), [after])
        return program.together("combine", "combine", round(times.exchange * _MS), [after])

    def add_backward(self, program: Program, work: Work, after: int) -> int:
        """The same of the backward pass."""
        times = self.phases(work).times(self.calibration.rho)
        after = program.together("grad", "dispatch", round(times.exchange * _MS), [after])
        after = program.compute("experts^T", "experts backward", self._experts(work, times.experts_backward), [after])
        after = program.together("home", "combine", round(times.exchange * _MS), [after])
        if work.balanced:
            after = program.together("push", "push", round(times.replicas * _MS), [after])
            after = program.together("gradients", "experts' size", round(times.size * _MS), [after])
        return after

    def phases(self, work: Work) -> Phases:
        """Times of one layer, without `rho`."""
        config = work.config
        shape = Shape(config.hidden, config.ffn, config.num_experts, self.top_k, config.topology)
        return phases(shape, self.traits(work), self.calibration, work.num_rows / config.num_ranks)

    def traits(self, work: Work) -> Traits:
        """What the sum knows of a plan. One without replicas pays for its planner alone."""
        topology, total = work.config.topology, max(work.num_rows, 1)
        rows, crosses = work.rows.sum(0), work.config.topology.crosses_domains()
        inter = int((rows * crosses).sum()) / total
        replicated = bool(work.replicas.any())
        return Traits(
            int(work.load.max()) * work.load.size / total,
            inter,
            int((rows * ~crosses).sum() - np.trace(rows)) / total,
            nodes_per_assignment(inter, topology.num_domains, self.top_k),
            work.balanced,
            work.config.num_slots if replicated else 0,
            replicated,
        )

    def _experts(self, work: Work, busiest_ms: float) -> np.ndarray:
        """int64 [R]: each rank's part of what the busiest takes."""
        return np.round(work.load / max(int(work.load.max()), 1) * busiest_ms * _MS).astype(np.int64)
