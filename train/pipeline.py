"""A step of several stages: one forward, one backward in turn, and activations moved from mesh to mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from topoep_jax import MoEMetrics
from train.config import TrainConfig
from train.mesh import arrange
from train.stages import Stage, submeshes
from train.state import Measured, StepMetrics, TrainState

States = tuple[TrainState, ...]


class Pipeline:
    """The functions of a run whose layers are spread over stages, as `train.step.Program` has them for one program.

    All stages belong to this process, which moves activations by `jax.device_put`. Numbers are those of the one-program
    step with the same microbatches, to rounding.
    """

    def __init__(self, config: TrainConfig, devices: np.ndarray, num_stages: int, *, overflow: str = "loop") -> None:
        """Stages of dp x ep devices each. Raises ValueError where shapes or devices do not fit."""
        self.microbatches = config.microbatches
        self.stages = [
            Stage(config, arrange(own, config), index, num_stages, overflow=overflow)
            for index, own in enumerate(submeshes(devices, num_stages))
        ]

    def init(self) -> States:
        """The state of each stage before the first step."""
        return tuple(stage.init() for stage in self.stages)

    def place(self, batch: np.ndarray) -> tuple[list[jax.Array], list[jax.Array]]:
        """Tokens for the first stage and labels for the last, of each microbatch, from int32 [batch_size, S + 1]."""
        parts = np.split(batch, self.microbatches)
        first, last = self.stages[0].hidden, self.stages[-1].hidden
        return [jax.device_put(p[:, :-1], first) for p in parts], [jax.device_put(p[:, 1:], last) for p in parts]

    def step(self, states: States, batch: tuple[list[jax.Array], list[jax.Array]]) -> tuple[States, StepMetrics]:
        """One optimizer step; the states passed in are donated. What is said of `Program.step` holds of all stages."""
        totals, measured = self._passes(states, batch)
        closed = [
            stage.close(total, tuple(own)) for stage, total, own in zip(self.stages, totals, measured, strict=True)
        ]
        new, norms = [], []
        for stage, state, total, (_, _, figures) in zip(self.stages, states, totals, closed, strict=True):
            everywhere = stage.shardings.step
            squares, well = (tuple(jax.device_put(c[i], everywhere) for c in closed) for i in (0, 1))
            state, norm = stage.update(state, total, squares, well, figures.moe.expert_load)
            new.append(state)
            norms.append(norm)
        return tuple(new), self._metrics([figures for _, _, figures in closed], norms[-1])

    def _passes(
        self, states: States, batch: tuple[list[jax.Array], list[jax.Array]]
    ) -> tuple[list[Any], list[list[Measured]]]:
        """The summed gradients of each stage, and what it measured of each microbatch."""
        last = len(self.stages) - 1
        inputs: list[dict[int, jax.Array]] = [{} for _ in self.stages]
        targets: list[dict[int, jax.Array]] = [{} for _ in self.stages]
        inputs[0], targets[last] = (dict(enumerate(arrays)) for arrays in batch)
        totals: list[Any] = [stage.zeros() for stage in self.stages]
        measured: list[list[Measured]] = [[] for _ in self.stages]
        for index, is_forward, number in schedule(len(self.stages), self.microbatches):
            stage, state = self.stages[index], states[index]
            if is_forward:
                y = stage.forward(state.params, inputs[index][number], state.step)
                inputs[index + 1][number] = jax.device_put(y, self.stages[index + 1].hidden)
                continue
            x, target = inputs[index].pop(number), targets[index].pop(number)
            totals[index], of_x, figures = stage.backward(state.params, totals[index], x, target, state.step)
            measured[index].append(figures)
            if index:
                targets[index - 1][number] = jax.device_put(of_x, self.stages[index - 1].hidden)
        return totals, measured

    def _metrics(self, figures: list[Measured], norm: jax.Array) -> StepMetrics:
        """The metrics of the whole model, on the devices of the last stage."""
        here = [jax.device_put(own, self.stages[-1].shardings.step) for own in figures]
        moe: MoEMetrics = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *(own.moe for own in here))
        balance = sum((own.balance for own in here), jnp.zeros(()))
        return StepMetrics(here[-1].loss, balance, norm, moe)


def schedule(num_stages: int, microbatches: int) -> list[tuple[int, bool, int]]:
    """What runs, as (stage, whether forward, microbatch), in an order in which everything comes after what it needs.

    Each stage runs as many forward passes ahead as stages follow it, and then one backward pass after each forward
    pass, so that it keeps the inputs of no more microbatches than there are stages from it on. The last stage has
    backward passes alone: they hold the forward ones.
    """
    last = num_stages - 1
    waiting: list[list[tuple[bool, int]]] = []
    for stage in range(num_stages):
        ahead = min(last - stage, microbatches)
        row = [(True, number) for number in range(ahead)]
        for number in range(microbatches):
            row += [(True, number + ahead)] if number + ahead < microbatches else []
            row.append((False, number))
        waiting.append([turn for turn in row if stage < last or not turn[0]])
    order: list[tuple[int, bool, int]] = []
    done: set[tuple[int, bool, int]] = set()
    while any(waiting):
        for stage, row in enumerate(waiting):
            if not row:
                continue
            is_forward, number = row[0]
            # Forward passes need the stage before, and so does the last stage; backward passes the one behind.
            from_before = is_forward or stage == last
            needed = (stage - 1, True, number) if from_before else (stage + 1, False, number)
            if needed in done or (from_before and stage == 0):
                order.append((stage, *row.pop(0)))
                done.add(order[-1])
    return order
