"""The backward pass, as the paper's Figure 8, one collective at a time.

| collective               | under                                                            |
| ---                      | ---                                                              |
| grad 1 (of the output)   | nothing: the first rows                                          |
| again 1 (dispatch 1)     | down^T of chunk 1                                                |
| pull again               | gate and up of chunk 1, recomputed                               |
| grad 2                   | gate_up^T of chunk 1                                             |
| again 2 (dispatch 2)     | down^T of chunk 2                                                |
| home 1 (of the input)    | gate and up of chunk 2, recomputed; down's gradient of the slots |
| push of down             | down's gradient of the mains, strip by strip                     |
| home 2                   | gate_up's gradient of the slots                                  |
| push of gate_up          | gate_up's gradient of the mains, strip by strip                  |

Down's gradients come before the last product of rows, since its operands then make room for the result. What
`residuals` keep falls out of the table. The gradients of router weights go home once for both chunks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from topoep_jax._arrays import zeros_after
from topoep_jax._compat import vary_like
from topoep_jax.combine import sum_over_experts
from topoep_jax.dispatch import Window
from topoep_jax.experts import Instances, Matrix, WeightGrad
from topoep_jax.pipeline.forward import Kept
from topoep_jax.pipeline.layer import Inputs, Layer
from topoep_jax.pipeline.order import phase, stage
from topoep_jax.pipeline.replicas import Pulled, pull_slots, push_slots


class _Weights(NamedTuple):
    """f32 gradients of the matrices of some instances."""

    gate_up: jax.Array
    """[m, H, 2 I]."""
    down: jax.Array
    """[m, I, H]."""


class _Sums(NamedTuple):
    """What overflow passes have summed; the chunks go on from there."""

    tokens: jax.Array
    """[A, H] in send order."""
    weights: jax.Array
    """f32 [A] in send order."""
    slots: _Weights | None
    """None where there are no such passes, as in `mains`: the chunks start later, and with strips of matrices."""
    mains: _Weights | None


def run_backward(layer: Layer, inputs: Inputs, kept: Kept, grad: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of x [T, H], of weight f32 [T, K] and of params [Em, D], from that of the results [T, H]."""
    config = layer.config
    gate_up, down = layer.matrices
    params = inputs.params.astype(inputs.x.dtype)
    scale = kept.scale
    weights = inputs.weight.reshape(-1)[layer.order]

    def zeros(num_instances: int) -> _Weights | None:
        if config.overflow != "loop":
            return None
        sides = [(matrix.rows, matrix.cols) for matrix in (gate_up, down)]
        return _Weights(*(jnp.zeros((num_instances, *side), jnp.float32) for side in sides))

    sums = _Sums(
        tokens=jnp.zeros((weights.shape[0], config.hidden), inputs.x.dtype),
        weights=jnp.zeros_like(weights),
        slots=zeros(config.num_slots),
        mains=zeros(config.num_mains),
    )
    sums = vary_like(sums, inputs.x)

    def pull(mains: jax.Array) -> Pulled:
        with phase("repull"):
            return pull_slots(config, layer.axis_name, mains, inputs.slot_expert, grad)

    def again(name: str, x: jax.Array, win: Window, rows: jax.Array | None) -> jax.Array:
        return layer.dispatch(name, layer.by_assignment(x), win) if rows is None else rows

    def recompute(rows: jax.Array, held: Instances, win: Window, pre: jax.Array | None) -> jax.Array:
        return layer.gmm(rows, held, win, gate_up) if pre is None else pre

    # Chunk 1, and the rows of chunk 2.
    early: list[tuple[WeightGrad, WeightGrad]] = []
    scale_grads: list[jax.Array] = []
    if layer.first is None:
        pulled = pull(params)
        rows = again("again_2", inputs.x, layer.last, kept.rows[1])
        grads = layer.dispatch("grad_2", layer.by_assignment(grad), layer.last)
        inner_grad = layer.gmm(grads, Instances(params, pulled.slots), layer.last, down, transposed=True)
    else:
        split = layer.first.num_rows
        grads_1 = layer.dispatch("grad_1", layer.by_assignment(grad), layer.first)

        grads_1, x, params = stage("again_1", grads_1, inputs.x, params)
        rows_1 = again("again_1", x, layer.first, kept.rows[0])
        inner_grad = layer.gmm(grads_1, Instances(params, None), layer.first, down, transposed=True)

        rows_1, inner_grad, params = stage("repull", rows_1, inner_grad, params)
        pulled = pull(params)
        pre = recompute(rows_1, Instances(params, None), layer.first, kept.pre[0])

        pulled, pre, inner_grad, grad_2, params = stage("grad_2", pulled, pre, inner_grad, grad, params)
        grads = layer.dispatch("grad_2", layer.by_assignment(grad_2), layer.last)
        pre_grad, inner, scale_grad = layer.swiglu_backward(pre, scale[:split], inner_grad)
        row_grads = layer.gmm(pre_grad, Instances(params, None), layer.first, gate_up, transposed=True)
        early.append((WeightGrad(layer.first, rows_1, pre_grad), WeightGrad(layer.first, inner, grads_1)))
        scale_grads.append(scale_grad)
        scale = scale[split:]

        grads, row_grads, pulled, x, params = stage("again_2", grads, row_grads, pulled, inputs.x, params)
        rows = again("again_2", x, layer.last, kept.rows[1])
        inner_grad = layer.gmm(grads, Instances(params, pulled.slots), layer.last, down, transposed=True)

        rows, inner_grad, row_grads, params = stage("home_1", rows, inner_grad, row_grads, params)
        sums = sums._replace(tokens=layer.combine("home_1", row_grads, sums.tokens, layer.first))

    held = Instances(params, pulled.slots)

    def serve(win: Window, sums: _Sums) -> _Sums:
        rows = layer.dispatch("overflow", layer.by_assignment(inputs.x), win)
        scale = layer.dispatch("weights", weights, win)
        grads = layer.dispatch("overflow", layer.by_assignment(grad), win)
        inner_grad = layer.gmm(grads, held, win, down, transposed=True)
        pre_grad, inner, scale_grad = layer.swiglu_backward(layer.gmm(rows, held, win, gate_up), scale, inner_grad)
        row_grads = layer.gmm(pre_grad, held, win, gate_up, transposed=True)
        jobs = WeightGrad(win, rows, pre_grad), WeightGrad(win, inner, grads)

        def add(sums: _Weights | None, first_instance: int) -> _Weights | None:
            if sums is None:
                return None
            return _Weights(*(layer.wgrad(s, first_instance, [job]) for s, job in zip(sums, jobs, strict=True)))

        return _Sums(
            tokens=layer.combine("overflow", row_grads, sums.tokens, win),
            weights=layer.combine("weight_grads", scale_grad, sums.weights, win),
            slots=add(sums.slots, config.num_mains) if config.num_slots else sums.slots,
            mains=add(sums.mains, 0),
        )

    sums = layer.overflow_passes(serve, sums)

    # Chunk 2, and all weights.
    def of_slots(begin: jax.Array | None, matrix: Matrix, job: WeightGrad) -> jax.Array:
        if begin is None:
            begin = zeros_after(job.grads, (config.num_slots, matrix.rows, matrix.cols), jnp.float32)
        return layer.wgrad(begin, config.num_mains, [job]) if config.num_slots else begin

    def go_home(
        matrix: Matrix,
        slots: jax.Array,
        begin: jax.Array | None,
        jobs: list[WeightGrad],
        into: jax.Array,
        turn: jax.Array,
        carried: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        def own(first_row: jax.Array, num_rows: int) -> jax.Array:
            if begin is None:
                strip = zeros_after(first_row, (config.num_mains, num_rows, matrix.cols), jnp.float32)
                strip = vary_like(strip, params)
            else:
                strip = lax.dynamic_slice_in_dim(begin, first_row, num_rows, 1)
            return layer.wgrad(strip, 0, jobs, first_row)

        with phase("push"):
            return push_slots(config, layer.axis_name, matrix, slots, inputs.slot_expert, own, into, turn, carried)

    pre = recompute(rows, held, layer.last, kept.pre[1])
    pre_grad, inner, scale_grad = layer.swiglu_backward(pre, scale, inner_grad)
    scale_grads.append(scale_grad)
    slots_down = of_slots(sums.slots and sums.slots.down, down, WeightGrad(layer.last, inner, grads))

    tokens, slots_down, inner, grads = stage("push_down", sums.tokens, slots_down, inner, grads)
    jobs = [job for _, job in early] + [WeightGrad(layer.last, inner, grads)]
    mains = jnp.zeros_like(inputs.params)
    begin = sums.mains and sums.mains.down
    mains, turn, _ = go_home(down, slots_down, begin, jobs, mains, pulled.turn, pulled.turn)

    pre_grad, mains, params, tokens = stage("last", pre_grad, mains, params, tokens)
    row_grads = layer.gmm(pre_grad, Instances(params, pulled.slots), layer.last, gate_up, transposed=True)

    tokens, row_grads, pre_grad, rows = stage("home_2", tokens, row_grads, pre_grad, rows)
    tokens = layer.combine("home_2", row_grads, tokens, layer.last)
    slots_gate_up = of_slots(sums.slots and sums.slots.gate_up, gate_up, WeightGrad(layer.last, rows, pre_grad))

    tokens, slots_gate_up, scale_grad = stage("weight_grads", tokens, slots_gate_up, jnp.concatenate(scale_grads))
    weight_grads = layer.combine("weight_grads", scale_grad, sums.weights, layer.whole)
    x_grad = sum_over_experts(tokens, layer.place, inputs.x.shape[0])

    x_grad, weight_grads, slots_gate_up, turn = stage("push_gate_up", x_grad, weight_grads, slots_gate_up, turn)
    jobs = [job for job, _ in early] + [WeightGrad(layer.last, rows, pre_grad)]
    begin = sums.mains and sums.mains.gate_up
    mains, _, x_grad = go_home(gate_up, slots_gate_up, begin, jobs, mains, turn, x_grad)
    return x_grad, weight_grads[layer.place].reshape(inputs.weight.shape), mains
