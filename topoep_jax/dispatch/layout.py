"""Where every row goes, from the plan alone: no count exchange, no receive-side permutation.

A receiving rank orders its rows by instance (mains, then slots), each instance starting at a multiple of `block_rows`;
inside an instance rows are ordered by source rank, those of the own domain first (`rails.receive_order`), and, per
source, by the source's own order. A sending rank orders its
assignments by expert (one stable sort) and serves the instances of an expert in ascending rank. Both sides know
`quota`, so prefix sums give either end of every segment. Rows are *virtual*: a window [lo, lo + n) of them is what one
chunk or one overflow pass holds in memory.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from topoep_jax.config import LayerConfig
from topoep_jax.dispatch.rails import receive_order
from topoep_jax.transport import Segments


class Layout(NamedTuple):
    """One rank's view of all segments of one plan; int32 throughout. Offsets are exclusive prefix sums."""

    send_in: jax.Array
    """[R, J] first row of my segment for (rank, instance) in my send order."""
    send_out: jax.Array
    """[R, J] the virtual row where it lands on that rank."""
    send_rows: jax.Array
    """[R, J] its rows."""
    recv_in: jax.Array
    """[R, J] first row of the segment from a source rank for my instance j, in that source's send order."""
    recv_out: jax.Array
    """[R, J] the virtual row where it lands here."""
    recv_rows: jax.Array
    """[R, J] its rows."""
    start: jax.Array
    """[J] first virtual row of each of my instances, a multiple of block_rows."""
    starts: jax.Array
    """[R, J] the same of all ranks."""
    aligned: jax.Array
    """[J] rows of each of my instances, rounded up to block_rows."""
    passes: jax.Array
    """[] as in `Extent`."""


class Extent(NamedTuple):
    """The virtual rows of all ranks; int32 and equal on every rank, which needs no axis to compute it."""

    start: jax.Array
    """[R, J] first virtual row of each instance, a multiple of block_rows."""
    aligned: jax.Array
    """[R, J] rows of each instance, rounded up to block_rows."""
    passes: jax.Array
    """[] receive buffers needed to hold the fullest rank's rows, at least 1."""
    overflow_rows: jax.Array
    """[] assignments of all ranks beyond the first receive buffer."""


class Window(NamedTuple):
    """The virtual rows [lo, lo + n) of every rank: what one receive buffer holds."""

    num_rows: int
    dispatch: Segments
    combine: Segments
    block_instance: jax.Array
    """int32 [n / block_rows]: instance of each block, J where the block is idle."""
    first_block: jax.Array
    """int32 [instances of the window]: first block of each."""
    filled: jax.Array
    """int32 [instances of the window]: rows of each, from the start of its first block; what is left of its last block
    is a tail, which no assignment fills."""
    hop: Any = None
    """`two_hop.Hop`, where tokens travel in two launches."""


def instance_expert(slot_expert: jax.Array, num_experts: int) -> jax.Array:
    """int32 [R, J]: the expert each instance holds, -1 for an empty slot. Mains are contiguous blocks of experts."""
    num_ranks = slot_expert.shape[0]
    mains = jnp.arange(num_experts, dtype=jnp.int32).reshape(num_ranks, -1)
    return jnp.concatenate([mains, slot_expert], axis=1)


