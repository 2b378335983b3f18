"""Tokens to the instances that execute them: one sort at the source, one ragged exchange per window."""

import jax
import jax.numpy as jnp

from topoep_jax._arrays import zeros_after
from topoep_jax.dispatch.layout import Window
from topoep_jax.dispatch.two_hop import TwoHop, with_tokens
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


def send_first(
    rows: jax.Array, two: TwoHop, win: Window, region: jax.Array | None, axis_name: str
) -> tuple[jax.Array, jax.Array]:
    """Launch 1: rows of the own domain to their instances, and tokens to their gateways.

    Args:
      rows: [A + (M - 1) T, H], the tokens of `two.source`.
      two: tables of the plan.
      win: the virtual rows to fill.
      region: [(M - 1) T, H] tokens that this gateway has already; None sends them.
      axis_name: the expert-parallel axis.

    Returns:
      [win.num_rows, H], for `forward`, and the region.
    """
    if region is not None:
        into = zeros_after(rows, (win.num_rows, rows.shape[1]), rows.dtype)
        return exchange(rows, into, win.hop.first, axis_name), region
    into = zeros_after(rows, (win.num_rows + two.partial.shape[0], rows.shape[1]), rows.dtype)
    out = exchange(rows, into, with_tokens(win.hop.first, two.rail, two, win.num_rows), axis_name)
    return out[: win.num_rows], out[win.num_rows :]


def forward(
    region: jax.Array, into: jax.Array, two: TwoHop, win: Window, groups: list[list[int]], axis_name: str
) -> jax.Array:
    """Launch 2: [win.num_rows, H], `into` with the rows that gateways repeat; `groups` are the ranks of each domain."""
    return exchange(region[two.copy_of], into, win.hop.second, axis_name, groups)
