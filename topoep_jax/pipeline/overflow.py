"""Gradients of the rows beyond the receive buffer: extra passes, one buffer after the other, without overlap."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from topoep_jax._compat import vary_like
from topoep_jax.dispatch import Window
from topoep_jax.experts import Instances, WeightGrad
from topoep_jax.pipeline.layer import Home, Inputs, Layer


class Weights(NamedTuple):
    """f32 gradients of the matrices of some instances."""

    gate_up: jax.Array
    """[m, H, 2 I]."""
    down: jax.Array
    """[m, I, H]."""


class Sums(NamedTuple):
    """What the passes have summed; the chunks go on from there."""

    tokens: Home
    """Where there are no passes, nothing yet."""
    weights: jax.Array
    """f32 [A] in send order."""
    slots: Weights | None
    """None where there are no passes, as in `mains`: the chunks start later, and with strips of matrices."""
    mains: Weights | None


def no_gradients(layer: Layer, after: jax.Array) -> Sums:
    """Zeros of all that passes add to, once `after` is there; rows are of its dtype."""
    config = layer.config

    def zeros(num_instances: int) -> Weights | None:
        if config.overflow != "loop":
            return None
        sides = [(matrix.rows, matrix.cols) for matrix in layer.matrices]
        return Weights(*(jnp.zeros((num_instances, *side), jnp.float32) for side in sides))

    num_assignments = layer.order.shape[0]
    sums = Sums(
        tokens=layer.full_home(after) if config.overflow == "loop" else Home(),
        weights=jnp.zeros((num_assignments,), jnp.float32),
        slots=zeros(config.num_slots),
        mains=zeros(config.num_mains),
    )
    return vary_like(sums, after)


def add_overflow(layer: Layer, inputs: Inputs, grad: jax.Array, held: Instances, sums: Sums) -> Sums:
    """Adds the gradients of all passes: none where the plan fits, or where the layer has no such passes.

    Args:
      layer: with its plan.
      inputs: of the layer.
      grad: [T, H] gradient of the results.
      held: parameters of all instances.
      sums: so far.
    """
    gate_up, down = layer.matrices
    weights = inputs.weight.reshape(-1)[layer.order]

    def serve(win: Window, sums: Sums) -> Sums:
        rows = layer.forward("overflow", layer.send("overflow", layer.by_assignment(inputs.x), win), win)
        scale = layer.dispatch("overflow", weights, win)
        grads = layer.forward("overflow", layer.send("overflow", layer.by_assignment(grad), win), win)
        inner_grad = layer.gmm(grads, held, win, down, transposed=True)
        pre_grad, inner, scale_grad = layer.swiglu_backward(layer.gmm(rows, held, win, gate_up), scale, inner_grad)
        row_grads = layer.gmm(pre_grad, held, win, gate_up, transposed=True)
        jobs = WeightGrad(win, rows, pre_grad), WeightGrad(win, inner, grads)

        def add(sums: Weights | None, first_instance: int) -> Weights | None:
            if sums is None:
                return None
            return Weights(*(layer.wgrad(s, first_instance, [job]) for s, job in zip(sums, jobs, strict=True)))

        tokens = layer.gather("overflow_home", row_grads, sums.tokens, win)
        return Sums(
            tokens=layer.bring("overflow_home", row_grads, tokens, win),
            weights=layer.combine("overflow_home", scale_grad, sums.weights, win),
            slots=add(sums.slots, layer.config.num_mains) if layer.config.num_slots else sums.slots,
            mains=add(sums.mains, 0),
        )

    return layer.overflow_passes(serve, sums)
