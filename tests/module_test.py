"""The layer as users meet it: Flax modules, larger meshes, scan, remat, accumulation, replay, drop, bad input."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import topoep_jax
from tests.moe_test import NODES, Scenario, error, layer, make_inputs, run_on_mesh
from tests.moe_test import Program as LayerProgram
from tests.support.dense import dense_layer
from tests.support.moe_forms import FORMS, SIZES
from topoep_jax import Forced, Routed, Status, Topology, balance, init_params, moe_layer

MESH = Mesh(np.array(jax.devices()[:8]), ("ep",))


@pytest.fixture(params=FORMS)
def make_moe(request):
    """Makes the layer in a form; outside of jit the second form takes the program that the first one compiled."""
    return lambda mesh=MESH, **options: FORMS[request.param](mesh, **options)


def tokens(*shape, seed=0, skew=2.0):
    """Tokens with one constant feature, which makes the router prefer some experts."""
    x = np.random.default_rng(seed).normal(size=(*shape, SIZES["hidden"])).astype(np.float32)
    x[..., 0] = skew
    return jnp.asarray(x)


def choices(moe, x, mask=None):
    """The experts a qwen3 router picks, computed here."""
    logits = x.reshape(-1, x.shape[-1]) @ moe.params["router"]
    chosen = jax.lax.top_k(logits, SIZES["top_k"])[1].astype(jnp.int32)
    return chosen if mask is None else jnp.where(mask.reshape(-1)[:, None], chosen, -1)


def dense_of(moe, x, chosen):
    return dense_layer(moe.params, x.reshape(-1, x.shape[-1]), moe.config, chosen).reshape(x.shape)


def test_a_batch_of_sequences_with_a_mask(make_moe):
    moe, x = make_moe(), tokens(8, 5)
    mask = jnp.asarray(np.random.default_rng(1).random((8, 5)) < 0.7)
    y, metrics, routed = moe(x, mask, return_routing=True)
    valid = jnp.where(mask[..., None], x, 0)
    want = dense_of(moe, valid, choices(moe, x, mask))
    assert error(y, want) <= 2e-5
    np.testing.assert_array_equal(routed.expert_idx.reshape(40, -1), choices(moe, x, mask))
    np.testing.assert_allclose(routed.logits, valid @ moe.params["router"], atol=1e-5)
    assert metrics.expert_load.sum() == mask.sum() * SIZES["top_k"]
    assert metrics.imbalance <= metrics.imbalance_before
    assert metrics.replica > 0
    assert moe.params["w"].sharding.spec[0] == "ep"


def test_padding_may_hold_nan(make_moe):
    moe, x = make_moe(), tokens(8, 4)
    mask = jnp.ones((8, 4), bool).at[3, 2].set(False)

    def loss(params, x):
        y, metrics = moe.apply(params, x, mask)
        return (y**2).sum(), metrics

    run = jax.value_and_grad(loss, has_aux=True)
    (clean, _), clean_grads = run(moe.params, x)
    (dirty, metrics), grads = run(moe.params, x.at[3, 2].set(jnp.nan))
    assert clean == dirty
    assert not metrics.status & Status.BAD_INPUT
    jax.tree.map(np.testing.assert_array_equal, grads, clean_grads)


@pytest.mark.parametrize("axis_types", ["auto", pytest.param("explicit", marks=pytest.mark.full)])
def test_data_parallel_groups_plan_on_their_own_and_share_gradients(make_moe, axis_types):
    kind = jax.sharding.AxisType.Auto if axis_types == "auto" else jax.sharding.AxisType.Explicit
    mesh = Mesh(np.array(jax.devices()[:16]).reshape(2, 4, 2), ("data", "ep", "tensor"), axis_types=(kind,) * 3)
    moe = make_moe(mesh, topology=Topology.uniform(2, 2), data_axes=("data",))
    x = tokens(8, 6)

    def loss(params, x):
        y, metrics, routed = moe.apply(params, x, return_routing=True)
        return (y**2).sum() + 100 * balance.expert_loss(routed), (y, metrics)

    with jax.set_mesh(mesh):  # Else sums of the loss over explicit axes need a jit.
        (_, (y, metrics)), grads = jax.value_and_grad(loss, has_aux=True)(moe.params, x)
    # Off the mesh, whose explicit axes would ask the reference for shardings of its own.
    params = {name: jnp.asarray(np.asarray(value)) for name, value in moe.params.items()}
    chosen = jax.lax.top_k(x.reshape(48, 16) @ params["router"], SIZES["top_k"])[1].astype(jnp.int32)

    def dense_loss(params, x):
        x = x.reshape(-1, 16)
        uneven = balance.expert_loss(Routed(chosen, x @ params["router"]))
        return (dense_layer(params, x, moe.config, chosen) ** 2).sum() + 100 * uneven

    want = jax.grad(dense_loss)(params, x)
    assert error(y.reshape(48, 16), dense_layer(params, x.reshape(48, 16), moe.config, chosen)) <= 2e-5
    assert error(grads["w"], want["w"]) <= 2e-5
    assert error(grads["router"], want["router"]) <= 2e-5
    assert metrics.expert_load.sum() == 8 * 6 * SIZES["top_k"]
    assert metrics.imbalance.shape == ()


@pytest.mark.parametrize(
    ("form", "exchange"),
    [
        ("nnx", "direct"),
        pytest.param("linen", "direct", marks=pytest.mark.full),
        pytest.param("nnx", "two_hop", marks=pytest.mark.full),
    ],
)
def test_scan_over_layers_remat_and_gradient_accumulation_on_a_mesh_of_four_axes(form, exchange):
    """Layers in a scan under remat, microbatches accumulated in an outer scan, two chunks and overflow, in one jit."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 4, 2), ("stage", "data", "ep", "tensor"))
    tight = {"chunks": 2, "cap_factor": 0.05, "block_rows": 4, "exchange": exchange}
    moe = FORMS[form](mesh, topology=Topology.uniform(2, 2), data_axes=("data",), **tight)
    config = moe.config
    keys = jax.random.split(jax.random.key(3), 4)
    params = jax.vmap(lambda key: init_params(key, config))(keys)
    batches = tokens(2, 8, 16, seed=4)

    def model(apply, params, x):
        @jax.checkpoint
        def block(x, layer_params):
            y, passes = apply(layer_params, x)
            return x + 0.5 * y, passes

        return jax.lax.scan(block, x, params)

    def accumulated(apply, params, batches):
        def loss(params, x):
            y, passes = model(apply, params, x)
            return (y**2).mean(), passes

        def add(total, x):
            (value, passes), grads = jax.value_and_grad(loss, has_aux=True)(params, x)
            return jax.tree.map(jnp.add, total, (value, grads)), passes

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        return jax.jit(lambda params, batches: jax.lax.scan(add, zeros, batches))(params, batches)

    def planned_apply(layer_params, x):
        y, metrics = moe.apply(layer_params, x)
        return y, metrics.passes

    def dense_apply(layer_params, x):
        flat = x.reshape(-1, config.hidden)
        chosen = jax.lax.top_k(flat @ layer_params["router"], config.top_k)[1].astype(jnp.int32)
        return dense_layer(layer_params, flat, config, chosen).reshape(x.shape), jnp.ones((), jnp.int32)

    placed = {
        name: jax.device_put(params[name], jax.sharding.NamedSharding(mesh, spec))
        for name, spec in {"w": P("stage", "ep"), "router": P("stage")}.items()
    }
    sharded = jax.device_put(batches, jax.sharding.NamedSharding(mesh, P(None, ("data", "ep"))))
    (loss, grads), passes = accumulated(planned_apply, placed, sharded)
    (want_loss, want_grads), _ = accumulated(dense_apply, params, batches)
    assert passes.max() > 1, "some layer should overflow"
    assert abs(loss - want_loss) <= 2e-6 * abs(want_loss)
    assert error(grads["w"], want_grads["w"]) <= 2e-5
    assert error(grads["router"], want_grads["router"]) <= 2e-5


