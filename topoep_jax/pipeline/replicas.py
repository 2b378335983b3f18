"""Replica parameters and gradients by the layer's transport: lax collectives, or kernels of the ranks' group."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from topoep_jax.config import LayerConfig
from topoep_jax.transfer import Beside, device_pull, device_push, pull, push
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
    slot_grads: jax.Array,
    main_grads: jax.Array,
    slot_expert: jax.Array,
    turn: jax.Array,
    carried: jax.Array,
    beside: Beside,
) -> tuple[jax.Array, jax.Array]:
    """Sends replica gradients home while the mains' own gradients are computed.

    Args:
      config: the layer.
      axis_name: the expert-parallel axis.
      slot_grads: f32 [N, D].
      main_grads: f32 [Em, D], what the mains have so far.
      slot_expert: int32 [R, N] of the plan.
      turn: of `pull_slots`.
      carried: any array, see `device_push`.
      beside: adds what the mains lack, in shares, see `push`.

    Returns:
      f32 [Em, D] gradients of the mains with all replicas, and `carried`.
    """
    kernels = _kernels(config, axis_name) if config.num_slots else None
    if config.num_slots and kernels is None:
        staging = config.staging_bytes
        return push(slot_grads, main_grads, slot_expert, axis_name, staging_bytes=staging, beside=beside), carried
    main_grads = beside(jnp.zeros((), jnp.int32), 1, main_grads)
    if kernels is None:
        return main_grads, carried
    main_grads, _, carried = device_push(slot_grads, main_grads, slot_expert, turn, carried, kernels)
    return main_grads, carried


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
