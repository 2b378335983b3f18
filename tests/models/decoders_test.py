"""The three models: the same logits however they are spread, cut into stages, packed, replayed or made again."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import MODEL_TYPES, Qwen3MoE, Qwen3MoEConfig, state_shardings
from topoep_jax import Status

BATCH, LENGTH = 8, 12
FSDP = ("data", "ep")


def mesh_of(data: int, ep: int) -> Mesh:
    return Mesh(np.asarray(jax.devices()[: data * ep]).reshape(data, ep), ("data", "ep"))


def model_of(kind: str, mesh: Mesh, **options):
    config_type, model_type = MODEL_TYPES[kind]
    ranks = mesh.shape["ep"]
    # The paper's planner replicates also where so few tokens do not pay for it.
    moe_options = {"block_rows": 8, "num_slots": min(1, ranks - 1), "planner": "topoep_paper"}
    options = {"data_axes": ("data",), "dtype": jnp.float32, **options}
    return model_type(config_type.tiny(), mesh=mesh, moe_options=moe_options, **options, rngs=nnx.Rngs(0))


def split(build):
    """The structure of a model and the shapes of its parameters."""
    graph, abstract = nnx.split(nnx.eval_shape(build))
    return graph, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), nnx.to_pure_dict(abstract))


@functools.cache
def params_of(kind: str):
    """Every parameter away from its initial value, biases and scales too; NumPy arrays, the same on any mesh."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        noise = rng.standard_normal(leaf.shape, np.float32)
        names = [entry.key for entry in path]
        if "scale" in names:
            return 1 + 0.2 * noise
        if "bias" in names or "correction_bias" in names:
            return 0.2 * noise
        return noise * (1.0 if "table" in names else (128**-0.5 if names[-1] == "w" else leaf.shape[-2] ** -0.5))

    return jax.tree_util.tree_map_with_path(draw, split(lambda: model_of(kind, mesh_of(1, 1)))[1])


@functools.cache
def compiled(kind: str, data: int = 1, ep: int = 1, fsdp: tuple[str, ...] = (), **options):
    """A function of tokens and keyword arguments: the output of the model on this mesh."""
    mesh = mesh_of(data, ep)
    graph, abstract = split(lambda: model_of(kind, mesh, **options))
    params = part_of(kind, abstract, options.get("stage"))
    params = jax.device_put(params, state_shardings(abstract, mesh, fsdp=fsdp))
    forward = jax.jit(
        lambda params, tokens, per_token: nnx.merge(graph, params)(tokens, return_routing=True, **per_token)
    )
    place = NamedSharding(mesh, PartitionSpec(FSDP))

    def call(tokens, params=params, **per_token):
        where = {name: NamedSharding(mesh, PartitionSpec()) if name == "replay" else place for name in per_token}
        return jax.device_get(forward(params, jax.device_put(tokens, place), jax.device_put(per_token, where)))

    return call


def part_of(kind: str, abstract, stage):
    """What a stage holds of the parameters of the whole."""
    params = params_of(kind)
    if stage is None:
        return params
    dense = MODEL_TYPES[kind][0].tiny().dense_layers
    first, last = stage
    cut = {"dense_layers": slice(first, min(last, dense)), "layers": slice(max(first - dense, 0), last - dense)}
    part = {name: params[name] for name in abstract}
    for name in part.keys() & cut.keys():
        part[name] = jax.tree.map(operator.itemgetter(cut[name]), part[name])
    assert jax.tree.all(jax.tree.map(lambda leaf, shape: leaf.shape == shape.shape, part, abstract))
    return part


def some_tokens(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 257, (BATCH, LENGTH)).astype(np.int32)


ONES = np.ones((BATCH, LENGTH), np.int32)


@functools.cache
def whole(kind: str):
    return compiled(kind)(some_tokens(), segments=ONES)


def same(got, want, tolerance=5e-5):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


