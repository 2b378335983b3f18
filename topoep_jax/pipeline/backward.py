"""The backward pass, as the paper's Figure 8, one collective at a time.

| collective               | under                                                            |
| ---                      | ---                                                              |
| grad 1 (of the output)   | nothing: the first rows                                          |
| again 1 (dispatch 1)     | down^T of chunk 1                                                |
| pull again               | gate and up of chunk 1, recomputed                               |
| grad 2                   | gate_up^T of chunk 1                                             |
| again 2 (dispatch 2)     | down^T of chunk 2                                                |
| push of down             | down's gradient of the mains, strip by strip                     |
| home 1 (of the input)    | gate_up^T of chunk 2                                             |
| home 2                   | gate_up's gradient of the slots                                  |
| push of gate_up          | gate_up's gradient of the mains, strip by strip                  |

Where gateways forward, they do after grad 2 and again 2, under nothing: products go where more bytes are.
Down's gradients come before the last product of rows, since its operands then make room for the result. What
`residuals` keep falls out of the table. The gradients of router weights go home once for both chunks.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from topoep_jax._arrays import zeros_after
from topoep_jax._compat import vary_like
from topoep_jax.dispatch import Window
from topoep_jax.experts import Instances, Matrix, WeightGrad
from topoep_jax.pipeline.forward import Kept
from topoep_jax.pipeline.layer import Inputs, Layer
from topoep_jax.pipeline.order import phase, stage
from topoep_jax.pipeline.overflow import Sums, add_overflow, no_gradients
from topoep_jax.pipeline.replicas import Pulled, pull_slots, push_slots


@dataclasses.dataclass(frozen=True)
class _Pass:
    """The backward pass of one layer on one rank: what it starts from, and what both chunks do."""

    layer: Layer
    inputs: Inputs
    kept: Kept
    grad: jax.Array
    """[T, H] of the results."""

    def pull(self, params: jax.Array) -> Pulled:
        with phase("repull"):
            return pull_slots(self.layer.config, self.layer.axis_name, params, self.inputs.slot_expert, after=self.grad)

    def rows_again(self, chunk: int, x: jax.Array, win: Window) -> jax.Array:
        """Rows on their way, as `Layer.send`; or those that were kept."""
        kept = self.kept.rows[chunk - 1]
        return self.layer.send(f"again_{chunk}", self.layer.by_assignment(x), win) if kept is None else kept

    def forwarded(self, received: jax.Array) -> jax.Array:
        """Rows of chunk 2, complete."""
        return self.layer.forward("again_2", received, self.layer.last) if self.kept.rows[1] is None else received

    def gate_up_again(self, chunk: int, rows: jax.Array, held: Instances, win: Window) -> jax.Array:
        kept = self.kept.pre[chunk - 1]
        return self.layer.gmm(rows, held, win, self.layer.matrices[0]) if kept is None else kept


class _Begun(NamedTuple):
    """Where chunk 2 takes over."""

    params: jax.Array
    """[Em, D]."""
    pulled: Pulled
    rows: jax.Array
    """[C2, H]."""
    grads: jax.Array
    """[C2, H] of the output."""
    inner_grad: jax.Array
    """[C2, I]."""
    row_grads: jax.Array | None
    """[C1, H] of the input, of chunk 1."""
    sums: Sums
    gate_up: list[WeightGrad]
    """Weight gradients of chunk 1, yet to be made."""
    down: list[WeightGrad]
    scale_grads: list[jax.Array]
    """f32 [C1] gradients of the router weights of chunk 1."""


def run_backward(layer: Layer, inputs: Inputs, kept: Kept, grad: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of x [T, H], of weight f32 [T, K] and of params [Em, D], from that of the results [T, H]."""
    work = _Pass(layer, inputs, kept, grad)
    begun = _begin(work) if layer.first is None else _chunk_1(work, layer.first)
    held = Instances(begun.params, begun.pulled.slots)
    return _chunk_2(work, begun._replace(sums=add_overflow(layer, inputs, grad, held, begun.sums)))


def _begin(work: _Pass) -> _Begun:
    """What chunk 1 does for chunk 2, where there is no chunk 1."""
    layer, inputs, last = work.layer, work.inputs, work.layer.last
    params = inputs.params.astype(inputs.x.dtype)
    pulled = work.pull(params)
    held = Instances(params, pulled.slots)
    rows = work.forwarded(work.rows_again(2, inputs.x, last))
    grads = layer.forward("grad_2", layer.send("grad_2", layer.by_assignment(work.grad), last), last)
    inner_grad = layer.gmm(grads, held, last, layer.matrices[1], transposed=True)
    return _Begun(params, pulled, rows, grads, inner_grad, None, no_gradients(layer, inner_grad), [], [], [])


