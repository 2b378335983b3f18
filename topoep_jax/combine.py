"""Rows home to their source rank and token: the adjoint of dispatch."""

import jax
import jax.numpy as jnp

from topoep_jax.dispatch import TwoHop, Window
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


def gather_at_gateways(
    rows: jax.Array, into: jax.Array, win: Window, groups: list[list[int]], axis_name: str
) -> jax.Array:
    """Launch 2 on the way home: [Cg, H], `into` with rows of a window that other domains asked for."""
    return exchange(rows, into, win.hop.second_home, axis_name, groups)


def combine_own(rows: jax.Array, into: jax.Array, win: Window, axis_name: str) -> jax.Array:
    """`combine` of rows of the own domain: `into` [A + (M - 1) T, H] with them."""
    return exchange(rows, into, win.hop.first_home, axis_name)


@jax.named_scope("topoep_sum_over_experts")
def sum_two_hop(rows: jax.Array, gathered: jax.Array, two: TwoHop, axis_name: str) -> jax.Array:
    """Adds up each token at its gateways, brings the sums home, and adds them to what is there.

    Args:
      rows: [A + (M - 1) T, H], of which [A, H] own rows are home.
      gathered: [Cg, H] at this gateway.
      two: tables of the plan.
      axis_name: the expert-parallel axis.

    Returns:
      [T, H] in the dtype of `rows`: own rows, k ascending, then sums of other domains, in f32.
    """
    sums = _masked_sum(gathered, two.partial).astype(rows.dtype)
    rows = exchange(sums, rows, two.rail_home, axis_name)
    return _masked_sum(rows, two.sums).astype(rows.dtype)


def _masked_sum(rows: jax.Array, index: jax.Array) -> jax.Array:
    """f32 [m, H]: the sum of rows [n, H] by index int32 [m, k], one after the other; -1 adds nothing."""
    total = jnp.zeros((index.shape[0], rows.shape[1]), jnp.float32)
    for at in index.T:
        total = total + jnp.where(at[:, None] >= 0, rows[jnp.maximum(at, 0)], 0).astype(jnp.float32)
    return total