# What GLM-4.5 alone has, the bias, tests/train/layouts_test.py spreads, too.
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.full] * (kind == "glm4_moe")) for kind in MODEL_TYPES]
)
def test_one_device_and_many_with_sharded_parameters(kind):
    alone, spread = whole(kind), compiled(kind, 2, 4, FSDP)(some_tokens())
    assert spread.logits.shape == (BATCH, LENGTH, 257)
    assert spread.logits.dtype == np.float32
    same(spread.logits, alone.logits)
    assert alone.logits.std() > 0.3
    config = MODEL_TYPES[kind][0].tiny()
    assert alone.routing.expert_idx.shape == (config.num_moe_layers, BATCH, LENGTH, config.top_k)
    assert alone.routing.logits.shape == (config.num_moe_layers, BATCH, LENGTH, config.num_experts)
    np.testing.assert_array_equal(alone.routing.expert_idx, spread.routing.expert_idx)
    np.testing.assert_array_equal(alone.metrics.expert_load, spread.metrics.expert_load)
    assert (alone.metrics.expert_load.sum(1) == BATCH * LENGTH * config.top_k).all()
    assert spread.metrics.replica.max() > 0


@pytest.mark.full
@pytest.mark.parametrize("mesh", [(1, 8), (2, 4)], ids=["ep", "data_ep"])
@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_parameters_on_every_device(kind, mesh):
    same(compiled(kind, *mesh)(some_tokens()).logits, whole(kind).logits)


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_no_token_sees_a_later_one(kind):
    changed = some_tokens()
    changed[:, LENGTH // 2 :] = (changed[:, LENGTH // 2 :] + 1) % 257
    before, after = whole(kind).logits, compiled(kind)(changed, segments=ONES).logits
    same(before[:, : LENGTH // 2], after[:, : LENGTH // 2])
    assert np.abs(before[:, LENGTH // 2 :] - after[:, LENGTH // 2 :]).max() > 0.1


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_packed_sequences_are_as_if_alone(kind):
    """Row 0 holds the starts of rows 1 to 3 of another batch; row 4 is padding, which need not be tokens."""
    packed, alone = some_tokens(1), some_tokens(2)
    segments, alone_segments = ONES.copy(), ONES.copy()
    packed[0] = np.concatenate([alone[1, :5], alone[2, :4], alone[3, :3]])
    segments[0] = [7] * 5 + [-4] * 4 + [7] * 3  # A number that comes back is another sequence.
    packed[4], segments[4] = -100, 0
    alone_segments[1:4] = np.arange(LENGTH) < np.array([[5], [4], [3]])
    got, want = compiled(kind)(packed, segments=segments), compiled(kind)(alone, segments=alone_segments)
    same(got.logits[0], np.concatenate([want.logits[1, :5], want.logits[2, :4], want.logits[3, :3]]))
    assert np.isfinite(got.logits).all()
    assert (got.routing.expert_idx[:, 4] == -1).all()
    top_k = MODEL_TYPES[kind][0].tiny().top_k
    assert (got.metrics.expert_load.sum(1) == (BATCH * LENGTH - 12) * top_k).all()
    assert (want.metrics.expert_load.sum(1) == (BATCH * LENGTH - 7 - 8 - 9) * top_k).all()


@pytest.mark.parametrize("wrong", [-1, 257])
def test_what_is_no_token_is_no_other_token(wrong):
    tokens = some_tokens()
    tokens[3, 2] = wrong
    assert (compiled("qwen3_moe")(tokens, segments=ONES).metrics.status & Status.BAD_INPUT).all()
    with pytest.raises(ValueError, match=rf"tokens lie in .*{wrong}.*, but the vocabulary is 0\.\.256"):
        model_of("qwen3_moe", mesh_of(1, 1))(jnp.asarray(tokens))


@pytest.mark.parametrize("kind", ["glm4_moe"])
def test_stages_are_the_whole_and_replay_a_recorded_choice(kind):
    want = whole(kind)
    recorded = want.routing.expert_idx
    x = some_tokens()
    for stage, layers in (((0, 2), slice(0, 1)), ((2, 4), slice(1, 3))):
        output = compiled(kind, stage=stage)(x, replay=recorded[layers])
        np.testing.assert_array_equal(output.routing.expert_idx, recorded[layers])
        np.testing.assert_array_equal(output.metrics.expert_load, want.metrics.expert_load[layers])
        x = output.logits
    same(x, want.logits)
    other = compiled(kind, stage=(0, 2))(some_tokens(), replay=(recorded[:1] + 1) % 32)
    np.testing.assert_array_equal(other.metrics.expert_load, np.roll(want.metrics.expert_load[:1], 1, axis=1))


def test_a_stage_draws_what_the_whole_model_does():
    def some_of(stage):
        model = model_of("glm4_moe", mesh_of(1, 1), stage=stage)
        parts = {"dense": "dense_layers.ffn.up", "query": "layers.attention.query", "head": "head"}
        return {
            name: operator.attrgetter(path)(model).kernel[...]
            for name, path in parts.items()
            if hasattr(model, path.partition(".")[0])
        }

    # Compiled, so that no other parameter is drawn.
    whole, first, last = jax.jit(lambda: [some_of(stage) for stage in (None, (0, 3), (3, 4))])()
    np.testing.assert_array_equal(whole["query"], np.concatenate([first["query"], last["query"]]))
    assert not np.array_equal(whole["query"][0], whole["query"][1])
    np.testing.assert_array_equal(whole["dense"], first["dense"])
    np.testing.assert_array_equal(whole["head"], last["head"])
    assert (first.keys(), last.keys()) == ({"dense", "query"}, {"query", "head"})


def loss_of(remat: str):
    graph, _ = split(lambda: model_of("qwen3_moe", mesh_of(1, 1), remat=remat))
    return lambda params: jnp.square(nnx.merge(graph, params)(some_tokens()).logits).mean()


def test_the_backward_pass_finds_what_the_policy_says():
    """The policy keeps of each layer its input, the products with parameters too, or everything."""
    params = params_of("qwen3_moe")
    kept = {}
    for remat in ("full", "dots", "none"):
        loss = loss_of(remat)
        pullback = jax.eval_shape(lambda params, loss=loss: jax.vjp(loss, params)[1], params)
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback))
        # In f32 numbers of a token and layer, of which each parameter is kept once whatever the policy.
        size -= sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        kept[remat] = size / (4 * 4 * BATCH * LENGTH)
    # The input is 128 wide, the products of attention 384 together; the rest is kept once for all layers.
    assert 128 < kept["full"] < 300 < 128 + 384 < kept["dots"] < 800 < kept["none"]


@pytest.mark.full
@pytest.mark.parametrize("remat", ["full", "dots"])
def test_what_is_made_again_in_the_backward_pass_changes_nothing(remat):
    want, got = (jax.device_get(jax.jit(jax.grad(loss_of(name)))(params_of("qwen3_moe"))) for name in ("none", remat))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), got, want)
    assert min(np.abs(leaf).max() for leaf in jax.tree.leaves(want)) > 1e-6


def test_untrained_logits_are_near_uniform():
    params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(model_of("qwen3_moe", mesh_of(1, 1)))))()
    logits = compiled("qwen3_moe")(some_tokens(), params, segments=ONES).logits
    loss = -jax.nn.log_softmax(logits)[..., 0].mean()
    assert abs(float(loss) - np.log(257)) < 0.7


