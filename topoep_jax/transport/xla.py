"""Rows between ranks through lax collectives: ragged_all_to_all on accelerators, an exact dense emulation on CPU."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from topoep_jax._compat import platform_dependent
from topoep_jax.transport.check import compare


class Segments(NamedTuple):
    """The ragged quadruple of one rank, U segments per peer, peer-major: each int32 [R * U].

    Sizes are zero where a peer gets nothing; senders know the receivers' offsets because both follow from the plan.
    """

    input_offsets: jax.Array
    """First row of each segment in this rank's operand."""
    send_sizes: jax.Array
    """Rows of each segment sent."""
    output_offsets: jax.Array
    """First row of each segment in the *peer's* output."""
    recv_sizes: jax.Array
    """Rows of each segment received, by sending peer."""


def exchange(
    rows: jax.Array, into: jax.Array, segments: Segments, axis_name: str, groups: list[list[int]] | None = None
) -> jax.Array:
    """Sends segments of `rows` to every rank of `axis_name` and returns `into` with the received rows in place.

    Args:
      rows: [n, ...] this rank's rows.
      into: [m, ...] what rows that nobody sends to keep; same dtype and trailing shape as `rows`.
      segments: who gets what; segments received by one rank must not overlap.
      axis_name: the expert-parallel axis of the enclosing shard_map or pmap.
      groups: ranks that exchange among themselves, in groups of one size, each ascending; segments are then those of
        the group's peers. None for all ranks.
    """
    landed: jax.Array = platform_dependent(
        rows,
        into,
        *segments,
        cpu=partial(_emulated, axis_name=axis_name, groups=groups),
        default=partial(lax.ragged_all_to_all, axis_name=axis_name, axis_index_groups=groups),
    )
    return compare(rows, landed, segments, axis_name, groups)


def _emulated(
    rows: jax.Array,
    into: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: str,
    groups: list[list[int]] | None,
) -> jax.Array:
    """XLA has no ragged all-to-all on CPU: gather all operands and pick. Exact; memory grows with the axis size.

    Where no rank sends a row, no operand is gathered.
    """
    me, num_ranks = _position(axis_name, groups)
    table = jnp.stack([input_offsets, send_sizes, output_offsets]).reshape(3, num_ranks, -1)
    gathered = lax.all_gather(table, axis_name, axis_index_groups=groups)  # [source, 3, destination, U]
    first, size, target = jnp.moveaxis(lax.dynamic_index_in_dim(gathered, me, 2, keepdims=False), 1, 0)
    row = jnp.arange(into.shape[0], dtype=jnp.int32)
    # Mark each segment's first and one-past-last row; the running sum then is the segment that covers a row.
    ident = jnp.arange(1, target.size + 1, dtype=jnp.int32).reshape(target.shape)
    ident = jnp.where(size > 0, ident, 0)
    edges = jnp.zeros((into.shape[0] + 1,), jnp.int32)
    edges = edges.at[target.reshape(-1)].add(ident.reshape(-1)).at[(target + size).reshape(-1)].add(-ident.reshape(-1))
    cover = jnp.cumsum(edges)[: into.shape[0]]
    segment = jnp.maximum(cover - 1, 0)
    source = segment // target.shape[1]
    inside = row - target.reshape(-1)[segment] + first.reshape(-1)[segment]
    covered = (cover > 0).reshape((-1,) + (1,) * (into.ndim - 1))

    def move(rows: jax.Array, into: jax.Array) -> jax.Array:
        everyone = gather_rows(rows, axis_name, groups)
        received = everyone[source, jnp.clip(inside, 0, rows.shape[0] - 1)]
        return jnp.where(covered, received, into)

    # All ranks of a group hold the same table, so that they take the same branch.
    return lax.cond((gathered[:, 1] > 0).any(), move, lambda rows, into: into, rows, into)


def gather_rows(rows: jax.Array, axis_name: str, groups: list[list[int]] | None = None) -> jax.Array:
    """[R, n, ...] of [n, ...]: the only bytes that the emulation moves, apart from its table of segments."""
    return lax.all_gather(rows, axis_name, axis_index_groups=groups)


def _position(axis_name: str, groups: list[list[int]] | None) -> tuple[jax.Array, int]:
    """This rank's place among those that it exchanges with, and their number."""
    me = lax.axis_index(axis_name)
    if groups is None:
        return me, lax.axis_size(axis_name)
    place = np.zeros(sum(map(len, groups)), np.int32)
    for group in groups:
        place[group] = range(len(group))
    return jnp.asarray(place)[me], len(groups[0])
