"""The model: released sizes, attention against plain formulas, causality, and the same logits on 1 and on 8 devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import Qwen3MoE, Qwen3MoEConfig, state_shardings
from models.attention import Attention, rotate

TINY = Qwen3MoEConfig(
    vocab=17, hidden=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, ffn=8, num_experts=8, top_k=2
)
BATCH, LENGTH = 8, 12


def mesh_of(num_ranks: int) -> Mesh:
    return Mesh(np.asarray(jax.devices()[:num_ranks]), ("ep",))


def make(config: Qwen3MoEConfig, mesh: Mesh, num_slots: int = 1) -> Qwen3MoE:
    options = {"block_rows": 8, "num_slots": num_slots}
    return Qwen3MoE(config, mesh=mesh, moe_options=options, dtype=jnp.float32, rngs=nnx.Rngs(0))


@functools.cache
def compiled(num_ranks: int):
    """A function tokens -> (logits, metrics) with parameters that do not depend on the number of ranks."""
    mesh = mesh_of(num_ranks)
    build = functools.partial(make, TINY, mesh, num_slots=min(1, num_ranks - 1))
    graph, abstract = nnx.split(nnx.eval_shape(build))
    shardings = state_shardings(nnx.to_pure_dict(abstract), mesh)
    params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(build())), out_shardings=shardings)()
    forward = jax.jit(lambda params, tokens: nnx.merge(graph, params)(tokens))
    place = NamedSharding(mesh, PartitionSpec("ep"))
    return lambda tokens: jax.device_get(forward(params, jax.device_put(tokens, place)))


def some_tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, TINY.vocab, (BATCH, LENGTH)).astype(np.int32)


def test_released_sizes():
    model = nnx.eval_shape(lambda: make(Qwen3MoEConfig.qwen3_30b_a3b(), mesh_of(8)))
    leaves = jax.tree.leaves(nnx.state(model))
    assert sum(int(np.prod(leaf.shape)) for leaf in leaves) == 30_532_122_624


def test_experts_are_sharded_and_all_else_is_everywhere():
    mesh = mesh_of(8)
    params = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: make(TINY, mesh))))
    specs = jax.tree.map(lambda place: place.spec, state_shardings(params, mesh))
    assert params["layers"]["moe"]["w"].shape == (2, 8, 3 * 16 * 8)
    assert specs["layers"]["moe"].pop("w") == PartitionSpec(None, "ep")
    is_spec = lambda leaf: isinstance(leaf, PartitionSpec)  # noqa: E731
    assert set(jax.tree.leaves(specs, is_leaf=is_spec)) == {PartitionSpec()}


def test_one_and_eight_devices_give_the_same_logits():
    (one, alone), (eight, balanced) = compiled(1)(some_tokens()), compiled(8)(some_tokens())
    assert eight.shape == (BATCH, LENGTH, TINY.vocab)
    assert eight.dtype == np.float32
    np.testing.assert_allclose(eight, one, atol=2e-5)
    np.testing.assert_array_equal(alone.expert_load, balanced.expert_load)
    assert balanced.expert_load.shape == (TINY.num_layers, TINY.num_experts)
    assert (balanced.expert_load.sum(1) == BATCH * LENGTH * TINY.top_k).all()
    assert balanced.replica.max() > 0


def test_no_token_sees_a_later_one():
    tokens, changed = some_tokens(), some_tokens()
    changed[:, LENGTH // 2 :] = (changed[:, LENGTH // 2 :] + 1) % TINY.vocab
    before, after = compiled(8)(tokens)[0], compiled(8)(changed)[0]
    np.testing.assert_allclose(before[:, : LENGTH // 2], after[:, : LENGTH // 2], atol=2e-5)
    assert np.abs(before[:, LENGTH // 2 :] - after[:, LENGTH // 2 :]).max() > 0.1


def test_untrained_logits_are_near_uniform():
    logits = compiled(8)(some_tokens())[0]
    loss = -jax.nn.log_softmax(logits)[..., 0].mean()
    assert abs(float(loss) - np.log(TINY.vocab)) < 0.7


def test_rotation_keeps_lengths_and_depends_on_distance_alone():
    rng = np.random.default_rng(0)
    one = np.tile(rng.standard_normal((1, 1, 1, 8), np.float32), (1, 6, 1, 1))
    other = np.tile(rng.standard_normal((1, 1, 1, 8), np.float32), (1, 6, 1, 1))
    turn = jax.jit(functools.partial(rotate, theta=100.0))
    a, b = np.asarray(turn(one))[0, :, 0], np.asarray(turn(other))[0, :, 0]
    np.testing.assert_allclose(np.linalg.norm(a, axis=1), np.linalg.norm(one[0, 0, 0]), rtol=1e-5)
    product = a @ b.T
    for distance in range(-3, 4):
        along = np.diagonal(product, distance)
        np.testing.assert_allclose(along, along[0], rtol=1e-4, atol=1e-4)


def test_attention_equals_the_plain_formula():
    heads, shared, size, length = 4, 2, 8, 5
    layer = Attention(16, heads, shared, size, rope_theta=1e4, norm_eps=1e-6, dtype=jnp.float32, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).standard_normal((2, length, 16), np.float32)
    got = np.asarray(jax.jit(lambda x: layer(x))(x))

    def heads_of(projection, count):
        return (x @ np.asarray(projection.kernel[...])).reshape(2, length, count, size)

    def normed(values):
        return rotate(values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-6), theta=1e4)

    query, key = np.asarray(normed(heads_of(layer.query, heads))), np.asarray(normed(heads_of(layer.key, shared)))
    key, value = (np.repeat(part, heads // shared, axis=2) for part in (key, heads_of(layer.value, shared)))
    score = np.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(size)
    score = np.where(np.tril(np.ones((length, length), bool)), score, -np.inf)
    share = np.exp(score - score.max(-1, keepdims=True))
    share /= share.sum(-1, keepdims=True)
    want = np.einsum("bhqk,bkhd->bqhd", share, value).reshape(2, length, -1) @ np.asarray(layer.out.kernel[...])
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_heads": 3, "num_kv_heads": 2}, "num_heads=3 is not a multiple of num_kv_heads=2"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
    ],
)
def test_bad_heads_are_refused(wrong, message):
    shapes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, **wrong}
    with pytest.raises(ValueError, match=message):
        Attention(16, **shapes, rope_theta=1e4, norm_eps=1e-6, dtype=jnp.float32, rngs=nnx.Rngs(0))