@pytest.mark.parametrize("kind", MODEL_TYPES)
@pytest.mark.parametrize("fsdp", [(), FSDP], ids=["whole", "fsdp"])
def test_where_parameters_live(kind, fsdp):
    """Experts by expert; all else everywhere, or its matrices by "hidden" or "latent", never one axis twice."""
    mesh = mesh_of(2, 4)
    params = split(lambda: model_of(kind, mesh))[1]
    state = nnx.state(nnx.eval_shape(lambda: model_of(kind, mesh)))
    assert jax.tree.leaves(state_shardings(state, mesh)) == jax.tree.leaves(state_shardings(params, mesh))
    specs = jax.tree.map(lambda place: place.spec, state_shardings(params, mesh, fsdp=fsdp))
    assert specs["layers"]["moe"].pop("w") == PartitionSpec(None, "ep")
    assert state_shardings(params["layers"], mesh)["moe"]["w"].spec == PartitionSpec(None, "ep")
    leaves = jax.tree.leaves_with_path(specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    for path, spec in leaves:
        is_matrix = jax.tree_util.keystr(path).endswith(
            ("kernel']", "table']", "router']", "shared_gate_up']", "down']")
        )
        assert [axis for axis in spec if axis] == ([fsdp] if fsdp and is_matrix else []), path
    if fsdp:
        assert specs["embedding"]["table"] == PartitionSpec(None, fsdp)
        assert specs["layers"]["attention"]["out"]["kernel"] == PartitionSpec(None, None, fsdp)


def test_what_does_not_divide_stays_whole_and_what_is_unknown_is_refused():
    mesh = mesh_of(2, 4)
    odd = {"head": {"kernel": jax.ShapeDtypeStruct((12, 16), jnp.float32)}}
    assert state_shardings(odd, mesh, fsdp=FSDP)["head"]["kernel"].spec == PartitionSpec()
    with pytest.raises(ValueError, match=r"no axis names for the parameter .*adapter.*AXES"):
        state_shardings({"adapter": {"kernel": jax.ShapeDtypeStruct((8, 8), jnp.float32)}}, mesh)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("qwen3_moe", {"remat": "some"}, "remat='some' is unknown: take one of .*dots"),
        ("glm4_moe", {"stage": (0, 1)}, r"stage=\(0, 1\) has no MoE layer: the first 1 layers are dense"),
        ("qwen3_moe", {"stage": (2, 5)}, r"stage=\(2, 5\) must be layers within 0..4"),
        ("qwen3_moe", {"stage": (2, 2)}, r"stage=\(2, 2\) must be layers within 0..4, first before last"),
    ],
)
def test_bad_options_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        nnx.eval_shape(lambda: model_of(kind, mesh_of(1, 1), **options))


