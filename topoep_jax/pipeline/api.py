"""The planned expert computation of one rank, differentiable: one custom_vjp over both passes."""

from functools import partial
from typing import Any

import jax
from jax import lax

from topoep_jax import transport
from topoep_jax.config import LayerConfig
from topoep_jax.pipeline.backward import run_backward
from topoep_jax.pipeline.forward import Kept, run_forward
from topoep_jax.pipeline.layer import Inputs, Layer


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def planned_experts(config: LayerConfig, axis_name: str, inputs: Inputs) -> jax.Array:
    """Runs every assignment on the instance that the plan names and sums each token's results.

    Inside shard_map or pmap over `axis_name`. Gradients flow to x, weight and params; replica gradients are added to
    their main experts.

    Args:
      config: the layer.
      axis_name: the expert-parallel axis.
      inputs: tokens, parameters, routing and plan.

    Returns:
      [T, H] in the dtype of `x`; zeros for padding tokens.
    """
    return _forward(config, axis_name, inputs)[0]


def _forward(config: LayerConfig, axis_name: str, inputs: Inputs) -> tuple[jax.Array, tuple[Layer, Inputs, Kept]]:
    layer = Layer.build(config, axis_name, inputs)
    with transport.checking(inputs.layer):
        y, kept = run_forward(layer, inputs)
    return y, (layer, inputs, kept)


def _backward(config: LayerConfig, axis_name: str, saved: tuple[Layer, Inputs, Kept], grad: jax.Array) -> tuple[Any]:
    # Without the barrier XLA merges what is computed again with the forward pass, and keeps all of its buffers alive.
    (layer, inputs, kept), grad = lax.optimization_barrier((saved, grad))
    of_integers: Any = (None,) * 6
    return (Inputs(*_gradients(layer, inputs, kept, grad), *of_integers),)


@jax.custom_jvp
def _gradients(layer: Layer, inputs: Inputs, kept: Kept, grad: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    with transport.checking(inputs.layer):
        return run_backward(layer, inputs, kept, grad)


@_gradients.defjvp
def _no_second_derivative(*_: Any) -> Any:
    # Kernels write in place, and rows travel as they are: differentiated again, they would be wrong without a sign.
    raise NotImplementedError(
        "the MoE layer has first derivatives only: keep it out of what is differentiated twice, as Hessian-vector"
        " products and gradient penalties are"
    )


planned_experts.defvjp(_forward, _backward)
