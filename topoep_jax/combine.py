"""Rows home to their source rank and token: the adjoint of dispatch."""

import jax
import jax.numpy as jnp

from topoep_jax.dispatch import Moves, TwoHop, Window, add
from topoep_jax.transport import exchange


def combine(rows: jax.Array, into: jax.Array, window: Moves, axis_name: str) -> jax.Array:
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


def sum_at_gateways(gathered: jax.Array, two: TwoHop) -> jax.Array:
    """[(M - 1) T, H]: the sums of each token's rows [Cg, H], k ascending, that this gateway sends home."""
    with jax.named_scope("topoep_gateway"):
        return add(gathered, two.partial)


def combine_sums(sums: jax.Array, into: jax.Array, two: TwoHop, axis_name: str) -> jax.Array:
    """Launch 1 on the way home: `into` [A + (M - 1) T, H] with the sums of other domains at its end."""
    return exchange(sums, into, two.rail_home, axis_name)


@jax.named_scope("topoep_sum_over_experts")
def sum_two_hop(rows: jax.Array, two: TwoHop) -> jax.Array:
    """[T, H]: each token's own rows, k ascending, then its sums of other domains: [A + (M - 1) T, H] that are home."""
    return add(rows, two.sums)
