"""Tokens, not rows, between domains: the tables of the exchange in two launches (docs/layer.md, "The exchange").

Launch 1 takes all ranks: rows for the own domain go straight to their instances, and a token with experts in another
domain goes there once, to its gateway (`rails`). Launch 2 stays inside domains: gateways repeat rows as the plan says.
The way home is the mirror: gateways add the rows of a token in f32, k ascending, round once, and send one row home; the
source adds own rows, k ascending, and then the sums of other domains, in f32, and rounds once.

A plan may say `direct`: then launch 1 carries every row, and launch 2 nothing.

  operand of launch 1   [A + (M - 1) T]: rows in send order, then the tokens that visit each other domain, ascending
  region of a gateway   [(M - 1) T]: the tokens of each slot, ascending
  gateway rows          [Cg]: by executing rank, instance, slot, and the source's send order

All follows from the plan and from `place` of the sources of a rail, which are gathered beside the demand.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from topoep_jax.config import LayerConfig
from topoep_jax.dispatch.layout import (
    Layout,
    Part,
    both_ways,
    clip_segments,
    come_home,
    exclusive_cumsum,
    instance_expert,
    reach,
)
from topoep_jax.dispatch.rails import Rails
from topoep_jax.dispatch.rows import NOBODY, UNREAD
from topoep_jax.transport import Segments


class TwoHop(NamedTuple):
    """One rank's view of a plan; int32 throughout."""

    direct: jax.Array
    """bool []: whether rows travel as they are. Equal on every rank."""
    source: jax.Array
    """[A + (M - 1) T] token of each row of launch 1's operand, -1 where it stays."""
    sums: jax.Array
    """[T, K + M - 1] rows of the operand that each token adds on the way home, as `rows.add` takes them."""
    copy_of: jax.Array
    """[Cg] row of the region that each gateway row repeats, -1 where there is none."""
    partial: jax.Array
    """[(M - 1) T, K] gateway rows that each row of the region adds on the way home, as `rows.add` takes them."""
    own: jax.Array
    """bool [R]: ranks whose rows launch 1 carries as rows, in either direction."""
    rail: Segments
    """[R] tokens to each rank, from the end of the operand to the region."""
    rail_home: Segments
    """[R] sums to each rank, from the region to the end of the operand."""
    peer: jax.Array
    """[G] ranks of this domain."""
    forward_in: jax.Array
    """[G, J] first gateway row of the segment from here to each instance of the domain, as `Layout` has it."""
    forward_out: jax.Array
    """[G, J] the virtual row where it lands there."""
    forward_rows: jax.Array
    """[G, J] its rows."""
    arrive_in: jax.Array
    """[G, J] first gateway row of the segment from each rank of the domain to my instances."""
    arrive_out: jax.Array
    """[G, J] the virtual row where it lands here."""
    arrive_rows: jax.Array
    """[G, J] its rows."""


class Hop(NamedTuple):
    """Segments of one window."""

    first: Segments
    """Launch 1; the region lies behind the window's rows."""
    first_home: Segments
    """Back, without the sums of tokens."""
    repeated: jax.Array
    """int32 [Cg] rows of launch 1's result that gateways repeat, as `rows.pick` takes them."""
    second: Segments
    """Launch 2, [G J]."""
    second_home: Segments


def gateway_rows(config: LayerConfig, num_assignments: int) -> int:
    """Cg, for A of one rank: rows that a gateway holds; a plan with more at any gateway is `direct`.

    Of planned routing at most 0.76 A were seen; without a plan 1.31 A, where a gateway's domain holds the hot experts.
    """
    planned = config.num_slots > 0 and config.planner != "none"
    return num_assignments if planned else num_assignments + num_assignments // 2


def gather_places(rails: Rails, place: jax.Array, axis_name: str) -> jax.Array:
    """int32 [M - 1, T, K]: `place` int32 [T, K] of the sources that this rank serves as a gateway, slot by slot."""
    everyone = lax.all_gather(place, axis_name, axis_index_groups=rails.rails)
    return everyone[jnp.asarray(rails.others)[lax.axis_index(axis_name)]]