def test_replay_reproduces_the_output_and_its_padding_adds_no_load(make_moe):
    moe, x = make_moe(), tokens(8, 5)
    chosen = choices(moe, x)
    y, metrics = moe(x)
    replayed, replayed_metrics = moe(x, replay=chosen.reshape(8, 5, -1))
    assert error(replayed, y) <= 2e-6
    np.testing.assert_array_equal(metrics.expert_load, replayed_metrics.expert_load)
    padded, padded_metrics = moe(x, replay=chosen.at[:, 1].set(-1).reshape(8, 5, -1))
    assert padded_metrics.expert_load.sum() == 40 * 2
    assert error(padded, dense_of(moe, x, chosen.at[:, 1].set(-1))) > 0.1, "two experts are not three"


def test_forced_routing_sets_the_imbalance_whatever_the_router_says(make_moe):
    moe, x = make_moe(forced=Forced(-4.0, seed=1)), tokens(8, 64)
    _, first = moe(x, layer=2, step=0)
    _, second = moe(x, layer=2, step=1)
    assert first.imbalance_before > 2
    hot = jnp.argsort(-first.expert_load)[:3]
    assert 2 * second.expert_load[hot].sum() > second.expert_load.sum(), "a negative skew keeps its bias over steps"
    assert (first.expert_load != second.expert_load).any(), "the noise is drawn anew"