def _chunk_1(work: _Pass, first: Window) -> _Begun:
    """Rows of chunk 1 all the way home; those of chunk 2 and the replicas' parameters here."""
    layer, inputs, (gate_up, down), last = work.layer, work.inputs, work.layer.matrices, work.layer.last
    params = inputs.params.astype(inputs.x.dtype)
    scale = work.kept.scale[: first.num_rows]
    grads_1 = layer.send("grad_1", layer.by_assignment(work.grad), first)

    rows_1 = work.rows_again(1, inputs.x, first)
    inner_grad = layer.gmm(grads_1, Instances(params, None), first, down, transposed=True)

    rows_1, inner_grad, params = stage("repull", rows_1, inner_grad, params)
    pulled = work.pull(params)
    pre = work.gate_up_again(1, rows_1, Instances(params, None), first)

    pulled, pre, inner_grad, grad, params = stage("grad_2", pulled, pre, inner_grad, work.grad, params)
    received = layer.send("grad_2", layer.by_assignment(grad), last)
    pre_grad, inner, scale_grad = layer.swiglu_backward(pre, scale, inner_grad)
    row_grads = layer.gmm(pre_grad, Instances(params, None), first, gate_up, transposed=True)

    if layer.two is not None:
        received, row_grads = stage("grad_2_forward", received, row_grads)
    grads = layer.forward("grad_2", received, last)

    grads, row_grads, pulled, x, params = stage("again_2", grads, row_grads, pulled, inputs.x, params)
    received = work.rows_again(2, x, last)
    inner_grad = layer.gmm(grads, Instances(params, pulled.slots), last, down, transposed=True)

    if layer.two is not None:
        received, inner_grad = stage("again_2_forward", received, inner_grad)
    rows = work.forwarded(received)

    sums = no_gradients(layer, row_grads)
    of_gate_up, of_down = WeightGrad(first, rows_1, pre_grad), WeightGrad(first, inner, grads_1)
    return _Begun(params, pulled, rows, grads, inner_grad, row_grads, sums, [of_gate_up], [of_down], [scale_grad])


def _chunk_2(work: _Pass, begun: _Begun) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows of chunk 2, and the weights of both; what `run_backward` returns."""
    layer, inputs, (gate_up, down) = work.layer, work.inputs, work.layer.matrices
    last, sums, pulled = layer.last, begun.sums, begun.pulled
    held = Instances(begun.params, pulled.slots)
    scale = work.kept.scale[-last.num_rows :]
    pre = work.gate_up_again(2, begun.rows, held, last)
    pre_grad, inner, scale_grad = layer.swiglu_backward(pre, scale, begun.inner_grad)
    slots = _of_slots(layer, down, sums.slots and sums.slots.down, WeightGrad(last, inner, begun.grads))

    jobs = [*begun.down, WeightGrad(last, inner, begun.grads)]
    mains = jnp.zeros_like(inputs.params)
    mains, turn, _ = _go_home(work, down, slots, jobs, sums.mains and sums.mains.down, mains, pulled.turn, pulled.turn)

    values = stage("last_rows", mains, pre_grad, begun.params, sums.tokens, begun.row_grads)
    mains, pre_grad, params, tokens, row_grads_1 = values
    row_grads = layer.gmm(pre_grad, held._replace(mains=params), last, gate_up, transposed=True)

    tokens = layer.sum_gathered(layer.gather("home_2", row_grads, tokens, last))
    if layer.first is not None and row_grads_1 is not None:
        tokens = layer.bring("home_1", row_grads_1, tokens, layer.first)
    tokens = layer.bring("home_2", row_grads, tokens, last)
    of_gate_up = WeightGrad(last, begun.rows, pre_grad)
    slots = _of_slots(layer, gate_up, sums.slots and sums.slots.gate_up, of_gate_up)

    scale_grad = jnp.concatenate([*begun.scale_grads, scale_grad])
    tokens, slots, scale_grad = stage("weight_grads", tokens, slots, scale_grad)
    weight_grads = layer.combine("weight_grads", scale_grad, sums.weights, layer.whole)
    x_grad = layer.sum_home("home_rails", tokens)

    jobs = [*begun.gate_up, of_gate_up]
    mains, _, x_grad = _go_home(work, gate_up, slots, jobs, sums.mains and sums.mains.gate_up, mains, turn, x_grad)
    return x_grad, weight_grads[layer.place].reshape(inputs.weight.shape), mains


def _of_slots(layer: Layer, matrix: Matrix, begin: jax.Array | None, job: WeightGrad) -> jax.Array:
    """f32 [N, rows, cols] gradient of one matrix of the replicas."""
    config = layer.config
    if begin is None:
        begin = zeros_after(job.grads, (config.num_slots, matrix.rows, matrix.cols), jnp.float32)
    return layer.wgrad(begin, config.num_mains, [job]) if config.num_slots else begin


def _go_home(
    work: _Pass,
    matrix: Matrix,
    slots: jax.Array,
    jobs: list[WeightGrad],
    begin: jax.Array | None,
    into: jax.Array,
    turn: jax.Array,
    carried: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`push_slots` of one matrix, under its gradient for the mains: `begin` and what `jobs` add."""
    layer = work.layer

    @jax.named_scope("topoep_wgrad")
    def own(first_row: jax.Array, num_rows: int) -> jax.Array:
        if begin is None:
            strip = zeros_after(first_row, (into.shape[0], num_rows, matrix.cols), jnp.float32)
        else:
            strip = lax.dynamic_slice_in_dim(begin, first_row, num_rows, 1)
        return layer.wgrad(vary_like(strip, into), 0, jobs, first_row)

    with phase("push"):
        return push_slots(
            layer.config, layer.axis_name, matrix, slots, work.inputs.slot_expert, own, into, turn, carried
        )
