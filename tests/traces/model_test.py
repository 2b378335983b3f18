"""A trace recorded from a model holds the demand that its layers planned for, gives the same plans, and replays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from models import GLM4MoE, GLM4MoEConfig
from topoep_jax import MoE, MoEMetrics, Topology, TraceWriter, open_trace
from topoep_jax.moe import solve_layer_plan

DATA, EP, BATCH, LENGTH = 2, 4, 8, 16
DOMAINS = Topology.uniform(2, 2)
SMALL = dataclasses.replace(
    GLM4MoEConfig.tiny(),
    hidden=32,
    num_layers=3,
    head_dim=8,
    rotary_dim=4,
    ffn=16,
    shared_ffn=0,
    dense_ffn=32,
    num_experts=16,
)
OPTIONS = {"topology": DOMAINS, "planner": "topoep_paper", "block_rows": 8, "num_slots": 1}


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.asarray(jax.devices()[: DATA * EP]).reshape(DATA, EP), ("data", "ep"))


@pytest.fixture(scope="module")
def recorded(mesh, tmp_path_factory):
    """A model of a dense and two MoE layers, what it returned for two packed batches, and the trace of these."""
    model = GLM4MoE(SMALL, mesh=mesh, data_axes=("data",), moe_options=OPTIONS, dtype=jnp.float32, rngs=nnx.Rngs(0))
    config = model.layers.moe.config
    rng = np.random.default_rng(0)
    segments = np.repeat([[1, 2, 3, 0]], LENGTH // 4, axis=1) * np.ones((BATCH, 1), np.int64)
    segments[0] = 1
    batches = [jnp.asarray(rng.integers(0, SMALL.vocab, (BATCH, LENGTH)), jnp.int32) for _ in range(2)]
    path = tmp_path_factory.mktemp("recorded") / "routing.npz"
    graph, params = nnx.split(model)
    segments = jnp.asarray(segments, jnp.int32)

    @jax.jit
    def run(params, tokens, replay=None):
        return nnx.merge(graph, params)(tokens, segments=segments, replay=replay, return_routing=True)

    outputs = []
    with TraceWriter.for_layer(path, model.layers.moe, layers=(1, 2), model="small") as writer:
        for tokens in batches:
            outputs.append(run(params, tokens))
            writer.append(outputs[-1].routing)
    return config, run, params, batches, outputs, path


def test_the_trace_holds_what_each_rank_demanded(recorded, mesh):
    """Seen from the devices: the rank of each part of the batch, and from the metrics, which sum over the ranks."""
    *_, outputs, path = recorded
    with open_trace(path) as trace:
        assert (trace.info.layers, trace.info.topology) == ((1, 2), DOMAINS)
        assert (trace.info.hidden, trace.info.ffn, trace.info.model) == (SMALL.hidden, SMALL.ffn, "small")
        assert trace.steps == (0, 0, 1, 1)
        for step, output in enumerate(outputs):
            omega = np.stack([trace.omega(DATA * step + group) for group in range(DATA)])
            np.testing.assert_array_equal(omega.sum(axis=(0, 2)), output.metrics.expert_load)
            placed = jax.device_put(output.routing.expert_idx, jax.NamedSharding(mesh, jax.P(None, ("data", "ep"))))
            for shard in placed.addressable_shards:
                ((group, rank),) = np.argwhere(mesh.devices == shard.device)
                for layer, chosen in enumerate(np.asarray(shard.data).reshape(2, -1)):
                    load = np.bincount(chosen[chosen >= 0], minlength=SMALL.num_experts)
                    np.testing.assert_array_equal(omega[group, layer, rank], load)
        assert (trace.expert_idx(0) == -1).any()


def test_the_trace_gives_the_plans_of_the_run(recorded):
    config, _, _, _, outputs, path = recorded
    assignments = BATCH * LENGTH // (DATA * EP) * SMALL.top_k
    with open_trace(path) as trace:
        for step, output in enumerate(outputs):
            for layer in range(2):
                metrics = jax.tree.map(lambda field, layer=layer: field[layer], output.metrics)
                omegas = [trace.omega(DATA * step + group)[layer].astype(np.int32) for group in range(DATA)]
                check_plans(config, omegas, assignments, metrics)


def check_plans(config, omegas, assignments, metrics: MoEMetrics):
    """Plans of the groups' demand show, taken together, what the run measured of its own."""
    plans = [solve_layer_plan(config, jnp.asarray(omega), assignments) for omega in omegas]
    slots = [np.asarray(plan.slot_expert) for plan in plans]
    quota = [np.asarray(plan.quota) for plan in plans]
    mains = config.num_experts // config.num_ranks
    domain = np.asarray(config.topology.domain_of_rank)
    assert sum((slot >= 0).sum() for slot in slots) == metrics.slots_used
    assert sum((slot >= 0).sum() for slot in slots) > 0
    loads = [q.sum(axis=(0, 2)) for q in quota]
    assert max(load.max() / load.mean() for load in loads) == pytest.approx(float(metrics.imbalance), rel=1e-6)
    crossing = [q.sum(axis=2)[domain[:, None] != domain].sum() / q.sum() for q in quota]
    assert np.mean(crossing) == pytest.approx(float(metrics.inter_domain), rel=1e-6)
    assert np.mean([q[:, :, mains:].sum() / q.sum() for q in quota]) == pytest.approx(float(metrics.replica), rel=1e-6)


def test_the_trace_replays(recorded):
    """With other routers the model does, experts and plans alike, what was recorded; with its own, the same logits."""
    _, run, params, batches, outputs, path = recorded
    other = jax.tree_util.tree_map_with_path(
        lambda keys, leaf: leaf[:, :, ::-1] if "router" in jax.tree_util.keystr(keys) else leaf, params
    )
    with open_trace(path) as trace:
        replay = [jnp.asarray(trace.replay(step).reshape(2, BATCH, LENGTH, SMALL.top_k)) for step in (0, 1)]
    for tokens, recorded_idx, output in zip(batches, replay, outputs, strict=True):
        again, elsewhere = run(params, tokens, recorded_idx), run(other, tokens, recorded_idx)
        np.testing.assert_allclose(again.logits, output.logits, rtol=1e-5, atol=1e-5)
        for result in (again, elsewhere):
            np.testing.assert_array_equal(result.routing.expert_idx, output.routing.expert_idx)
            jax.tree.map(np.testing.assert_array_equal, result.metrics, output.metrics)
        assert not np.allclose(elsewhere.logits, output.logits, atol=1e-3)


def test_layers_of_a_users_own_model(tmp_path):
    """One `Routed` for each layer, in a list."""
    mesh = Mesh(np.asarray(jax.devices()[:EP]), ("ep",))
    layers = [MoE(32, 16, 8, 2, mesh=mesh, rngs=nnx.Rngs(seed), **OPTIONS) for seed in range(2)]
    x = jax.random.normal(jax.random.key(0), (EP, 6, 32))
    with TraceWriter.for_layer(tmp_path / "routing.npz", layers[0]) as writer:
        results = [layer(x, return_routing=True) for layer in layers]
        writer.append([routed for _, _, routed in results])
    with open_trace(tmp_path / "routing.npz") as trace:
        for index, (layer, (_, metrics, _)) in enumerate(zip(layers, results, strict=True)):
            check_plans(layer.config, [trace.omega(0)[index].astype(np.int32)], 12, metrics)
