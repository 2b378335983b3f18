"""Consecutive layers of the model with their two passes: all of them in one program, or a stage of several."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from models import MODEL_TYPES
from topoep_jax import Forced
from topoep_jax.knobs import Knobs
from train.config import TrainConfig
from train.losses import balance_loss, cross_entropy
from train.mesh import AXIS, is_cpu, make_topology, num_slots
from train.optimizer import with_bias, without_bias
from train.state import Measured

CLASSES: dict[type, Any] = dict(MODEL_TYPES.values())


class Part:
    """Layers `first` <= l < `last` of the model, on the devices of `mesh`.

    The first part takes tokens int32 [B, S], the others hidden states [B, S, H]. The last part is compared with labels
    int32 [B, S]; the others return hidden states, and get the gradient of those.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, *, overflow: str, stage: tuple[int, int] | None = None) -> None:
        """Layers of `stage`, all where None. Raises ValueError where shapes do not fit each other or the mesh."""
        self.config, self.mesh, self.shapes = config, mesh, config.shapes()
        first, last = stage or (0, self.shapes.num_layers)
        self.is_first, self.is_last = first == 0, last == self.shapes.num_layers
        self._records = config.record_routing > 0
        options: dict[str, Any] = {field.name: getattr(config, field.name) for field in dataclasses.fields(Knobs)}
        options |= {
            "num_slots": num_slots(config),
            "overflow": overflow,
            "topology": make_topology(config, mesh),
            "forced": None if config.skew is None else Forced(config.skew, config.seed),
        }
        kwargs: dict[str, Any] = {} if stage is None else {"stage": stage}
        self._make: Callable[[], Any] = lambda: CLASSES[type(self.shapes)](
            self.shapes,
            mesh=mesh,
            axis=AXIS,
            data_axes=tuple(name for name in mesh.axis_names if name != AXIS),
            moe_options=options,
            remat=config.remat,
            dtype=jnp.dtype(config.dtype),
            param_dtype=param_dtype(config, mesh),
            rngs=nnx.Rngs(config.seed),
            **kwargs,
        )
        self._graph = nnx.split(nnx.eval_shape(self._make))[0]

    def init(self) -> Any:
        """Fresh parameters, a nested dict."""
        return nnx.to_pure_dict(nnx.state(self._make()))

    def forward(self, params: Any, x: jax.Array, step: jax.Array) -> jax.Array:
        """Hidden states [B, S, H] for the next part."""
        return nnx.merge(self._graph, params)(x, step=step).logits

    def backward(
        self, params: Any, x: jax.Array, target: jax.Array, step: jax.Array
    ) -> tuple[Any, jax.Array | None, Measured]:
        """Forward and backward pass of one microbatch.

        Args:
          params: of this part.
          x: tokens of the first part, hidden states of the others.
          target: labels of the last part, gradients of the hidden states of the others.
          step: int32 [], of the run.

        Returns:
          Gradients of `without_bias(params)` in the dtypes of the parameters; of `x`, None where it is tokens; what
          the microbatch measured.
        """

        def run(trained: Any, x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Any]:
            model = nnx.merge(self._graph, with_bias(trained, params))
            out = model(x, step=step, return_routing=self.config.balance_loss or self._records)
            y = cross_entropy(out.logits, target) if self.is_last else out.logits
            balance = balance_loss(self.shapes, out.routing) if self.config.balance_loss else jnp.zeros(())
            return (y, balance), (out.metrics, out.routing.expert_idx.astype(jnp.int16) if self._records else None)

        trained = without_bias(params)
        if self.is_first:
            (y, balance), pull, seen = jax.vjp(lambda trained: run(trained, x), trained, has_aux=True)
        else:
            (y, balance), pull, seen = jax.vjp(run, trained, x, has_aux=True)
        grads, *of_x = pull((jnp.ones_like(y) if self.is_last else target, jnp.ones_like(balance)))
        loss = y if self.is_last else jnp.zeros(())
        return grads, of_x[0] if of_x else None, Measured(loss, balance, *seen)


def param_dtype(config: TrainConfig, mesh: Mesh) -> Any:
    """The dtype of the parameters: what was asked for, else float32 on CPU and bfloat16 elsewhere."""
    return jnp.dtype(config.param_dtype or ("float32" if is_cpu(mesh) else "bfloat16"))


def overflow_of(config: TrainConfig, mesh: Mesh) -> str:
    """What happens to rows beyond the receive buffer: what was asked for, else loop on CPU and flag elsewhere."""
    return config.overflow or ("loop" if is_cpu(mesh) else "flag")