def extent_of(config: LayerConfig, quota: jax.Array, num_assignments: int) -> Extent:
    """How far the rows of a plan reach on every rank: quota int32 [R, R, J], A = `num_assignments` of one rank."""
    windows = config.window_rows(num_assignments)
    buffer_rows = sum(windows)
    rows = quota.sum(0, dtype=jnp.int32)
    aligned = -(-rows // config.block_rows) * config.block_rows
    start, end = _starts(aligned, config.num_mains, first_slot_row=sum(windows[:-1]))
    kept = jnp.clip(buffer_rows - start, 0, rows)
    return Extent(
        start=start,
        aligned=aligned,
        passes=jnp.maximum(1, -(-end.max() // buffer_rows)).astype(jnp.int32),
        overflow_rows=(rows - kept).sum(dtype=jnp.int32),
    )


def build_layout(
    config: LayerConfig,
    omega: jax.Array,
    slot_expert: jax.Array,
    quota: jax.Array,
    num_assignments: int,
    axis_name: str,
) -> Layout:
    """Lays out all rows of a plan, seen from the calling rank.

    Args:
      config: the layer; its chunks and cap give the size of the receive buffer.
      omega: int32 [R, E] demand.
      slot_expert: int32 [R, N] of the plan.
      quota: int32 [R, R, J] of the plan.
      num_assignments: A = T * K of one rank, padding included.
      axis_name: the expert-parallel axis.
    """
    me = lax.axis_index(axis_name)
    expert = instance_expert(slot_expert, config.num_experts)
    extent = extent_of(config, quota, num_assignments)
    segment_out = extent.start[None] + _before_in_instance(quota, receive_order(config.topology))
    send_rows, recv_rows = quota[me], quota[:, me]
    return Layout(
        send_in=_send_order_start(omega[me], expert) + _served_by_lower_ranks(send_rows, expert, config.num_experts),
        send_out=segment_out[me],
        send_rows=send_rows,
        recv_in=exclusive_cumsum(omega, 1)[:, jnp.maximum(expert[me], 0)] + _served_below(quota, expert, me),
        recv_out=segment_out[:, me],
        recv_rows=recv_rows,
        start=extent.start[me],
        starts=extent.start,
        aligned=extent.aligned[me],
        passes=extent.passes,
    )


def exclusive_cumsum(values: jax.Array, axis: int) -> jax.Array:
    """Sums of what comes before each element along an axis."""
    return jnp.cumsum(values, axis, dtype=jnp.int32) - values


def _before_in_instance(quota: jax.Array, order: np.ndarray) -> jax.Array:
    """[R, R, J] rows of others that lie before a source's in each instance; `order` [R, R] is `receive_order`."""
    rank = np.arange(len(order))
    in_order = exclusive_cumsum(quota[order.T, rank[None]], 0)  # [position, receiving rank, J]
    place = np.argsort(order, axis=1).T  # [source, receiving rank]
    return in_order[place, rank[None]]


def _starts(aligned: jax.Array, num_mains: int, first_slot_row: int) -> tuple[jax.Array, jax.Array]:
    """[R, J] first virtual rows and [R] ends. Slots stay out of a mains-only first chunk: they wait for the pull."""
    mains, slots = aligned[:, :num_mains], aligned[:, num_mains:]
    end_of_mains = mains.sum(1, dtype=jnp.int32)
    first_slot = jnp.maximum(end_of_mains, first_slot_row)
    start = jnp.concatenate([exclusive_cumsum(mains, 1), first_slot[:, None] + exclusive_cumsum(slots, 1)], axis=1)
    slot_rows = slots.sum(1, dtype=jnp.int32)
    return start, jnp.where(slot_rows > 0, first_slot + slot_rows, end_of_mains)


def _send_order_start(demand: jax.Array, expert: jax.Array) -> jax.Array:
    """[R, J] first row of each instance's expert in my send order."""
    return exclusive_cumsum(demand, 0)[jnp.maximum(expert, 0)]


def _served_by_lower_ranks(send_rows: jax.Array, expert: jax.Array, num_experts: int) -> jax.Array:
    """[R, J] my rows for the same expert that lower ranks serve (an expert is at most once on a rank)."""
    num_ranks = expert.shape[0]
    rank = jnp.broadcast_to(jnp.arange(num_ranks, dtype=jnp.int32)[:, None], expert.shape)
    row = jnp.where(expert >= 0, expert, num_experts)
    table = jnp.zeros((num_experts + 1, num_ranks), jnp.int32).at[row, rank].add(send_rows)
    return exclusive_cumsum(table, 1)[row, rank]


def _served_below(quota: jax.Array, expert: jax.Array, me: jax.Array) -> jax.Array:
    """[R, J] per source: rows of my instance's expert that ranks below me serve. Never an [R, E, R] array."""
    num_ranks, num_instances = expert.shape
    below = (jnp.arange(num_ranks, dtype=jnp.int32) < me)[None, :, None]
    same = (expert[me][:, None, None] == expert[None]) & below & (expert[None] >= 0)  # [J, R, J]
    flat = quota.reshape(num_ranks, num_ranks * num_instances)
    return lax.dot_general(
        flat,
        same.reshape(num_instances, -1).astype(jnp.int32),
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.int32,
    )


def window(layout: Layout, lo: jax.Array | int, num_rows: int, block_rows: int, num_instances: int) -> Window:
    """Clips all segments to the virtual rows [lo, lo + num_rows) of the first `num_instances` instances.

    `lo` and `num_rows` are multiples of `block_rows`. Windows that tile the virtual rows move every row exactly once.
    """
    cut = lambda v: v[:, :num_instances]  # noqa: E731
    send = cut(layout.send_out), cut(layout.send_rows), cut(layout.send_in)
    recv = cut(layout.recv_out), cut(layout.recv_rows), cut(layout.recv_in)
    send_at, send_size, send_from = clip_segments(*send, lo, num_rows)
    recv_at, recv_size, recv_from = clip_segments(*recv, lo, num_rows)
    flat = lambda v: v.reshape(-1)  # noqa: E731
    to_instances = Segments(flat(send_from), flat(send_size), flat(send_at), flat(recv_size))
    to_sources = Segments(flat(recv_at), flat(recv_size), flat(recv_from), flat(send_size))
    num_blocks = num_rows // block_rows
    first = jnp.clip((layout.start - lo) // block_rows, 0, num_blocks)[:num_instances]
    last = jnp.clip((layout.start + layout.aligned - lo) // block_rows, 0, num_blocks)[:num_instances]
    block = jnp.arange(num_blocks, dtype=jnp.int32)[:, None]
    hit = (block >= first[None]) & (block < last[None])
    idle = layout.start.shape[0]
    block_instance = jnp.where(hit.any(1), jnp.argmax(hit, 1).astype(jnp.int32), idle)
    filled = jnp.clip(layout.start + layout.recv_rows.sum(0, dtype=jnp.int32) - lo, 0, num_rows)[:num_instances]
    # An instance that begins beyond the window has its first block at the end.
    filled = jnp.maximum(filled - first * block_rows, 0)
    return Window(num_rows, to_instances, to_sources, block_instance, first, filled)


def clip_segments(
    out: jax.Array, rows: jax.Array, first: jax.Array, lo: jax.Array | int, num_rows: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(offset in the window, size, offset in the send order) of segments; all 0 where nothing is left."""
    at = jnp.clip(out - lo, 0, num_rows)
    size = jnp.clip(out + rows - lo, 0, num_rows) - at
    kept = size > 0
    return jnp.where(kept, at, 0), size, jnp.where(kept, first + (at + lo - out), 0)
