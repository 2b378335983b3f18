"""Rows home to their source rank and token: the adjoint of dispatch."""

import jax
import jax.numpy as jnp

from topoep_jax.dispatch import Window
from topoep_jax.transport import exchange


def combine(rows: jax.Array, into: jax.Array, window: Window, axis_name: str) -> jax.Array:
    """Sends the rows of a window back to where `dispatch` took them from.

    Args:
      rows: [window.num_rows, ...] results, instance by instance.
      into: [A, ...] results of other windows, in send order; zeros at first.
      window: the virtual rows that `rows` holds.
      axis_name: the expert-parallel axis.
    """
    return exchange(rows, into, window.combine, axis_name)


@jax.named_scope("topoep_sum_over_experts")
def sum_over_experts(rows: jax.Array, place: jax.Array, num_tokens: int) -> jax.Array:
    """Adds the K results of each token in f32, k ascending.

    Args:
      rows: [A, H] in send order.
      place: int32 [A] row of each assignment, from `send_order`.
      num_tokens: T.

    Returns:
      [T, H] in the dtype of `rows`.
    """
    by_token = rows[place].reshape(num_tokens, -1, rows.shape[-1])
    return by_token.astype(jnp.float32).sum(1).astype(rows.dtype)
