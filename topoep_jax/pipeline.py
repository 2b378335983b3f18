"""The planned expert computation of one rank, forward and backward, as one custom_vjp.

transfer | dispatch -> experts -> combine, once per receive buffer: the chunks that every layer runs, then the overflow
passes that only an unbalanced plan needs. Every rank knows the number of passes from the plan, so none is asked for.
The backward pass dispatches again and recomputes: kept are only the tokens, the router weights and the plan. Replica
parameters are pulled again, since their slots serve other layers in between.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from topoep_jax._compat import vary_like
from topoep_jax.combine import combine, sum_over_experts
from topoep_jax.config import LayerConfig
from topoep_jax.dispatch import Layout, Window, build_layout, dispatch, send_order, window
from topoep_jax.experts import Instances, gmm, packed_matrices, swiglu, swiglu_grad, wgrad
from topoep_jax.transfer import device_pull, device_push, pull, push
from topoep_jax.transport import Group, group

State = TypeVar("State")


class _Inputs(NamedTuple):
    x: jax.Array
    weight: jax.Array
    params: jax.Array
    expert_idx: jax.Array
    omega: jax.Array
    slot_expert: jax.Array
    quota: jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def planned_experts(
    config: LayerConfig,
    axis_name: str,
    x: jax.Array,
    weight: jax.Array,
    params: jax.Array,
    expert_idx: jax.Array,
    omega: jax.Array,
    slot_expert: jax.Array,
    quota: jax.Array,
) -> jax.Array:
    """Runs every assignment on the instance that the plan names and sums each token's results.

    Inside shard_map or pmap over `axis_name`. Gradients flow to x, weight and params; replica gradients are added to
    their main experts.

    Args:
      config: the layer.
      axis_name: the expert-parallel axis.
      x: [T, H] this rank's tokens; rows and activations travel in this dtype.
      weight: f32 [T, K] router weights.
      params: [Em, D] packed parameters of this rank's mains; gradients come back in this dtype, summed in f32.
      expert_idx: int32 [T, K]; entries below 0 are padding.
      omega: int32 [R, E] demand of all ranks.
      slot_expert: int32 [R, N] of the plan.
      quota: int32 [R, R, J] of the plan.

    Returns:
      [T, H] in the dtype of `x`; zeros for padding tokens.
    """
    return _forward(config, axis_name, _Inputs(x, weight, params, expert_idx, omega, slot_expert, quota))


def _forward(config: LayerConfig, axis_name: str, inputs: _Inputs) -> jax.Array:
    gate_up, down = packed_matrices(config.hidden, config.ffn)
    layout, order, place = _prepare(config, axis_name, inputs)
    instances, _ = _gather_instances(config, axis_name, inputs, inputs.x)
    tokens = inputs.x[order // config.top_k]
    weights = inputs.weight.reshape(-1)[order]

    def serve(win: Window, held: Instances, results: jax.Array) -> jax.Array:
        rows = dispatch(tokens, win, axis_name)
        scale = dispatch(weights, win, axis_name)
        inner = swiglu(gmm(rows, held, win.block_instance, gate_up), scale)
        return combine(gmm(inner, held, win.block_instance, down), results, win, axis_name)

    results = _over_windows(config, layout, instances, order.shape[0], serve, jnp.zeros_like(tokens))
    return sum_over_experts(results, place, inputs.x.shape[0])


class _Gradients(NamedTuple):
    tokens: jax.Array
    weights: jax.Array
    mains: jax.Array
    slots: jax.Array


def _backward(config: LayerConfig, axis_name: str, inputs: _Inputs, grad: jax.Array) -> tuple[Any, ...]:
    # Without the barrier XLA merges this recompute with the forward pass and keeps all of its buffers alive.
    inputs, grad = lax.optimization_barrier((inputs, grad))
    gate_up, down = packed_matrices(config.hidden, config.ffn)
    layout, order, place = _prepare(config, axis_name, inputs)
    instances, turn = _gather_instances(config, axis_name, inputs, grad)
    tokens, token_grads = inputs.x[order // config.top_k], grad[order // config.top_k]
    weights = inputs.weight.reshape(-1)[order]

    def serve(win: Window, held: Instances, sums: _Gradients) -> _Gradients:
        rows, row_grads = dispatch(tokens, win, axis_name), dispatch(token_grads, win, axis_name)
        scale = dispatch(weights, win, axis_name)
        pre = gmm(rows, held, win.block_instance, gate_up)
        inner_grad = gmm(row_grads, held, win.block_instance, down, transposed=True)
        pre_grad, scale_grad = swiglu_grad(pre, scale, inner_grad)
        input_grad = gmm(pre_grad, held, win.block_instance, gate_up, transposed=True)
        pairs = ((rows, pre_grad), (swiglu(pre, scale), row_grads))
        slots = sums.slots
        if held.slots is not None:
            slots = wgrad(slots, config.num_mains, win, config.block_rows, pairs)
        return _Gradients(
            tokens=combine(input_grad, sums.tokens, win, axis_name),
            weights=combine(scale_grad, sums.weights, win, axis_name),
            mains=wgrad(sums.mains, 0, win, config.block_rows, pairs),
            slots=slots,
        )

    zeros = _Gradients(
        tokens=jnp.zeros_like(tokens),
        weights=jnp.zeros_like(weights),
        mains=jnp.zeros_like(inputs.params, jnp.float32),
        slots=vary_like(jnp.zeros((config.num_slots, inputs.params.shape[1]), jnp.float32), inputs.params),
    )
    sums = _over_windows(config, layout, instances, order.shape[0], serve, zeros)
    x_grad = sum_over_experts(sums.tokens, place, inputs.x.shape[0])
    mains, x_grad = _send_home(config, axis_name, inputs, sums, x_grad, turn)
    weight_grad = sums.weights[place].reshape(inputs.weight.shape)
    return x_grad, weight_grad, mains.astype(inputs.params.dtype), None, None, None, None


planned_experts.defvjp(
    lambda config, axis_name, *args: (planned_experts(config, axis_name, *args), _Inputs(*args)), _backward
)


def _prepare(config: LayerConfig, axis_name: str, inputs: _Inputs) -> tuple[Layout, jax.Array, jax.Array]:
    """Where rows lie, and the send order."""
    layout = build_layout(config, inputs.omega, inputs.slot_expert, inputs.quota, inputs.expert_idx.size, axis_name)
    return layout, *send_order(inputs.expert_idx, config.num_experts)


def _gather_instances(
    config: LayerConfig, axis_name: str, inputs: _Inputs, after: jax.Array
) -> tuple[Instances, jax.Array]:
    """Parameters of all instances, those of replicas pulled, and the turn of the next transfer.

    Kernels of the device transport follow what `after` comes from, which holds the transfers before them.
    """
    turn = _turn(after)
    mains = inputs.params.astype(inputs.x.dtype)
    if not config.num_slots:
        return Instances(mains, None), turn
    kernels = _kernels(config, axis_name)
    if kernels is None:
        return Instances(mains, pull(mains, inputs.slot_expert, axis_name)), turn
    slots, turn = device_pull(mains, inputs.slot_expert, turn, kernels, config.cost)
    return Instances(mains, slots), turn


def _send_home(
    config: LayerConfig, axis_name: str, inputs: _Inputs, sums: _Gradients, x_grad: jax.Array, turn: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gradients of the mains with those of their replicas added; and `x_grad`, from which later transfers follow."""
    if not config.num_slots:
        return sums.mains, x_grad
    kernels = _kernels(config, axis_name)
    if kernels is None:
        return push(sums.slots, sums.mains, inputs.slot_expert, axis_name), x_grad
    mains, _, x_grad = device_push(sums.slots, sums.mains, inputs.slot_expert, turn, x_grad, kernels)
    return mains, x_grad


