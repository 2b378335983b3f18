"""Replica parameters and gradients by the layer's transport: lax collectives, or kernels of the ranks' group."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from topoep_jax.config import LayerConfig
from topoep_jax.experts import Matrix
from topoep_jax.transfer import Receive, device_pull, device_push, pull, push_slices, slice_rows
from topoep_jax.transport import Group, group


class Pulled(NamedTuple):
    """Replica parameters of one pass over the layer."""

    slots: jax.Array | None
    """[N, D], None where the layer has no slots."""
    turn: jax.Array
    """int32 [1] that the next transfer follows."""


def pull_slots(
    config: LayerConfig, axis_name: str, mains: jax.Array, slot_expert: jax.Array, after: jax.Array
) -> Pulled:
    """Parameters of the replicas on this rank.

    Args:
      config: the layer.
      axis_name: the expert-parallel axis.
      mains: [Em, D].
      slot_expert: int32 [R, N] of the plan.
      after: any array of floats; kernels of the device transport follow what it comes from, which holds the transfers
        before them.
    """
    turn = _turn(after)
    if not config.num_slots:
        return Pulled(None, turn)
    kernels = _kernels(config, axis_name)
    if kernels is None:
        return Pulled(pull(mains, slot_expert, axis_name), turn)
    return Pulled(*device_pull(mains, slot_expert, turn, kernels, config.cost))


def push_slots(
    config: LayerConfig,
    axis_name: str,
    matrix: Matrix,
    slot_grads: jax.Array,
    slot_expert: jax.Array,
    own: Callable[[jax.Array, int], jax.Array],
    into: jax.Array,
    turn: jax.Array,
    carried: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sends replica gradients of one matrix home while the mains' own are made, strip by strip of its rows.

    So no rank ever holds the f32 gradient of a whole matrix of all its mains (but where kernels carry it).

    Args:
      config: the layer.
      axis_name: the expert-parallel axis.
      matrix: which matrix of the experts.
      slot_grads: f32 [N, rows, cols].
      slot_expert: int32 [R, N] of the plan.
      own: (first row, number of rows) -> f32 [Em, number, cols], the mains' own gradient.
      into: [Em, D] packed gradients of the mains.
      turn: of the transfer before.
      carried: any array, see `device_push`.

    Returns:
      `into` with the gradient of this matrix, the turn of the next transfer, and `carried`.
    """
    num_mains, flat = into.shape[0], slot_grads.reshape(slot_grads.shape[0], matrix.rows * matrix.cols)

    @jax.named_scope("topoep_store")
    def store(into: jax.Array, grads: jax.Array, first_row: jax.Array) -> jax.Array:
        column = matrix.offset + first_row * matrix.cols
        return lax.dynamic_update_slice_in_dim(into, grads.astype(into.dtype), column, 1)

    kernels = _kernels(config, axis_name) if config.num_slots else None
    if not config.num_slots or kernels is not None:
        first_row = jnp.zeros((), jnp.int32)
        grads = own(first_row, matrix.rows).reshape(num_mains, -1)
        if kernels is not None:
            grads, turn, carried = device_push(flat, grads, slot_expert, turn, carried, kernels)
        return store(into, grads, first_row), turn, carried
    rows = slice_rows(slot_expert.size, matrix.rows, matrix.cols, config.staging_bytes)

    def add(index: jax.Array, into: jax.Array, receive: Receive) -> jax.Array:
        first_row = index * rows
        return store(into, receive(own(first_row, rows).reshape(num_mains, -1)), first_row)

    return push_slices(flat, slot_expert, axis_name, num_mains, matrix.rows // rows, add, into), turn, carried


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