def test_stages_of_tied_embeddings_are_refused():
    shapes = {"vocab": 17, "hidden": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    config = Qwen3MoEConfig(**shapes, ffn=8, num_experts=8, top_k=2, tied_embeddings=True)
    with pytest.raises(ValueError, match="tied embeddings: the first and the last stage would need the same"):
        Qwen3MoE(config, mesh=mesh_of(1, 1), stage=(0, 1), rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("shape", "per_token", "message"),
    [
        ((8, 4, 2), {}, r"takes \[batch, length\], not an array of shape \(8, 4, 2\)"),
        ((9, 4), {}, "batch of 9 does not divide among the 8 devices"),
        ((8, 4), {"segments": (8, 5)}, r"segments has shape \(8, 5\), but \(8, 4\) is needed"),
        ((8, 4), {"positions": (1, 4)}, r"positions has shape \(1, 4\), but \(8, 4\) is needed"),
        ((8, 4), {"replay": (4, 8, 4, 3)}, r"replay has shape \(4, 8, 4, 3\), but \(4, 8, 4, 4\) is needed"),
    ],
)
def test_bad_shapes_are_refused(shape, per_token, message):
    def call():
        arrays = {name: jnp.zeros(shape, jnp.int32) for name, shape in per_token.items()}
        return model_of("qwen3_moe", mesh_of(2, 4))(jnp.zeros(shape, jnp.int32), **arrays).logits

    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call)
