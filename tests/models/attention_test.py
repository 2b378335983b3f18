"""Both kinds of attention against plain formulas, in blocks and at once, packed and alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from models import attention
from models.attention import Core, GroupedQueryAttention, LatentAttention
from models.rotary import rotate_halves, rotate_pairs, rotation

BATCH, LENGTH, HIDDEN = 2, 9, 16


def a_core(implementation="auto"):
    return Core(Mesh(np.asarray(jax.devices()[:1]), ("ep",)), ("ep",), implementation)


def positions():
    return jnp.arange(LENGTH, dtype=jnp.int32)[None, :]


def some(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def fill(layer):
    """Every parameter far from its initial value, so that none can be left out."""
    graph, state = nnx.split(layer)
    state = jax.tree.map(lambda leaf: jnp.asarray(0.3 + 0.3 * some(*leaf.shape, seed=leaf.size)), state)
    return nnx.merge(graph, state)


def softmax_attention(query, key, value, scale, segments):
    """[B, S, heads, ...] each; every query by itself."""
    out = np.zeros((*query.shape[:3], value.shape[3]), np.float32)
    for b, s in np.ndindex(*query.shape[:2]):
        seen = [t for t in range(s + 1) if segments[b, t] == segments[b, s]]
        score = np.einsum("hd,thd->ht", query[b, s], key[b, seen]) * scale
        share = np.exp(score - score.max(axis=1, keepdims=True))
        out[b, s] = np.einsum("ht,thd->hd", share / share.sum(axis=1, keepdims=True), value[b, seen])
    return out


def rms(x, scale, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * np.asarray(scale)


def linear(x, projection):
    y = x @ np.asarray(projection.kernel[...])
    return y + np.asarray(projection.bias[...]) if hasattr(projection, "bias") else y


SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 0, 0], [3, 3, 3, 3, 3, 3, 3, 3, 3]], np.int32)


@pytest.mark.parametrize(("qk_norm", "qkv_bias", "rotary_dim"), [(True, False, 8), (False, True, 4)])
def test_grouped_queries_equal_the_plain_formula(qk_norm, qkv_bias, rotary_dim):
    heads, shared, size = 4, 2, 8
    layer = fill(
        GroupedQueryAttention(
            HIDDEN,
            heads,
            shared,
            size,
            core=a_core(),
            qk_norm=qk_norm,
            qkv_bias=qkv_bias,
            norm_eps=0.1,
            dtype=jnp.float32,
            rngs=nnx.Rngs(0),
        )
    )
    x, by = some(BATCH, LENGTH, HIDDEN), rotation(positions(), rotary_dim, 50.0)
    got = jax.jit(lambda x: layer(x, by, jnp.asarray(SEGMENTS)))(x)
    parts = {
        name: linear(x, getattr(layer, name)).reshape(BATCH, LENGTH, -1, size) for name in ("query", "key", "value")
    }
    for name in ("query", "key"):
        if qk_norm:
            parts[name] = rms(parts[name], getattr(layer, f"{name}_norm").scale[...], 0.1)
        parts[name] = np.asarray(rotate_halves(jnp.asarray(parts[name]), by))
    key, value = (np.repeat(parts[name], heads // shared, axis=2) for name in ("key", "value"))
    mixed = softmax_attention(parts["query"], key, value, size**-0.5, SEGMENTS)
    np.testing.assert_allclose(got, linear(mixed.reshape(BATCH, LENGTH, -1), layer.out), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("q_lora", [0, 12])
def test_latent_attention_equals_the_plain_formula(q_lora):
    heads, latent, nope, rope, width = 3, 10, 6, 4, 5
    layer = fill(
        LatentAttention(
            HIDDEN,
            heads,
            q_lora=q_lora,
            kv_lora=latent,
            nope_dim=nope,
            rope_dim=rope,
            v_dim=width,
            core=a_core(),
            score_magnitude=0.7,
            dtype=jnp.float32,
            rngs=nnx.Rngs(0),
        )
    )
    x, by = some(BATCH, LENGTH, HIDDEN), rotation(positions(), rope, 50.0)
    got = jax.jit(lambda x: layer(x, by, jnp.asarray(SEGMENTS)))(x)
    if q_lora:
        query = linear(rms(linear(x, layer.query_down), layer.query_norm.scale[...], 1e-6), layer.query_up)
    else:
        query = linear(x, layer.query)
    query = query.reshape(BATCH, LENGTH, heads, nope + rope)
    down = linear(x, layer.kv_down)
    up = linear(rms(down[..., :latent], layer.kv_norm.scale[...], 1e-6), layer.kv_up)
    up = up.reshape(BATCH, LENGTH, heads, nope + width)
    turned = np.repeat(np.asarray(rotate_pairs(jnp.asarray(down[:, :, None, latent:]), by)), heads, axis=2)
    key = np.concatenate([up[..., :nope], turned], axis=-1)
    query = np.concatenate([query[..., :nope], rotate_pairs(jnp.asarray(query[..., nope:]), by)], axis=-1)
    mixed = softmax_attention(query, key, up[..., nope:], 0.7 * (nope + rope) ** -0.5, SEGMENTS)
    np.testing.assert_allclose(got, linear(mixed.reshape(BATCH, LENGTH, -1), layer.out), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["whole", "packed"])
def test_blocks_of_queries_change_nothing(segments, monkeypatch):
    query, key, value = (some(BATCH, LENGTH, heads, 8, seed=heads) for heads in (4, 2, 2))
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)[..., :6]

    def loss(query, key, value):
        out = a_core()(query, key, value, None if segments is None else jnp.asarray(segments), scale=0.3)
        return (out * jnp.asarray(some(BATCH, LENGTH, 4, 6))).sum(), out

    results = []
    for rows in (LENGTH, 4):  # 4 leaves a block of one query and three of padding.
        monkeypatch.setattr(Core, "_rows", lambda self, query, rows=rows: rows)
        step = jax.jit(jax.value_and_grad(functools.partial(loss), argnums=(0, 1, 2), has_aux=True))
        results.append(step(query, key, value))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), *results)


def test_scores_of_a_long_sequence_are_bounded():
    core = Core(Mesh(np.asarray(jax.devices()[:2]), ("ep",)), ("ep",))
    for batch, length, heads in ((2, 4096, 128), (64, 4096, 32), (2, 40960, 96), (2, 128, 4)):
        rows = core._rows(jax.ShapeDtypeStruct((batch, length, heads, 64), jnp.bfloat16))
        assert rows == 16 or batch // 2 * heads * length * rows <= attention.MAX_SCORES
        assert rows == length or rows & (rows - 1) == 0
    assert rows == 128


def test_bfloat16_is_close_to_float32():
    exact = [some(BATCH, LENGTH, 2, 8, seed=seed) for seed in range(3)]
    narrow = [jnp.asarray(array, jnp.bfloat16) for array in exact]
    mix = jax.jit(lambda *arrays: a_core()(*arrays, None, scale=0.3))
    got = mix(*narrow)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), mix(*map(jnp.asarray, exact)), atol=0.03)


def test_implementations():
    with pytest.raises(ValueError, match=r"attention='flash' is unknown: take one of .*cudnn"):
        a_core("flash")
    arrays = [jnp.zeros((1, 4, 2, 8), jnp.bfloat16)] * 3
    with pytest.raises(Exception, match=r"(?i)cudnn|cuda"):  # Asked for by name, it is not quietly replaced.
        jax.block_until_ready(a_core("cudnn")(*arrays, None, scale=1.0))


def test_cudnn_is_left_alone_where_it_does_not_compile(caplog):
    assert not attention._compiles_cudnn(jax.devices()[0], (4, 2, 8), (4, 2, 8), jnp.dtype("bfloat16"), masked=True)
    assert "cuDNN does not apply" in caplog.text
