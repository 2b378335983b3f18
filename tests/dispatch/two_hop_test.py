"""Tokens in two launches: the same rows in the same places as one by one, the same sums, and fewer bytes on the NIC.

Rows hold whole numbers, so that sums are exact in any order and both exchanges must agree to the bit.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.support.plans import PLAN_KINDS, many_plans
from topoep_jax import LayerConfig, Topology, init_params, moe_layer
from topoep_jax.combine import (
    combine,
    combine_own,
    combine_sums,
    gather_at_gateways,
    sum_at_gateways,
    sum_over_experts,
)
from topoep_jax.dispatch import (
    Rails,
    as_triple,
    build_layout,
    build_two_hop,
    come_home,
    dispatch,
    forward,
    gather_places,
    hop,
    pick,
    send_first,
    send_order,
    window,
)
from topoep_jax.dispatch.rails import receive_order
from topoep_jax.plan import Plan

TOPOLOGIES = {
    "two nodes": Topology.uniform(2, 4),
    "four nodes": Topology.uniform(4, 2),
    "ranks in any order": Topology((0, 1, 2, 3, 3, 2, 1, 0)),
    "domains of one rank": Topology.uniform(8, 1),
}
TOKENS, TOP_K, BLOCK, WIDTH = 19, 3, 4, 2


class Seen(NamedTuple):
    """What a rank sees of one plan, by both exchanges."""

    direct: jax.Array
    received: jax.Array
    received_two: jax.Array
    home: jax.Array
    home_two: jax.Array
    tokens_sent: jax.Array
    forwarded: jax.Array


def config_of(topology, exchange="two_hop"):
    sizes = {"hidden": 4, "ffn": 4, "num_experts": 16, "top_k": TOP_K, "num_slots": 2, "block_rows": BLOCK, "chunks": 2}
    return LayerConfig(**sizes, topology=topology, exchange=exchange, cap_factor=0.2, overflow="loop")


@functools.cache
def compiled(topology, exchange="two_hop"):
    config, rails = config_of(topology, exchange), Rails.of(topology)

    def on_rank(expert_idx, omega, slot_expert, quota):
        me = lax.axis_index("ep")
        x = (1 + me * TOKENS + jnp.arange(TOKENS)).astype(jnp.float32)[:, None] * jnp.ones((1, WIDTH))
        order, place = send_order(expert_idx, config.num_experts)
        layout = build_layout(config, omega, slot_expert, quota, expert_idx.size, "ep")
        by_token = place.reshape(TOKENS, TOP_K)
        places = gather_places(rails, by_token, "ep")
        two = build_two_hop(config, rails, layout, slot_expert, quota, order, by_token, places, "ep")
        received, received_two = [], []
        home = jnp.zeros((order.size, WIDTH))
        rows_home = jnp.zeros((two.source.size, WIDTH))
        gathered = jnp.zeros((two.copy_of.size, WIDTH))
        sizes = config.window_rows(order.size)
        ahead = window(layout.ahead, 0, sizes[0], BLOCK, config.num_mains)
        for lo, rows in [(0, sizes[0]), (sizes[0], sizes[1]), (sum(sizes), 8 * TOKENS * TOP_K)]:
            win = window(layout.rest, lo, rows, BLOCK, config.num_instances)
            win = dataclasses.replace(win, hop=hop(two, layout.rest, lo, rows)) if lo else ahead
            plain = dispatch(x[order // TOP_K], win, "ep")
            if lo:
                hopped = forward(send_first(pick(x, two.source), two, win, "ep"), win, rails.groups, "ep")[:rows]
            else:
                hopped = dispatch(pick(x, two.source), win, "ep")
            # A buffer holds anything where nobody sends.
            blocks = win.block_instance
            at = jnp.arange(rows) - jnp.append(win.first_block, 0)[jnp.repeat(blocks, BLOCK)] * BLOCK
            filled = at < jnp.append(win.filled, 0)[jnp.minimum(jnp.repeat(blocks, BLOCK), len(win.filled))]
            plain, hopped = (jnp.where(filled[:, None], rows, 0) for rows in (plain, hopped))
            received.append(plain)
            received_two.append(hopped)
            # Results that tell instances apart: 64 times the row, and 1.
            results = jnp.where(plain > 0, 64 * plain + 1, 0)
            home = combine(results, home, win, "ep")
            if lo:
                gathered = gather_at_gateways(results, gathered, win, rails.groups, "ep")
                rows_home = combine_own(results, rows_home, win, "ep")
            else:
                rows_home = combine(results, rows_home, win, "ep")
        tokens = sum_over_experts(home, come_home(config, layout, by_token))
        sums = sum_at_gateways(gathered, two)
        tokens_two = sum_over_experts(combine_sums(sums, rows_home, two, "ep"), two.sums)
        away = jnp.where(two.peer == me, 0, two.forward_rows.sum(1))
        parts = Seen(
            two.direct,
            jnp.concatenate(received),
            jnp.concatenate(received_two),
            tokens,
            tokens_two,
            two.rail.send_sizes.sum(),
            away.sum(),
        )
        return jax.tree.map(lambda part: part[None], parts)

    mesh = Mesh(np.array(jax.devices()[: topology.num_ranks]), ("ep",))
    specs = (P("ep"), P(), P(), P())
    return jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=specs, out_specs=P("ep"), check_vma=False))


NUM_PLANS = 3 * len(PLAN_KINDS)


def cases(topology):
    """(expert_idx [R T, K], omega, slot_expert, quota) of plans of every kind."""
    config, rng = config_of(topology), np.random.default_rng(7)
    omegas, slots, quotas = many_plans(rng, config, TOKENS * TOP_K, NUM_PLANS)
    for omega, slot_expert, quota in zip(omegas, slots, quotas, strict=True):
        rows = []
        for demand in omega:
            experts = np.repeat(np.arange(config.num_experts), demand)
            padded = np.concatenate([experts, np.full(TOKENS * TOP_K - experts.size, -1)])
            rows.append(rng.permutation(padded).reshape(TOKENS, TOP_K))
        yield np.concatenate(rows).astype(np.int32), omega, slot_expert, quota


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_rows_and_sums_are_those_of_the_direct_exchange(topology):
    run, bits = compiled(topology), []
    for case in cases(topology):
        seen = run(*case)
        np.testing.assert_array_equal(seen.received_two, seen.received)
        np.testing.assert_array_equal(seen.home_two, seen.home)
        bits += np.asarray(seen.direct).tolist()
        assert len(set(np.asarray(seen.direct).tolist())) == 1
        assert np.count_nonzero(np.asarray(seen.received)[..., 0]) == case[3].sum()
    assert False in bits


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_a_token_crosses_once_to_each_domain_that_it_visits(topology):
    domain, rails = np.array(topology.domain_of_rank), Rails.of(topology)
    instances = config_of(topology).num_instances
    for expert_idx, omega, slot_expert, quota in cases(topology):
        seen = compiled(topology)(expert_idx, omega, slot_expert, quota)
        if np.asarray(seen.direct)[0]:
            assert not np.asarray(seen.tokens_sent).any()
            continue
        crossing, forwarded = np.zeros(len(domain), int), np.zeros(len(domain), int)
        for source, idx in enumerate(expert_idx.reshape(len(domain), TOKENS, TOP_K)):
            plan = Plan(slot_expert, quota, None, None, None)
            instance = np.asarray(as_triple(plan, jnp.asarray(idx), jnp.ones(idx.shape), source).rerouted_idx)
            for token in instance:
                ranks = token[token >= 0] // instances
                for visited in set(domain[ranks]) - {domain[source]}:
                    gateway = rails.members[visited, rails.local[source]]
                    crossing[source] += 1
                    forwarded[gateway] += sum(r != gateway for r in ranks if domain[r] == visited)
        # A segment between domains is never empty: where no token goes, a row that nobody reads does.
        sent = np.asarray(seen.tokens_sent)
        assert (crossing <= sent).all()
        assert (sent <= crossing + rails.others.shape[1]).all()
        np.testing.assert_array_equal(seen.forwarded, forwarded)


def test_a_plan_that_fills_a_gateway_or_gains_nothing_is_direct():
    """Of four domains, when all rows go to one rank, its gateways would hold three times what they have room for."""
    topology = TOPOLOGIES["four nodes"]
    by_kind = dict(zip(PLAN_KINDS, cases(topology), strict=False))
    assert np.asarray(compiled(topology)(*by_kind["one_rank"]).direct).all()
    assert not np.asarray(compiled(topology)(*by_kind["balanced"]).direct).any()
    chosen = [bool(np.asarray(compiled(topology, "auto")(*case).direct)[0]) for case in cases(topology)]
    assert set(chosen) == {False, True}


def test_rails_join_ranks_of_one_place_in_all_domains():
    rails = Rails.of(TOPOLOGIES["ranks in any order"])
    assert rails.groups == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert rails.rails == [[0, 1, 2, 3], [7, 6, 5, 4]]
    assert rails.served[0].tolist() == [1, 2, 3]
    assert rails.served[4].tolist() == [7, 6, 5]
    assert receive_order(TOPOLOGIES["ranks in any order"])[4].tolist() == [3, 4, 0, 1, 2, 7, 6, 5]


@pytest.mark.parametrize("topology", [Topology.uniform(1, 4), Topology((0, 0, 1))])
def test_one_domain_and_uneven_ones_have_no_gateways(topology):
    assert Rails.of(topology) is None
    order = receive_order(topology)
    domain = np.array(topology.domain_of_rank)
    for rank, sources in enumerate(order):
        own = domain[sources] == domain[rank]
        assert not (~own[:-1] & own[1:]).any()
        assert all(sorted(sources[side]) == list(sources[side]) for side in (own, ~own))


def test_where_there_are_no_gateways_rows_travel_directly_and_that_is_said_once(caplog):
    config = LayerConfig(16, 8, 8, 2, Topology((0, 0, 0, 1)), block_rows=8, exchange="two_hop")
    mesh = Mesh(np.array(jax.devices()[:4]), ("ep",))
    specs = {"w": P("ep"), "router": P()}

    def lowered(config):
        layer = lambda params, x: moe_layer(params, x, axis_name="ep", config=config)[0]  # noqa: E731
        mapped = jax.shard_map(layer, mesh=mesh, in_specs=(specs, P("ep")), out_specs=P("ep"), check_vma=False)
        params = jax.eval_shape(lambda: init_params(jax.random.key(0), config))
        return jax.jit(mapped).lower(params, jax.ShapeDtypeStruct((32, 16), jnp.float32)).as_text()

    texts = [lowered(config), lowered(config), lowered(dataclasses.replace(config, exchange="direct"))]
    assert len(set(texts)) == 1
    (record,) = caplog.records
    assert "rows travel directly: two hops need two domains or more, of one size" in record.message
