"""The backward pass, as the paper's Figure 8: gradients of rows first, since other ranks wait for them, then weights.

| collective               | under                                                        |
| ---                      | ---                                                          |
| grad 1 (of the output)   | nothing: the first rows                                      |
| again 1 (dispatch 1)     | down^T of chunk 1                                            |
| pull again               | gate and up of chunk 1, recomputed                           |
| again 2 (dispatch 2)     | gate_up^T of chunk 1                                         |
| grad 2                   | weight gradients of chunk 1                                  |
| home 1 (of the input)    | all of chunk 2                                               |
| home 2                   | weight gradients of the slots in chunk 2                     |
| push, slice by slice     | weight gradients of the mains in chunk 2, share by share     |

What `residuals` keep falls out of the table. The gradients of router weights go home once for both chunks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from topoep_jax._compat import vary_like
from topoep_jax.combine import sum_over_experts
from topoep_jax.dispatch import Window
from topoep_jax.experts import Instances, WeightGrad
from topoep_jax.pipeline.forward import Kept
from topoep_jax.pipeline.layer import Inputs, Layer
from topoep_jax.pipeline.order import phase, stage
from topoep_jax.pipeline.replicas import Pulled, pull_slots, push_slots


class _Products(NamedTuple):
    """What the weight gradients of one window are products of."""

    rows: jax.Array
    """[n, H] received rows."""
    pre_grad: jax.Array
    """[n, 2 I] gradients towards gate and up."""
    inner: jax.Array
    """[n, I] activations."""
    grads: jax.Array
    """[n, H] received gradients of the output."""


class _Sums(NamedTuple):
    """Gradients so far."""

    tokens: jax.Array
    """[A, H] in send order."""
    weights: jax.Array
    """f32 [A] in send order."""
    mains: jax.Array
    """f32 [Em, D]."""
    slots: jax.Array
    """f32 [N, D]."""


def run_backward(layer: Layer, inputs: Inputs, kept: Kept, grad: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of x [T, H], of weight f32 [T, K] and of params [Em, D], from that of the results [T, H]."""
    config = layer.config
    gate_up, down = layer.matrices
    tokens, token_grads = layer.by_assignment(inputs.x), layer.by_assignment(grad)
    params = inputs.params.astype(inputs.x.dtype)
    scale = kept.scale
    home = jnp.zeros_like(tokens)
    mains = jnp.zeros_like(inputs.params, jnp.float32)
    scale_grads = []

    def pull(mains: jax.Array) -> Pulled:
        with phase("repull"):
            return pull_slots(config, layer.axis_name, mains, inputs.slot_expert, grad)

    def again(name: str, tokens: jax.Array, win: Window, rows: jax.Array | None) -> jax.Array:
        return layer.dispatch(name, tokens, win) if rows is None else rows

    def recompute(rows: jax.Array, held: Instances, win: Window, pre: jax.Array | None) -> jax.Array:
        return layer.gmm(rows, held, win, gate_up) if pre is None else pre

    if layer.first is None:
        pulled = pull(params)
        rows_2 = again("again_2", tokens, layer.last, kept.rows[1])
        grads_2 = layer.dispatch("grad_2", token_grads, layer.last)
    else:
        split = layer.first.num_rows
        grads_1 = layer.dispatch("grad_1", token_grads, layer.first)

        grads, sent, params = stage("again_1", grads_1, tokens, params)
        rows_1 = again("again_1", sent, layer.first, kept.rows[0])
        inner_grad = layer.gmm(grads, Instances(params, None), layer.first, down, transposed=True)

        rows, inner_grad, params = stage("repull", rows_1, inner_grad, params)
        pulled = pull(params)
        pre = recompute(rows, Instances(params, None), layer.first, kept.pre[0])

        pulled, pre, inner_grad, sent, params = stage("again_2", pulled, pre, inner_grad, tokens, params)
        rows_2 = again("again_2", sent, layer.last, kept.rows[1])
        pre_grad, inner, scale_grad = layer.swiglu_backward(pre, scale[:split], inner_grad)
        row_grads = layer.gmm(pre_grad, Instances(params, None), layer.first, gate_up, transposed=True)
        products = _Products(rows, pre_grad, inner, grads)

        rows_2, row_grads, products, sent = stage("grad_2", rows_2, row_grads, products, token_grads)
        grads_2 = layer.dispatch("grad_2", sent, layer.last)
        mains = layer.wgrad(mains, 0, _jobs(layer, layer.first, products))

        rows_2, grads_2, mains, row_grads, pulled, params = stage(
            "home_1", rows_2, grads_2, mains, row_grads, pulled, params
        )
        home = layer.combine("home_1", row_grads, home, layer.first)
        scale_grads.append(scale_grad)
        scale = scale[split:]

    held = Instances(params, pulled.slots)

    def differentiate(
        win: Window, rows: jax.Array, pre: jax.Array | None, scale: jax.Array, grads: jax.Array
    ) -> tuple[jax.Array, jax.Array, _Products]:
        """Gradients of the rows [n, H] and of the weights [n] of a window, and what is left to do."""
        pre = recompute(rows, held, win, pre)
        inner_grad = layer.gmm(grads, held, win, down, transposed=True)
        pre_grad, inner, scale_grad = layer.swiglu_backward(pre, scale, inner_grad)
        row_grads = layer.gmm(pre_grad, held, win, gate_up, transposed=True)
        return row_grads, scale_grad, _Products(rows, pre_grad, inner, grads)

    row_grads, scale_grad, products = differentiate(layer.last, rows_2, kept.pre[1], scale, grads_2)
    scale_grads.append(scale_grad)

    home, row_grads, products = stage("home_2", home, row_grads, products)
    home = layer.combine("home_2", row_grads, home, layer.last)
    slots = vary_like(jnp.zeros((config.num_slots, mains.shape[1]), jnp.float32), mains)
    if config.num_slots:
        slots = layer.wgrad(slots, config.num_mains, _jobs(layer, layer.last, products))

    home, slots, scale_grad = stage("weight_grads", home, slots, jnp.concatenate(scale_grads))
    none = jnp.zeros_like(inputs.weight.reshape(-1))
    weight_grads = layer.combine("weight_grads", scale_grad, none, layer.whole)

    def serve(win: Window, sums: _Sums) -> _Sums:
        rows = layer.dispatch("overflow", tokens, win)
        scale = layer.dispatch("weights", inputs.weight.reshape(-1)[layer.order], win)
        grads = layer.dispatch("overflow", token_grads, win)
        row_grads, scale_grad, products = differentiate(win, rows, None, scale, grads)
        jobs = _jobs(layer, win, products)
        return _Sums(
            tokens=layer.combine("overflow", row_grads, sums.tokens, win),
            weights=layer.combine("weight_grads", scale_grad, sums.weights, win),
            mains=layer.wgrad(sums.mains, 0, jobs),
            slots=layer.wgrad(sums.slots, config.num_mains, jobs) if config.num_slots else sums.slots,
        )

    sums = layer.overflow_passes(serve, _Sums(home, weight_grads, mains, slots))
    x_grad = sum_over_experts(sums.tokens, layer.place, inputs.x.shape[0])
    weight_grad = sums.weights[layer.place].reshape(inputs.weight.shape)

    x_grad, weight_grad, slots = stage("push", x_grad, weight_grad, sums.slots)

    def beside(index: jax.Array, count: int, mains: jax.Array) -> jax.Array:
        return layer.wgrad(mains, 0, _jobs(layer, layer.last, products), (index, count))

    with phase("push"):
        mains, x_grad = push_slots(
            config, layer.axis_name, slots, sums.mains, inputs.slot_expert, pulled.turn, x_grad, beside
        )
    return x_grad, weight_grad, mains.astype(inputs.params.dtype)


def _jobs(layer: Layer, win: Window, products: _Products) -> tuple[WeightGrad, WeightGrad]:
    gate_up, down = layer.matrices
    return (
        WeightGrad(gate_up, win, products.rows, products.pre_grad),
        WeightGrad(down, win, products.inner, products.grads),
    )
