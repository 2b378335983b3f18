"""The compiled part of training: one step from state to state, in one program."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import state_shardings
from topoep_jax import transport
from train.config import TrainConfig
from train.mesh import AXIS, connect, is_cpu, make_mesh, over_ranks
from train.optimizer import Optimizer, make_optimizer, wide, without_bias
from train.part import Part, overflow_of, param_dtype
from train.state import Measured, StepMetrics, TrainState, is_sound, merge, overflowed

_FIRST_CHECKS = 2


@dataclasses.dataclass(frozen=True)
class Program:
    """The functions of a run, built by `build`."""

    mesh: Mesh
    shardings: Any
    """A NamedSharding for each array of the state, as a `TrainState`."""
    abstract: TrainState
    """Shapes and dtypes of the state."""
    init: Callable[[], TrainState]
    """The state before the first step."""
    start: Callable[[Any], TrainState]
    """The same with given parameters in f32, placed like `shardings.params`, which are donated: they become the
    masters, where there are any, and what is rounded of them the parameters."""
    step: jax.stages.Wrapped
    """One optimizer step, jitted: (state, batch) -> (state, `StepMetrics`); the state passed in is donated.
    A step with a non-finite loss or gradient, or with demand the planner refuses, returns it unchanged: `is_sound`.
    With overflow="flag" so does a step that did not fit its receive buffers: `overflowed`."""
    exact_step: jax.stages.Wrapped | None
    """The step with overflow="loop", for batches with which `step` overflowed; None where `step` is that already."""
    checked_step: jax.stages.Wrapped | None
    """`step` with exchanges that are checked: what they find is in `transport.exchange_faults()`. None if no step is to
    be checked, or if all are."""
    microbatches: int

    def place(self, batch: np.ndarray) -> jax.Array:
        """Shards int32 [batch_size, seq_len + 1], equal on every process, over the ranks, microbatch by microbatch.

        Returns:
          int32 [microbatches, batch_size / microbatches, seq_len + 1].
        """
        parts = batch.reshape(self.microbatches, -1, batch.shape[1])
        return jax.make_array_from_callback(parts.shape, over_ranks(self.mesh, lead=1), lambda index: parts[index])


def build(config: TrainConfig, mesh: Mesh | None = None) -> Program:
    """Makes the functions of a run; nothing is compiled or allocated yet.

    Args:
      config: the run.
      mesh: devices to compile ahead of time for, none of which has to be there; None for those of this machine.

    Raises:
      ValueError: too few devices, or shapes that fit neither each other nor the mesh.
    """
    compile_only = mesh is not None
    mesh = mesh or make_mesh(config)
    connect(config, mesh, compile_only=compile_only)
    optimizer = make_optimizer(config, has_masters=param_dtype(config, mesh) != jnp.float32)
    overflow = overflow_of(config, mesh)
    part = Part(config, mesh, overflow=overflow)

    def init() -> TrainState:
        return optimizer.start(part.init())

    abstract = jax.eval_shape(init)
    shardings = shardings_of(abstract, config, mesh, optimizer)
    everywhere = NamedSharding(mesh, PartitionSpec())

    def make_step(part: Part, overflow: str) -> jax.stages.Wrapped:
        def step(state: TrainState, batch: jax.Array) -> tuple[TrainState, StepMetrics]:
            grads, measured = accumulate(part, state, batch, without_bias(shardings.params))
            metrics = StepMetrics(
                measured.loss, measured.balance, optax.tree.norm(grads), measured.moe, measured.expert_idx
            )
            valid = is_sound(metrics)
            if overflow == "flag":
                valid &= ~overflowed(metrics)
            return optimizer.advance(state, grads, metrics.grad_norm, metrics.moe.expert_load, valid), metrics

        out = shardings, everywhere
        return jax.jit(step, out_shardings=out, donate_argnums=0, compiler_options=compiler_options(config, mesh))

    checked_step = None
    if is_checked(config, mesh):
        checked = Part(dataclasses.replace(config, check_exchange=True), mesh, overflow=overflow)
        checked_step = make_step(checked, overflow)
    return Program(
        mesh=mesh,
        shardings=shardings,
        abstract=abstract,
        init=jax.jit(init, out_shardings=shardings),
        start=jax.jit(
            lambda weights: optimizer.start(weights, abstract.params), out_shardings=shardings, donate_argnums=0
        ),
        step=make_step(part, overflow),
        exact_step=make_step(Part(config, mesh, overflow="loop"), "loop") if overflow == "flag" else None,
        checked_step=checked_step,
        microbatches=config.microbatches,
    )


def first_checks(config: TrainConfig, mesh: Mesh) -> int:
    """Steps from the start of a process on whose exchanges are checked."""
    if config.check_steps is not None:
        return config.check_steps
    return 0 if is_cpu(mesh) else _FIRST_CHECKS


def is_checked(config: TrainConfig, mesh: Mesh) -> bool:
    """Whether some steps, but not all, are checked."""
    return not config.check_exchange and (first_checks(config, mesh) > 0 or config.check_every > 0)


def accumulate(part: Part, state: TrainState, batch: jax.Array, places: Any) -> tuple[Any, Measured]:
    """Gradients of a batch, one microbatch after the other.

    Args:
      part: the whole model.
      state: before the step.
      batch: int32 [microbatches, B, S + 1].
      places: where gradients live, as those of the parameters.

    Returns:
      The mean of the gradients in f32, and the figures of the whole batch.
    """

    def one(tokens: jax.Array) -> tuple[Any, Measured]:
        grads, _, measured = part.backward(state.params, tokens[:, :-1], tokens[:, 1:], state.step)
        return jax.lax.with_sharding_constraint(wide(grads), places), measured

    if batch.shape[0] == 1:
        grads, measured = one(batch[0])
        return grads, measured._replace(expert_idx=jax.tree.map(lambda leaf: leaf[None], measured.expert_idx))

    def add(total: Any, tokens: jax.Array) -> tuple[Any, Measured]:
        grads, measured = one(tokens)
        return jax.tree.map(jnp.add, total, grads), measured

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), without_bias(state.params))
    total, measured = jax.lax.scan(add, jax.lax.with_sharding_constraint(zeros, places), batch)
    return jax.tree.map(lambda leaf: leaf / batch.shape[0], total), merge(measured)


def compiler_options(config: TrainConfig, mesh: Mesh) -> dict[str, Any] | None:
    """The options of XLA for the programs of a run."""
    if is_cpu(mesh) or not config.xla_options:
        return None
    return dict(transport.xla_options(safe=config.safe_exchange).compiler_options)


def shardings_of(abstract: TrainState, config: TrainConfig, mesh: Mesh, optimizer: Optimizer) -> Any:
    """Masters and moments live where their parameters live, counters everywhere."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    fsdp = mesh.axis_names if config.fsdp else ()
    params = state_shardings(abstract.params, mesh, axis=AXIS, fsdp=fsdp)
    places: Any = (everywhere, params, optimizer.like_params(abstract.opt_state, params, everywhere))
    return TrainState(*places)
