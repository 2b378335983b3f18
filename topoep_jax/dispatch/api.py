"""Tokens to the instances that execute them: one sort at the source, one ragged exchange per window."""

import jax
import jax.numpy as jnp

from topoep_jax._arrays import empty_after
from topoep_jax.dispatch.layout import Moves, Window
from topoep_jax.dispatch.rows import pick
from topoep_jax.dispatch.two_hop import TwoHop
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


def dispatch(rows: jax.Array, window: Moves, axis_name: str) -> jax.Array:
    """Lands rows in the receive buffer of `window`, instance by instance.

    Args:
      rows: [A, ...] in send order.
      window: the virtual rows to fill.
      axis_name: the expert-parallel axis.

    Returns:
      [window.num_rows, ...]. Rows that no assignment fills hold anything (`experts.api`).
    """
    into = empty_after(rows, (window.num_rows, *rows.shape[1:]), rows.dtype)
    return exchange(rows, into, window.dispatch, axis_name)


def send_first(rows: jax.Array, two: TwoHop, win: Window, axis_name: str) -> jax.Array:
    """Launch 1: rows of the own domain to their instances, and tokens to their gateways.

    Args:
      rows: [A + (M - 1) T, H], the tokens of `two.source`.
      two: tables of the plan.
      win: the virtual rows to fill.
      axis_name: the expert-parallel axis.

    Returns:
      [win.num_rows + (M - 1) T, H], for `forward`: rows of the window, and the tokens that this gateway forwards.
    """
    into = empty_after(rows, (win.num_rows + two.partial.shape[0], rows.shape[1]), rows.dtype)
    return exchange(rows, into, win.hop.first, axis_name)


def forward(received: jax.Array, win: Window, groups: list[list[int]], axis_name: str) -> jax.Array:
    """Launch 2: what launch 1 `received`, and the rows that gateways repeat; `groups` are the ranks of each domain."""
    with jax.named_scope("topoep_gateway"):
        repeated = pick(received, win.hop.repeated)
    return exchange(repeated, received, win.hop.second, axis_name, groups)
