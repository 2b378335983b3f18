"""Where every row goes, from the plan alone: no count exchange, no receive-side permutation.

A receiving rank orders its rows by instance (mains, then slots). Inside an instance rows are ordered by source rank,
those of the own domain first (`rails.receive_order`), and, per source, by the source's own order. A sending rank orders
its assignments by expert (one stable sort) and serves the instances of an expert in ascending rank. Both sides know
`quota`, so prefix sums give either end of every segment.

With two chunks, the first takes what is there first: rows of mains that do not leave their domain, in whole blocks and
as many as its buffer holds. What is left of every instance starts at a multiple of `block_rows` behind it. Rows are
*virtual*: a window [lo, lo + n) of them is what one chunk or one overflow pass holds in memory.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from topoep_jax.config import LayerConfig
from topoep_jax.dispatch.rails import receive_order
from topoep_jax.dispatch.rows import NOBODY
from topoep_jax.topology import Topology
from topoep_jax.transport import Segments


class Part(NamedTuple):
    """One rank's view of some rows of all instances: those of chunk 1, or all others; int32 throughout."""

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
    aligned: jax.Array
    """[J] rows of each of my instances, rounded up to block_rows."""


class Layout(NamedTuple):
    """One rank's view of all segments of one plan."""

    ahead: Part
    """Rows of chunk 1; none where there is one chunk."""
    rest: Part
    """All other rows."""
    origin: jax.Array
    """int32 [R, J] of all ranks: row r of an instance is virtual row origin + r, if it is not among `ahead`."""
    passes: jax.Array
    """int32 [] as in `Extent`."""


class Extent(NamedTuple):
    """The virtual rows of all ranks; int32 and equal on every rank, which needs no axis to compute it."""

    ahead: jax.Array
    """[R, J] rows of each instance that chunk 1 takes, the first ones; a multiple of block_rows."""
    ahead_start: jax.Array
    """[R, J] first virtual row of these."""
    start: jax.Array
    """[R, J] first virtual row of the others, a multiple of block_rows."""
    aligned: jax.Array
    """[R, J] the others, rounded up to block_rows."""
    passes: jax.Array
    """[] receive buffers needed to hold the fullest rank's rows, at least 1."""
    overflow_rows: jax.Array
    """[] assignments of all ranks beyond the first receive buffer."""


@functools.partial(jax.tree_util.register_dataclass, meta_fields=["num_rows"], data_fields=["dispatch", "combine"])
@dataclasses.dataclass(frozen=True)
class Moves:
    """Which rows travel to and from one receive buffer, or several in a row."""

    num_rows: int
    dispatch: Segments
    combine: Segments


