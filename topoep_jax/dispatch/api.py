"""Tokens to the instances that execute them: one sort at the source, one ragged exchange per window."""

import jax
import jax.numpy as jnp

from topoep_jax._arrays import zeros_after
from topoep_jax.dispatch.layout import Window
from topoep_jax.transport import exchange


def send_order(expert_idx: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Sorts this rank's assignments by expert, padding last; stable, so it is the same on every run.

    Args:
      expert_idx: int32 [T, K]; entries below 0 are padding.
      num_experts: E.

    Returns:
      int32 [A] assignment of each row of the send order, and int32 [A] row of each assignment.
    """
    flat = expert_idx.reshape(-1)
    order = jnp.argsort(jnp.where(flat < 0, num_experts, flat), stable=True).astype(jnp.int32)
    place = jnp.arange(order.shape[0], dtype=jnp.int32)
    return order, jnp.zeros_like(order).at[order].set(place, unique_indices=True)


def dispatch(rows: jax.Array, window: Window, axis_name: str) -> jax.Array:
    """Lands rows in the receive buffer of `window`, instance by instance.

    Args:
      rows: [A, ...] in send order.
      window: the virtual rows to fill.
      axis_name: the expert-parallel axis.

    Returns:
      [window.num_rows, ...]. Rows that no assignment fills are zero, but need not be (`experts.api`).
    """
    empty = zeros_after(rows, (window.num_rows, *rows.shape[1:]), rows.dtype)
    return exchange(rows, empty, window.dispatch, axis_name)
