"""Pipeline stages: consecutive layers on devices of their own, and the programs that a stage runs.

A stage has three programs. `forward` keeps nothing but its input. `backward` makes the pass again from that input and
adds the gradients of its layers to those of the microbatches before; the last stage has no other pass, and starts it
with the loss. `update` is the optimizer's, once the gradient of all stages has its norm.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train.config import TrainConfig
from train.mesh import over_ranks
from train.optimizer import make_optimizer, wide, without_bias
from train.part import Part, param_dtype
from train.state import Measured, TrainState, is_planned, merge
from train.step import compiler_options, shardings_of


def bounds(num_layers: int, num_stages: int) -> list[tuple[int, int]]:
    """The layers first <= l < last of each stage: equal numbers, where some have one more the first ones.

    Raises:
      ValueError: fewer layers than stages.
    """
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"{num_layers} layers do not make {num_stages} pipeline stages: each needs one")
    ends = [-(-num_layers * stage // num_stages) for stage in range(num_stages + 1)]
    return list(itertools.pairwise(ends))


class Stage:
    """One stage of `num_stages`.

    Attributes:
      mesh: its devices.
      part: its layers.
      abstract: shapes of its state, a `TrainState` of its own parameters.
      shardings: where they lie.
      hidden: where the hidden states of its inputs lie.
      init: () -> state, the same parameters that the whole model starts with.
      zeros: () -> gradients, before the first microbatch.
      forward: (params, x, step) -> hidden states.
      backward: (params, grads, x, target, step) -> (grads, gradient of x or None, Measured); grads are donated.
      close: (grads, tuple of Measured) -> (sum of the gradient's squares, whether all is well, Measured).
      update: (state, grads, squares and verdicts of all stages, load) -> (state, norm); the state is donated.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, index: int, num_stages: int, *, overflow: str) -> None:
        """Stage `index`. Raises ValueError where shapes or devices do not fit."""
        if config.transport != "xla":
            raise ValueError(f"--transport={config.transport}: pipeline stages have collectives alone, take xla")
        if config.record_routing:
            raise ValueError(f"--record_routing={config.record_routing}: pipeline stages do not tell what they routed")
        shapes = config.shapes()
        self.mesh, self.index, self.num_stages = mesh, index, num_stages
        self.part = part = Part(config, mesh, overflow=overflow, stage=bounds(shapes.num_layers, num_stages)[index])
        optimizer = make_optimizer(config, has_masters=param_dtype(config, mesh) != jnp.float32)
        count = config.microbatches
        self._sequences = (config.batch_size // count, config.seq_len)
        self._hidden_dtype, self._hidden = jnp.dtype(config.dtype), shapes.hidden

        def init() -> TrainState:
            return optimizer.start(part.init())

        self.abstract = jax.eval_shape(init)
        self.shardings = places = shardings_of(self.abstract, config, mesh, optimizer)
        self.hidden = over_ranks(mesh)
        everywhere = NamedSharding(mesh, PartitionSpec())
        of_grads = without_bias(places.params)

        def zeros() -> Any:
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), without_bias(self.abstract.params))

        def backward(
            params: Any, total: Any, x: jax.Array, target: jax.Array, step: jax.Array
        ) -> tuple[Any, jax.Array | None, Measured]:
            grads, of_x, measured = part.backward(params, x, target, step)
            return jax.tree.map(jnp.add, total, wide(grads)), of_x, measured

        def close(total: Any, measured: tuple[Measured, ...]) -> tuple[jax.Array, jax.Array, Measured]:
            figures = merge(jax.tree.map(lambda *leaves: jnp.stack(leaves), *measured))
            well = jnp.isfinite(figures.loss) & is_planned(figures.moe)
            if overflow == "flag":
                well &= ~jnp.any(figures.moe.passes > 1)
            squares = sum((jnp.square(leaf / count).sum() for leaf in jax.tree.leaves(total)), jnp.zeros(()))
            return squares, well, figures

        def update(
            state: TrainState, total: Any, squares: tuple[jax.Array, ...], well: tuple[jax.Array, ...], load: jax.Array
        ) -> tuple[TrainState, jax.Array]:
            norm = jnp.sqrt(sum(squares, jnp.zeros(())))
            valid = jnp.stack(well).all() & jnp.isfinite(norm)
            grads = jax.tree.map(lambda leaf: leaf / count, total)
            return optimizer.advance(state, grads, norm, load, valid), norm

        options: dict[str, Any] = {"compiler_options": compiler_options(config, mesh)}
        of_x = None if part.is_first else self.hidden
        self.init = jax.jit(init, out_shardings=places)
        self.zeros = jax.jit(zeros, out_shardings=of_grads)
        self.forward = jax.jit(part.forward, out_shardings=self.hidden, **options)
        self.backward = jax.jit(backward, out_shardings=(of_grads, of_x, everywhere), donate_argnums=1, **options)
        self.close = jax.jit(close, out_shardings=everywhere, **options)
        self.update = jax.jit(update, out_shardings=(places, everywhere), donate_argnums=0, **options)

    @property
    def in_flight(self) -> int:
        """Microbatches, at most, whose input this stage keeps for their backward pass."""
        return self.num_stages - self.index

    def arguments(self) -> dict[str, tuple[Any, ...]]:
        """The arguments of each program, as shapes with shardings."""
        state = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            self.abstract,
            self.shardings,
        )
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        tokens = jax.ShapeDtypeStruct(self._sequences, jnp.int32, sharding=self.hidden)
        hidden = jax.ShapeDtypeStruct((*self._sequences, self._hidden), self._hidden_dtype, sharding=self.hidden)
        x, target = tokens if self.part.is_first else hidden, tokens if self.part.is_last else hidden
        grads = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=place),
            without_bias(self.abstract.params),
            without_bias(self.shardings.params),
        )
        scalars = {
            kind: tuple(jax.ShapeDtypeStruct((), kind, sharding=everywhere) for _ in range(self.num_stages))
            for kind in (jnp.float32, jnp.bool_)
        }
        shape = jax.eval_shape(self.backward, state.params, grads, x, target, state.step)[2].moe.expert_load
        load = jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=everywhere)
        found: dict[str, tuple[Any, ...]] = {
            "backward": (state.params, grads, x, target, state.step),
            "update": (state, grads, scalars[jnp.float32], scalars[jnp.bool_], load),
        }
        return found if self.part.is_last else {"forward": (state.params, x, state.step), **found}


def submeshes(devices: np.ndarray, num_stages: int) -> list[np.ndarray]:
    """Equal runs of neighbouring devices, one for each stage. Raises ValueError where they do not divide."""
    if devices.size % num_stages:
        raise ValueError(f"{devices.size} devices do not divide among {num_stages} pipeline stages")
    return np.split(devices.reshape(-1), num_stages)