@functools.partial(
    jax.tree_util.register_dataclass,
    meta_fields=["num_rows"],
    data_fields=["dispatch", "combine", "block_instance", "first_block", "filled", "hop"],
)
@dataclasses.dataclass(frozen=True)
class Window(Moves):
    """The virtual rows [lo, lo + n) of every rank: what one receive buffer holds."""

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
    ahead_rows, buffer_rows = sum(windows[:-1]), sum(windows)
    rows = quota.sum(0, dtype=jnp.int32)
    domain = np.array(config.topology.domain_of_rank)
    own = jnp.where((domain[:, None] == domain[None])[..., None], quota, 0).sum(0, dtype=jnp.int32)
    # Slots wait for the pull, and rows of other domains for their links.
    blocks = own.at[:, config.num_mains :].set(0) // config.block_rows * config.block_rows
    ahead = jnp.clip(ahead_rows - exclusive_cumsum(blocks, 1), 0, blocks)
    others = rows - ahead
    aligned = -(-others // config.block_rows) * config.block_rows
    start = ahead_rows + exclusive_cumsum(aligned, 1)
    kept = jnp.clip(buffer_rows - start, 0, others)
    end = ahead_rows + aligned.sum(1, dtype=jnp.int32).max()
    return Extent(
        ahead=ahead,
        ahead_start=exclusive_cumsum(ahead, 1),
        start=start,
        aligned=aligned,
        passes=jnp.maximum(1, -(-end // buffer_rows)).astype(jnp.int32),
        overflow_rows=(others - kept).sum(dtype=jnp.int32),
    )


def rows_before(quota: jax.Array, topology: Topology) -> jax.Array:
    """int32 [R, R, J]: rows of other sources that lie before a source's in each instance, for quota [R, R, J]."""
    order = receive_order(topology)
    rank = np.arange(len(order))
    in_order = exclusive_cumsum(quota[order.T, rank[None]], 0)  # [position, receiving rank, J]
    place = np.argsort(order, axis=1).T  # [source, receiving rank]
    return in_order[place, rank[None]]


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
    before = rows_before(quota, config.topology)
    sent = _send_order_start(omega[me], expert) + _served_by_lower_ranks(quota[me], expert, config.num_experts)
    received = exclusive_cumsum(omega, 1)[:, jnp.maximum(expert[me], 0)] + _served_below(quota, expert, me)
    origin = extent.start - extent.ahead

    def part(rows: jax.Array, skipped: jax.Array, at: jax.Array, start: jax.Array, aligned: jax.Array) -> Part:
        """Of each segment `rows` behind the `skipped` ones; they land at the virtual rows `at`: [R, R, J]."""
        return Part(
            send_in=sent + skipped[me],
            send_out=at[me],
            send_rows=rows[me],
            recv_in=received + skipped[:, me],
            recv_out=at[:, me],
            recv_rows=rows[:, me],
            start=start[me],
            aligned=aligned[me],
        )

    taken = jnp.clip(extent.ahead[None] - before, 0, quota)
    at = origin[None] + before + taken
    return Layout(
        ahead=part(taken, jnp.zeros_like(taken), extent.ahead_start[None] + before, extent.ahead_start, extent.ahead),
        rest=part(quota - taken, taken, at, extent.start, extent.aligned),
        origin=origin,
        passes=extent.passes,
    )


def come_home(config: LayerConfig, layout: Layout, place: jax.Array, ranks: jax.Array | None = None) -> jax.Array:
    """int32 like `place`: the row of each of my assignments in the send order, -1 where its result never comes.

    That of padding does not, nor what lies beyond the receive buffer, unless overflow is "loop".

    Args:
      config: the layer.
      layout: of the plan.
      place: int32 [T, K] of `send_order`.
      ranks: bool [R]: count results of these alone.
    """
    first, end = layout.ahead.send_in, reach(config, place.size)
    rows = layout.ahead.send_rows + jnp.clip(end - layout.rest.send_out, 0, layout.rest.send_rows)
    rows = rows if ranks is None else jnp.where(ranks[:, None], rows, 0)
    some = (rows > 0).astype(jnp.int32)
    edges = jnp.zeros((place.size + 1,), jnp.int32).at[first].add(some).at[first + rows].add(-some)
    return jnp.where((jnp.cumsum(edges) > 0)[place], place, NOBODY)


def reach(config: LayerConfig, num_assignments: int) -> int:
    """The virtual row before which all are executed."""
    return 2**31 - 1 if config.overflow == "loop" else sum(config.window_rows(num_assignments))


def exclusive_cumsum(values: jax.Array, axis: int) -> jax.Array:
    """Sums of what comes before each element along an axis."""
    return jnp.cumsum(values, axis, dtype=jnp.int32) - values


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


def window(part: Part, lo: jax.Array | int, num_rows: int, block_rows: int, num_instances: int) -> Window:
    """Clips segments to the virtual rows [lo, lo + num_rows) of the first `num_instances` instances.

    `lo` and `num_rows` are multiples of `block_rows`. Windows that tile the virtual rows move every row exactly once.
    """
    cut = lambda v: v[:, :num_instances]  # noqa: E731
    send = clip_segments(cut(part.send_out), cut(part.send_rows), cut(part.send_in), lo, num_rows)
    recv = clip_segments(cut(part.recv_out), cut(part.recv_rows), cut(part.recv_in), lo, num_rows)
    num_blocks = num_rows // block_rows
    first = jnp.clip((part.start - lo) // block_rows, 0, num_blocks)[:num_instances]
    last = jnp.clip((part.start + part.aligned - lo) // block_rows, 0, num_blocks)[:num_instances]
    block = jnp.arange(num_blocks, dtype=jnp.int32)[:, None]
    hit = (block >= first[None]) & (block < last[None])
    idle = part.start.shape[0]
    block_instance = jnp.where(hit.any(1), jnp.argmax(hit, 1).astype(jnp.int32), idle)
    filled = jnp.clip(part.start + part.recv_rows.sum(0, dtype=jnp.int32) - lo, 0, num_rows)[:num_instances]
    # An instance that begins beyond the window has its first block at the end.
    filled = jnp.maximum(filled - first * block_rows, 0)
    return Window(num_rows, *both_ways(send, recv), block_instance, first, filled)


def joined(first: Window, last: Window, num_ranks: int) -> Moves:
    """The rows of two windows, one behind the other."""

    def beside(ours: Segments, theirs: Segments) -> Segments:
        tables = ((v.reshape(num_ranks, -1) for v in pair) for pair in zip(ours, theirs, strict=True))
        return Segments(*(jnp.concatenate(list(pair), 1).reshape(-1) for pair in tables))

    rows, there, back = first.num_rows, last.dispatch, last.combine
    there = there._replace(output_offsets=there.output_offsets + rows)
    back = back._replace(input_offsets=back.input_offsets + rows)
    return Moves(rows + last.num_rows, beside(first.dispatch, there), beside(first.combine, back))


def both_ways(
    send: tuple[jax.Array, jax.Array, jax.Array], recv: tuple[jax.Array, jax.Array, jax.Array]
) -> tuple[Segments, Segments]:
    """Segments out and home, of (row in the window, size, row at the sender) at either end."""
    (at, size, first), (recv_at, recv_size, recv_first) = (tuple(v.reshape(-1) for v in side) for side in (send, recv))
    return Segments(first, size, at, recv_size), Segments(recv_at, recv_size, recv_first, size)


def clip_segments(
    out: jax.Array, rows: jax.Array, first: jax.Array, lo: jax.Array | int, num_rows: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(offset in the window, size, offset in the send order) of segments; all 0 where nothing is left."""
    at = jnp.clip(out - lo, 0, num_rows)
    size = jnp.clip(out + rows - lo, 0, num_rows) - at
    kept = size > 0
    return jnp.where(kept, at, 0), size, jnp.where(kept, first + (at + lo - out), 0)