def is_direct(config: LayerConfig, rails: Rails, quota: jax.Array, tokens: int, top_k: int) -> jax.Array:
    """bool []: whether a plan's rows travel as they are, because that is predicted to be quicker or a gateway is full.

    Times are those of the busiest rank's links, in f32; tokens that visit a domain are expected as if a token's experts
    were independent. Launch 1 drives both links at once, launch 2 follows.
    """
    domain, served = jnp.asarray(rails.domain), jnp.asarray(rails.served)
    rows = quota.sum(2, dtype=jnp.int32)  # [R, R] source, executing rank
    same = domain[:, None] == domain[None]
    to_domain = jax.ops.segment_sum(rows.T, domain, len(rails.members)).T  # [R, M]
    of_slot = to_domain[served, domain[:, None]]  # [R, M - 1], of a gateway
    full = of_slot.sum(1, dtype=jnp.int32).max() > gateway_rows(config, tokens * top_k)
    if config.exchange == "two_hop":
        return full

    def busiest(moved: jax.Array) -> jax.Array:
        away = jnp.where(jnp.eye(moved.shape[0], dtype=bool), 0, moved)
        return jnp.maximum(away.sum(0).max(), away.sum(1).max())

    far = jnp.where(same, 0, rows).astype(jnp.float32)
    near = busiest(jnp.where(same, rows, 0).astype(jnp.float32))
    visiting = tokens * (1 - (1 - of_slot.astype(jnp.float32) / (tokens * top_k)) ** top_k)
    sent = jnp.zeros(len(domain), jnp.float32).at[served].add(visiting)
    through = jnp.zeros_like(far)
    gateway = jnp.asarray(rails.members)[domain[None], jnp.asarray(rails.local)[:, None]]  # [source, executing rank]
    through = through.at[gateway, jnp.arange(len(domain))[None]].add(far)
    inter, intra = config.hardware.inter_fs_per_byte, config.hardware.intra_fs_per_byte
    rows_fs = jnp.maximum(jnp.maximum(far.sum(0).max(), far.sum(1).max()) * inter, near * intra)
    tokens_fs = jnp.maximum(jnp.maximum(visiting.sum(1).max(), sent.max()) * inter, near * intra)
    return full | (rows_fs <= tokens_fs + busiest(through) * intra)