def _turn(array: jax.Array) -> jax.Array:
    """An int32 [1] that comes from `array` in a way that no compiler can shorten; its value means nothing."""
    first = lax.slice(array, (0,) * array.ndim, (1,) * array.ndim).reshape(1)
    return lax.bitcast_convert_type(first.astype(jnp.float32), jnp.int32)


def _kernels(config: LayerConfig, axis_name: str) -> Group | None:
    """The group whose kernels carry replicas, or None where lax collectives do."""
    if config.transport == "xla":
        return None
    found = group(axis_name)
    if found.topology != config.topology:
        raise ValueError(
            f"the transport of axis {axis_name!r} was made for {found.topology}, but this layer has {config.topology}:"
            " pass its config to topoep_jax.transport.init"
        )
    return found if found.kind == "device" else None


def _over_windows(
    config: LayerConfig,
    layout: Layout,
    instances: Instances,
    num_assignments: int,
    serve: Callable[[Window, Instances, State], State],
    state: State,
) -> State:
    """Applies `serve` to every receive buffer: the chunks, of which all but the last hold mains only, then overflow."""
    chunks = config.window_rows(num_assignments)
    lo = 0
    for i, num_rows in enumerate(chunks):
        mains_only = i + 1 < len(chunks)
        num_instances = config.num_mains if mains_only else config.num_instances
        held = instances._replace(slots=None) if mains_only else instances
        state = serve(window(layout, lo, num_rows, config.block_rows, num_instances), held, state)
        lo += num_rows
    if config.overflow == "drop":
        return state
    buffer_rows = lo

    def extra_pass(carry: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
        index, state = carry
        win = window(layout, index * buffer_rows, buffer_rows, config.block_rows, config.num_instances)
        return index + 1, serve(win, instances, state)

    # The carry varies like the layout does, or check_vma would refuse what one pass makes of it.
    first = vary_like(jnp.ones((), jnp.int32), layout.passes)
    return lax.while_loop(lambda carry: carry[0] < layout.passes, extra_pass, (first, state))[1]
