"""What two hops put on the NIC and on NVLink, of real draws: the program's segments against a count of tokens.

The default tier takes six draws; `-m full` takes all 90: three models, five skews, three planners, two seeds.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.support.cases import SKEWS, named
from topoep_jax import LayerConfig
from topoep_jax.dispatch import Rails, as_triple, build_layout, build_two_hop, gather_places, send_order
from topoep_jax.dispatch.two_hop import gateway_rows
from topoep_jax.moe import solve_layer_plan
from topoep_jax.plan import Plan
from topoep_jax.synthetic import biased_demand, plain_top_k

MODELS = ("qwen3_30b", "glm45_air", "deepseek_v2")
PLANNERS = ("none", "topoep_paper", "topoep")
SEEDS = (5, 6)
SAMPLED = {
    ("qwen3_30b", 0, "topoep", 5),
    ("qwen3_30b", -1, "topoep", 6),
    ("glm45_air", 0, "none", 5),
    ("glm45_air", -2, "topoep", 5),
    ("deepseek_v2", -0.5, "topoep_paper", 6),
    ("deepseek_v2", -4, "topoep", 5),
}
DRAWS = [(m, skew, planner, seed) for m in MODELS for skew in SKEWS for planner in PLANNERS for seed in SEEDS]


def config_of(model, planner="topoep"):
    """Counts do not depend on widths, and plans take those of the model."""
    case = named(model)
    sizes = case.hidden, case.ffn, case.num_experts, case.top_k
    return LayerConfig(*sizes, case.topology, num_slots=case.num_slots, planner=planner, exchange="two_hop")


@functools.cache
def program(model, planner):
    """Tokens [R, R] from each rank to each other in launch 1, own rows [R, R], and rows [R, R] in launch 2."""
    config = config_of(model, planner)
    rails = Rails.of(config.topology)

    def on_rank(expert_idx, omega, slot_expert, quota):
        order, place = send_order(expert_idx, config.num_experts)
        layout = build_layout(config, omega, slot_expert, quota, expert_idx.size, "ep")
        place = place.reshape(expert_idx.shape)
        places = gather_places(rails, place, "ep")
        two = build_two_hop(config, rails, layout, slot_expert, quota, order, place, places, "ep")
        own = jnp.where(two.own, quota[lax.axis_index("ep")].sum(1), 0)
        forwarded = jnp.zeros(config.num_ranks, jnp.int32).at[two.peer].set(two.forward_rows.sum(1))
        return two.direct[None], two.rail.send_sizes[None], own[None], forwarded[None]

    mesh = Mesh(np.array(jax.devices()[: config.num_ranks]), ("ep",))
    specs = (P("ep"), P(), P(), P())
    return jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=specs, out_specs=P("ep"), check_vma=False))


@functools.cache
def rerouted(model):
    triple = lambda plan, idx, rank: as_triple(plan, idx, jnp.ones(idx.shape), rank).rerouted_idx  # noqa: E731
    return jax.jit(triple)


def drawn(model, skew, seed):
    """(expert_idx int32 [R, T, K], omega int32 [R, E]) of one draw."""
    chosen = []

    def select(logits, top_k):
        chosen.append(plain_top_k(logits, top_k))
        return chosen[-1]

    omega = biased_demand(named(model), [skew], seed, select=select)[skew]
    return np.stack(chosen).astype(np.int32), omega.astype(np.int32)


def counted(config, expert_idx, plan, model):
    """The same three tables as `program`, from where each assignment runs."""
    domain = np.array(config.topology.domain_of_rank)
    members = [np.flatnonzero(domain == d) for d in range(config.topology.num_domains)]
    tokens, own, forwarded = (np.zeros((len(domain), len(domain)), np.int64) for _ in range(3))
    for source, idx in enumerate(expert_idx):
        local = int(np.flatnonzero(members[domain[source]] == source)[0])
        rank = np.asarray(rerouted(model)(plan, idx, source)) // config.num_instances
        for visited, ranks in enumerate(members):
            there = np.isin(rank, ranks)
            rows = np.bincount(rank[there], minlength=len(domain))
            if visited == domain[source]:
                own[source] += rows
            else:
                tokens[source, ranks[local]] = there.any(1).sum()
                forwarded[ranks[local]] += rows
    return tokens, own, forwarded


def busiest(moved):
    away = moved * ~np.eye(len(moved), dtype=bool)
    return max(away.sum(0).max(), away.sum(1).max())


@pytest.mark.parametrize(
    "draw", [pytest.param(d, marks=() if d in SAMPLED else pytest.mark.full, id=" ".join(map(str, d))) for d in DRAWS]
)
def test_the_segments_of_a_real_draw_are_what_its_tokens_ask_for(draw):
    model, skew, planner, seed = draw
    config = config_of(model, planner)
    expert_idx, omega = drawn(model, skew, seed)
    plan = solve_layer_plan(config, omega, expert_idx[0].size)
    plan = Plan(*map(np.asarray, plan))
    tokens = expert_idx.reshape(-1, config.top_k)
    run = program(model, "none" if planner == "none" else "topoep")
    direct, sent, own, forwarded = map(np.asarray, run(tokens, omega, plan.slot_expert, plan.quota))
    by_tokens = counted(config, expert_idx, plan, model)
    if direct.any():
        assert direct.all()
        rows = by_tokens[2].sum(1)
        assert rows.max() > gateway_rows(config, expert_idx[0].size), "only a plan that overfills a gateway is direct"
        return
    np.testing.assert_array_equal(own, by_tokens[1])
    np.testing.assert_array_equal(forwarded, by_tokens[2])
    for theirs, ours in ((by_tokens[0], sent), (by_tokens[1] + by_tokens[2], own + forwarded)):
        assert busiest(ours) == pytest.approx(busiest(theirs), rel=0.01, abs=config.topology.num_domains)
