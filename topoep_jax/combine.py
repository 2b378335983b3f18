"""Rows home to their source rank and token: the adjoint of dispatch."""

import jax

from topoep_jax.dispatch import Moves, TwoHop, Window, add
from topoep_jax.transport import exchange


def combine(rows: jax.Array, into: jax.Array, window: Moves, axis_name: str) -> jax.Array:
    """Sends the rows of a window back to where `dispatch` took them from.

    Args:
      rows: [window.num_rows, ...] results, instance by instance.
      into: [A, ...] results of other windows, in send order.
      window: the virtual rows that `rows` holds.
      axis_name: the expert-parallel axis.
    """
    return exchange(rows, into, window.combine, axis_name)


@jax.named_scope("topoep_sum_over_experts")
def sum_over_experts(rows: jax.Array, sums: jax.Array) -> jax.Array:
    """Adds up each token's results in f32, one after the other.

    Args:
      rows: [n, H] that are home.
      sums: int32 [T, m] rows of each token, k ascending, -1 for none: of `come_home`, or `TwoHop.sums`, where sums of
        other domains follow.

    Returns:
      [T, H] in the dtype of `rows`.
    """
    return add(rows, sums)


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