def test_drop_keeps_what_fits_and_counts_the_rest():
    program = LayerProgram("drop", layer(NODES, 16, 3, 0, cap_factor=0.02, block_rows=4), 32)
    dropping = dataclasses.replace(program.config, overflow="drop")
    params, x, mask, _ = make_inputs(program, Scenario("skewed", skew=3.0))
    run = lambda config: jax.jit(lambda p, x, m: run_on_mesh(config, p, x, m))(params, x, mask)  # noqa: E731
    y_all, all_metrics, chosen = run(program.config)
    y, metrics, _ = run(dropping)
    assert all_metrics.dropped_rows[0] == 0
    assert metrics.dropped_rows[0] == metrics.overflow_rows[0] == all_metrics.overflow_rows[0] > 0
    assert metrics.passes[0] == 1 < all_metrics.passes[0]
    # Without replicas a rank serves its experts in order, sources of its own node first: the first rows fit, the
    # rest are dropped.
    kept = np.array(chosen)
    (buffer_rows,) = program.config.window_rows(32 * 3)
    for rank in range(8):
        row = 0
        for expert in (2 * rank, 2 * rank + 1):
            row = -(-row // 4) * 4
            asked = np.flatnonzero(kept.reshape(-1) == expert)
            for assignment in sorted(asked, key=lambda a: (a // kept[0].size // 32 // 4 != rank // 4, a)):
                if row >= buffer_rows:
                    kept.reshape(-1)[assignment] = -2
                row += 1
    assert (kept == -2).sum() == metrics.dropped_rows[0]
    weights = jax.nn.softmax(jnp.take_along_axis(x @ params["router"], jnp.maximum(chosen, 0), 1), axis=1)
    lost = jnp.where(jnp.asarray(kept) == -2, weights, 0.0)
    w = params["w"].astype(jnp.float32)
    gate, up = jnp.split(jnp.einsum("th,ehf->tef", x, w[:, :256].reshape(16, 16, 16)), 2, axis=-1)
    per_expert = jnp.einsum("tef,efh->teh", jax.nn.silu(gate) * up, w[:, 256:].reshape(16, 8, 16))
    of_chosen = jnp.take_along_axis(per_expert, jnp.maximum(chosen, 0)[:, :, None], 1)
    missing = (lost[:, :, None] * of_chosen).sum(1)
    assert error(y_all - y, missing) <= 2e-5


def test_nan_logits_stop_with_a_reason_and_never_become_expert_zero(make_moe):
    moe, x = make_moe(), tokens(8, 4)
    bad = x.at[2, 1, 3].set(jnp.nan)
    with pytest.raises(ValueError, match="NaN"):
        moe(bad)
    y, metrics = jax.jit(moe.apply)(moe.params, bad)
    assert metrics.status & Status.BAD_INPUT
    assert (metrics.expert_load >= 0).all() and metrics.slots_used == 0
    shares = (metrics.imbalance, metrics.imbalance_before, metrics.inter_domain, metrics.replica)
    assert all(bool(jnp.isfinite(share)) and share >= 0 for share in shares)
    np.testing.assert_array_equal(y, jnp.zeros_like(y))


def test_no_token_anywhere_gives_zeros(make_moe):
    moe, x = make_moe(), tokens(8, 4)
    y, metrics = moe(x, jnp.zeros((8, 4), bool))
    np.testing.assert_array_equal(y, jnp.zeros_like(y))
    assert metrics.imbalance == metrics.imbalance_before == 1.0
    assert metrics.status == Status.CAP_MET | Status.EMPTY


def test_a_mesh_that_does_not_fit_is_named(make_moe):
    with pytest.raises(ValueError, match="no axis 'expert'"):
        make_moe(axis="expert")
    with pytest.raises(ValueError, match="no axis 'data'"):
        make_moe(data_axes=("data",))
    with pytest.raises(ValueError, match="the topology describes 4 ranks, but axis 'ep' of the mesh has 8"):
        make_moe(topology=Topology.uniform(2, 2))
    with pytest.raises(ValueError, match="37 tokens, which do not divide among the 8 ranks"):
        make_moe()(tokens(37))


def test_shapes_that_do_not_fit_are_named():
    config = layer(NODES, 16, 3, 2)
    params = init_params(jax.random.key(0), config)

    def trace(params, x, config=config, **arguments):
        specs = {name: P("ep") if name == "w" else P() for name in params}
        run = lambda p, x: moe_layer(p, x, config=config, **({"axis_name": "ep"} | arguments))[0]  # noqa: E731
        jax.eval_shape(jax.shard_map(run, mesh=MESH, in_specs=(specs, P("ep")), out_specs=P("ep")), params, x)

    with pytest.raises(ValueError, match=r"x has shape \(2, 15\), but \[tokens, 16\] is needed"):
        trace(params, jnp.zeros((16, 15)))
    with pytest.raises(ValueError, match=r"params\['router'\] must have shape \(16, 16\)"):
        trace(params | {"router": jnp.zeros((16, 8))}, jnp.zeros((16, 16)))
    with pytest.raises(ValueError, match=r"params\['router'\] must have shape .*, got nothing"):
        trace({"w": params["w"]}, jnp.zeros((16, 16)))
    with pytest.raises(ValueError, match=r"params\['w'\] has dtype int32"):
        trace(params | {"w": params["w"].astype(jnp.int32)}, jnp.zeros((16, 16)))
    with pytest.raises(ValueError, match=r"mask has shape \(2, 1\), but \(2,\) is needed"):
        trace(params, jnp.zeros((16, 16)), mask=jnp.ones((2, 1), bool))
    with pytest.raises(ValueError, match="there is no axis 'data' here: call moe_layer inside"):
        trace(params, jnp.zeros((16, 16)), axis_name="data")
    with pytest.raises(ValueError, match="there is no axis 'ep' here: call moe_layer inside"):
        moe_layer(params, jnp.zeros((16, 16)), axis_name="ep", config=config)
    with pytest.raises(ValueError, match="config is dict, but a LayerConfig is needed"):
        trace(params, jnp.zeros((16, 16)), {})
    with pytest.raises(ValueError, match="axis 'ep' has 8 ranks, but the layer's topology describes 4"):
        trace(params, jnp.zeros((16, 16)), dataclasses.replace(config, topology=Topology.uniform(2, 2)))


def test_arguments_of_another_kind_are_named(make_moe):
    one = jax.devices()[0]
    for option, message in (
        ({"mesh": None}, "mesh=None must be a jax.sharding.Mesh"),
        ({"mesh": jax.devices()[:8]}, "must be a jax.sharding.Mesh, as in"),
        ({"axis": 0}, "no axis 0"),
        ({"data_axes": None}, "data_axes=None must be a tuple"),
        ({"topology": (0,) * 8}, "must be a Topology, as in"),
        ({"hardware": {}}, "hardware={} must be a Hardware"),
        ({"router_options": 0}, "router_options=0 must be a dict"),
    ):
        with pytest.raises(ValueError, match=message):
            make_moe(**option)
    moe, x = make_moe(), tokens(8)
    with pytest.raises(ValueError, match=r"x was put on .*, but the mesh of the layer has 8 devices"):
        moe(jax.device_put(x, one))
    with pytest.raises(ValueError, match="mask was put on"):
        moe(x, jax.device_put(jnp.ones(8, bool), one))
    with pytest.raises(ValueError, match=r"params\['router'\] was put on"):
        moe.apply(moe.params | {"router": jax.device_put(np.zeros((16, 16), np.float32), one)}, x)
    with pytest.raises(ValueError, match="mask is int32, but bool is needed"):
        moe(x, jnp.ones(8, jnp.int32))
    with pytest.raises(ValueError, match="x is int32, but an array of floats is needed"):
        moe(np.ones((8, 16), np.int32))
    with pytest.raises(ValueError, match=r"step=1\.5 must be one integer"):
        moe(x, step=1.5)
    with pytest.raises(ValueError, match=r"transport.init\(mesh, 'ep', configs=layer.config\) before the layer, or"):
        make_moe(transport="device")(x)


def test_a_source_of_parameters_of_another_kind_is_named():
    for rngs in (jax.random.key(0), 0, None):
        with pytest.raises(ValueError, match=r"but nnx\.Rngs is needed"):
            topoep_jax.MoE(**SIZES, mesh=MESH, rngs=rngs)
    config = layer(NODES, 16, 3, 2)
    with pytest.raises(ValueError, match="key=0 must be a key"):
        init_params(0, config)
    with pytest.raises(ValueError, match="config is dict, but a LayerConfig is needed"):
        init_params(jax.random.key(0), {})


def test_token_axes_must_be_those_of_x(make_moe):
    moe, x = make_moe(), tokens(4, 6)
    with pytest.raises(ValueError, match=r"mask has shape \(6, 4\), but \(4, 6\) is needed"):
        moe(x, jnp.ones((6, 4), bool))
    with pytest.raises(ValueError, match=r"replay has shape \(6, 4, 3\), but \(4, 6, 3\) is needed"):
        moe(x, replay=jnp.zeros((6, 4, 3), jnp.int32))
    with pytest.raises(ValueError, match="expert_idx holds expert 4294967296"):
        moe(x, replay=np.full((4, 6, 3), 2**32))
    with pytest.raises(ValueError, match=r"x has shape \(4, 6, 15\)"):
        moe(jnp.zeros((4, 6, 15)))
    with pytest.raises(ValueError, match="0 tokens"):
        moe(tokens(0, 6))
    with pytest.raises(ValueError, match="must be a float dtype"):
        make_moe(dtype=jnp.int32)
    with pytest.raises(ValueError, match="dtype=bf16 must be a float dtype"):
        make_moe(dtype="bf16")
    with pytest.raises(ValueError, match="x is complex64, but an array of floats is needed"):
        moe(tokens(8).astype(jnp.complex64))
    with pytest.raises(ValueError, match="x is list, but an array of floats is needed"):
        moe([[0.0] * 16])
    with pytest.raises(ValueError, match="data_axes='ep' must be a tuple"):
        make_moe(data_axes="ep")


def test_a_broken_correction_bias_never_becomes_expert_zero():
    config = layer(NODES, 16, 3, 2, router="glm4")
    params = init_params(jax.random.key(0), config)
    run = jax.jit(lambda p, x: run_on_mesh(config, p, x, jnp.ones((64,), bool)))
    for bad in (jnp.nan, -jnp.inf):
        broken = {**params, "correction_bias": params["correction_bias"].at[5].set(bad)}
        y, metrics, _ = run(broken, tokens(64))
        assert (metrics.status & Status.BAD_INPUT).all(), bad
        np.testing.assert_array_equal(y, jnp.zeros_like(y))


def test_explicit_mesh_with_a_sharded_inner_token_axis(make_moe):
    mesh = Mesh(np.array(jax.devices()[:8]), ("ep",), axis_types=(jax.sharding.AxisType.Explicit,))
    moe, x = make_moe(mesh), tokens(2, 8)
    sharded = jax.device_put(x, jax.sharding.NamedSharding(mesh, P(None, "ep")))
    y, _, routed = moe(sharded, return_routing=True)
    assert y.sharding.spec[:2] == routed.expert_idx.sharding.spec[:2] == (None, "ep")
    want, _ = make_moe()(x)
    np.testing.assert_array_equal(y, want)


def test_the_receive_buffer_never_exceeds_all_assignments():
    config = layer(NODES, 16, 3, 2, cap_factor=1e300)
    assert config.cap_rows(24) == 8 * 24 + 4 * 8