def build_two_hop(
    config: LayerConfig,
    rails: Rails,
    layout: Layout,
    slot_expert: jax.Array,
    quota: jax.Array,
    order: jax.Array,
    place: jax.Array,
    places: jax.Array,
    axis_name: str,
) -> TwoHop:
    """Lays out both launches, seen from the calling rank.

    Args:
      config: the layer.
      rails: of its topology.
      layout: of the plan.
      slot_expert: int32 [R, N] of the plan.
      quota: int32 [R, R, J] of the plan.
      order: int32 [A] of `send_order`.
      place: int32 [T, K] of `send_order`.
      places: int32 [M - 1, T, K] of `gather_places`.
      axis_name: the expert-parallel axis.
    """
    tokens, top_k = place.shape
    assignments = tokens * top_k
    me = lax.axis_index(axis_name)
    direct = is_direct(config, rails, quota, tokens, top_k)
    domain, others = jnp.asarray(rails.domain), jnp.asarray(rails.others)[me]
    expert = instance_expert(slot_expert, config.num_experts).reshape(-1)
    filling = jnp.argsort(jnp.where(expert < 0, config.num_experts, expert), stable=True).astype(jnp.int32)
    instance, _ = _instances(place, quota[me], filling)
    num_instances = quota.shape[2]
    here = jnp.asarray(rails.local)[me]
    home = jnp.append(jnp.repeat(domain, num_instances), -1)  # domain of each instance; -1 of none

    # As a source: tokens to each other domain, and what a token adds.
    token, row, sent = _compact((home[instance][None] == others[:, None, None]).any(2))
    begin = jnp.arange(len(rails.members) - 1, dtype=jnp.int32)[:, None] * tokens
    is_row = (home[instance] == domain[me]) | (direct & (instance < home.size - 1))
    own = direct | (domain == domain[me])
    domain_sums = jnp.where((row >= 0) & ~direct, assignments + begin + row, NOBODY).T
    # No segment between domains is empty while tokens travel: XLA's kernel waited for some that never came.
    sends = jnp.where(direct, 0, jnp.maximum(sent, 1))
    travels = jnp.arange(tokens, dtype=jnp.int32)[None] < sends[:, None]

    gateway = _as_gateway(config, rails, layout, quota, filling, places, home, me, direct)
    # My slot at each gateway, and my place among the other domains of each source: both leave out the own domain.
    slot = jnp.where(domain[me] < others, domain[me], domain[me] - 1)
    held, begin = gateway.held, begin[:, 0]
    # A source's gateway in a domain is the source that it serves as one.
    num_ranks, gates = len(domain), jnp.asarray(rails.served)[me]
    # Segments to and from gateways, all at once: tokens, and sums on the way home.
    tables = jnp.stack([assignments + begin, sends, slot * tokens, held, begin, assignments + slot * tokens], 1)
    at, sends, lands, held, begin, home_at = jnp.zeros((num_ranks, 6), jnp.int32).at[gates].set(tables).T
    return TwoHop(
        direct=direct,
        source=jnp.concatenate(
            [
                jnp.where(is_row.reshape(-1)[order], order // top_k, NOBODY),
                jnp.where(travels, token, NOBODY).reshape(-1),
            ]
        ),
        sums=jnp.concatenate([come_home(config, layout, place, own), domain_sums], 1),
        copy_of=gateway.copy_of,
        partial=gateway.partial,
        own=own,
        rail=Segments(at, sends, lands, held),
        rail_home=Segments(begin, held, home_at, sends),
        peer=gateway.peer,
        forward_in=gateway.first[here],
        forward_out=gateway.lands[here],
        forward_rows=jnp.where(direct, 0, gateway.rows[here]),
        arrive_in=gateway.first[:, here],
        arrive_out=gateway.lands[:, here],
        arrive_rows=jnp.where(direct, 0, gateway.rows[:, here]),
    )


class _Gateway(NamedTuple):
    """What a rank does for the sources that it serves; G ranks in its domain."""

    peer: jax.Array
    """[G] ranks of the domain."""
    rows: jax.Array
    """[G, G, J] rows from each gateway of the domain to each of its ranks and their instances."""
    first: jax.Array
    """[G, G, J] first gateway row of these."""
    lands: jax.Array
    """[G, G, J] the virtual row where they land."""
    copy_of: jax.Array
    partial: jax.Array
    held: jax.Array
    """[M - 1] rows of each slot."""


def _as_gateway(
    config: LayerConfig,
    rails: Rails,
    layout: Layout,
    quota: jax.Array,
    filling: jax.Array,
    places: jax.Array,
    home: jax.Array,
    me: jax.Array,
    direct: jax.Array,
) -> _Gateway:
    tokens, top_k = places.shape[1:]
    num_ranks, num_instances = quota.shape[0], quota.shape[2]
    domain, local = jnp.asarray(rails.domain)[me], jnp.asarray(rails.local)
    served, peer, here = jnp.asarray(rails.served)[me], jnp.asarray(rails.members)[domain], local[me]
    of_slot = quota[jnp.asarray(rails.served)[peer]][:, :, peer]  # [G, M - 1, G, J]
    rows = of_slot.sum(1, dtype=jnp.int32)
    first = exclusive_cumsum(rows.reshape(len(peer), -1), 1).reshape(rows.shape)
    own_rows = quota[peer][:, peer].sum(0, dtype=jnp.int32)
    lands = (layout.origin[peer] + own_rows)[None] + exclusive_cumsum(rows, 0)
    instances, positions = jax.vmap(_instances, (0, 0, None))(places, quota[served], filling)
    segment = first[here][None] + exclusive_cumsum(of_slot[here], 0)  # [M - 1, G, J]
    visits = home[instances] == domain
    inside = local[jnp.minimum(instances // num_instances, num_ranks - 1)]
    slot = jnp.arange(len(served), dtype=jnp.int32)[:, None, None]
    at = segment[slot, inside, instances % num_instances] + positions
    at = jnp.where(visits & ~direct, at, NOBODY)
    token, row, held = _compact(visits.any(2))
    held = jnp.where(direct, 0, jnp.maximum(held, 1))
    capacity = gateway_rows(config, tokens * top_k)
    region = jnp.broadcast_to((slot[..., 0] * tokens + row)[..., None], at.shape)
    where = jnp.where(at >= 0, at, capacity).reshape(-1)
    copy_of = jnp.full((capacity,), NOBODY, jnp.int32).at[where].set(region.reshape(-1), mode="drop")
    # What lies beyond the receive buffers is executed by nobody.
    executed = first[here] + jnp.clip(reach(config, tokens * top_k) - lands[here], 0, rows[here])
    executed = executed[inside, instances % num_instances]
    added = jnp.take_along_axis(jnp.where(at < executed, at, NOBODY), token[..., None], 1)
    beyond = jnp.arange(tokens)[None] >= held[:, None]
    partial = jnp.where(beyond[..., None], UNREAD, added)
    return _Gateway(peer, rows, first, lands, copy_of, partial.reshape(-1, top_k), held)


def hop(two: TwoHop, part: Part, lo: jax.Array | int, num_rows: int) -> Hop:
    """Both launches, clipped to the virtual rows [lo, lo + num_rows)."""
    own = two.own[:, None]
    send = clip_segments(part.send_out, jnp.where(own, part.send_rows, 0), part.send_in, lo, num_rows)
    recv = clip_segments(part.recv_out, jnp.where(own, part.recv_rows, 0), part.recv_in, lo, num_rows)
    forward = clip_segments(two.forward_out, two.forward_rows, two.forward_in, lo, num_rows)
    arrive = clip_segments(two.arrive_out, two.arrive_rows, two.arrive_in, lo, num_rows)
    first, first_home = both_ways(send, recv)
    repeated = jnp.where(two.copy_of >= 0, two.copy_of + num_rows, NOBODY)
    return Hop(_with_tokens(first, two, num_rows), first_home, repeated, *both_ways(forward, arrive))


def _with_tokens(segments: Segments, two: TwoHop, landing: int) -> Segments:
    """Launch 1 with tokens in the first segment of each gateway, which has no rows; the region begins at `landing`."""
    tokens = two.rail._replace(output_offsets=two.rail.output_offsets + landing)
    num_ranks = len(two.own)

    def mix(ours: jax.Array, theirs: jax.Array) -> jax.Array:
        table = ours.reshape(num_ranks, -1)
        first = jnp.where(two.own, table[:, 0], theirs)
        return jnp.concatenate([first[:, None], table[:, 1:]], 1).reshape(-1)

    return Segments(*(mix(ours, theirs) for ours, theirs in zip(segments, tokens, strict=True)))


def _instances(place: jax.Array, quota: jax.Array, filling: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Instance of each of a source's assignments, R J for padding, and its position in the source's segment there."""
    end = jnp.cumsum(quota.reshape(-1)[filling], dtype=jnp.int32)
    at = jnp.searchsorted(end, place, side="right", method="scan_unrolled").astype(jnp.int32)
    at = jnp.minimum(at, end.size - 1)
    begin = jnp.where(at > 0, end[at - 1], 0)
    return jnp.where(place < end[-1], filling[at], end.size), place - begin


def _compact(visits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of bool [n, T]: token of each row [n, T] (0 beyond), row of each token (-1: none), and rows [n]."""
    count, tokens = visits.shape
    row = jnp.cumsum(visits, 1, dtype=jnp.int32) - 1
    token = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), visits.shape)
    group = jnp.arange(count, dtype=jnp.int32)[:, None]
    listed = jnp.zeros(visits.shape, jnp.int32).at[group, jnp.where(visits, row, tokens)].set(token, mode="drop")
    return listed, jnp.where(visits, row, -1), visits.sum(1, dtype=jnp.int32)
