"""Routers against plain NumPy re-implementations, selection rules, replay, masks and gradients."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topoep_jax import routing

T, E, K = 16, 12, 3
GROUPS, KEPT = 4, 2
BIAS = np.linspace(0.6, -0.6, E, dtype=np.float32)[np.random.default_rng(5).permutation(E)]
OPTIONS = {
    "qwen3": {},
    "glm4": {"correction_bias": BIAS, "scale": 1.5},
    "deepseek_v2": {"num_groups": GROUPS, "topk_group": KEPT, "scale": 16.0},
}
ALL = pytest.mark.parametrize("name", sorted(OPTIONS))


@functools.cache
def compiled(name):
    """One program per router, with and without replay, for every test at [T, E]."""
    route = functools.partial(routing.get_router(name), top_k=K, **OPTIONS[name])
    return jax.jit(route), jax.jit(lambda logits, idx: route(logits, expert_idx=idx))


def run(router, logits, top_k, **options):
    """The router as one program of its own."""
    return jax.jit(lambda x: router(x, top_k, **options))(logits)


def random_logits(seed, scale=2.0):
    return np.random.default_rng(seed).normal(0, scale, (T, E)).astype(np.float32)


def softmax(x):
    p = np.exp(x - x.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def best(score, k):
    return np.argsort(-score, axis=-1, kind="stable")[..., :k]


def numpy_router(name, logits):
    """The published formulas, one token at a time, in f64."""
    idx, weight = np.zeros((len(logits), K), np.int32), np.zeros((len(logits), K))
    for t, row in enumerate(logits.astype(np.float64)):
        if name == "qwen3":
            score = softmax(row)
            idx[t] = best(score, K)
            weight[t] = score[idx[t]] / score[idx[t]].sum()
        elif name == "glm4":
            score = 1 / (1 + np.exp(-row))
            idx[t] = best(score + BIAS, K)
            weight[t] = 1.5 * score[idx[t]] / (score[idx[t]].sum() + 1e-20)
        else:
            score = softmax(row)
            groups = best(score.reshape(GROUPS, -1).max(-1), KEPT)
            allowed = np.isin(np.arange(E) // (E // GROUPS), groups)
            idx[t] = best(np.where(allowed, score, -np.inf), K)
            weight[t] = 16.0 * score[idx[t]]
    return idx, weight


# Values


@ALL
def test_equals_the_published_formulas(name):
    for seed in range(3):
        logits = random_logits(seed)
        got, want = compiled(name)[0](logits), numpy_router(name, logits)
        np.testing.assert_array_equal(got.expert_idx, want[0])
        np.testing.assert_allclose(got.weight, want[1], rtol=5e-6)
        assert got.expert_idx.dtype == jnp.int32 and got.weight.dtype == jnp.float32


def test_qwen3_by_hand():
    logits = np.log(np.array([[1.0, 4.0, 2.0, 1.0]], np.float32))
    got = run(routing.qwen3, logits, 2)
    np.testing.assert_array_equal(got.expert_idx, [[1, 2]])
    np.testing.assert_allclose(got.weight, [[4 / 6, 2 / 6]], rtol=1e-6)
    np.testing.assert_allclose(run(routing.qwen3, logits, 2, renormalize=False).weight, [[4 / 8, 2 / 8]], rtol=1e-6)


def test_glm4_by_hand():
    # Sigmoids 3/4, 1/4, 1/2, 1/5; the bias lifts expert 1 over expert 0 and never enters a weight.
    logits = np.log(np.array([[3.0, 1 / 3, 1.0, 1 / 4]], np.float32))
    bias = np.array([0.0, 0.6, 0.0, 0.0], np.float32)
    got = run(routing.glm4, logits, 2, correction_bias=bias, scale=2.0)
    np.testing.assert_array_equal(got.expert_idx, [[1, 0]])
    np.testing.assert_allclose(got.weight, [[2 * 0.25, 2 * 0.75]], rtol=1e-6)
    bare = run(routing.glm4, logits, 2, correction_bias=np.zeros(4, np.float32), renormalize=False, scale=2.0)
    np.testing.assert_array_equal(bare.expert_idx, [[0, 2]])
    np.testing.assert_allclose(bare.weight, [[1.5, 1.0]], rtol=1e-6)


def test_glm4_keeps_the_epsilon_of_the_original():
    logits = np.full((1, 4), -50.0, np.float32)
    got = run(routing.glm4, logits, 2, correction_bias=np.zeros(4, np.float32))
    sigmoid = 1 / (1 + math.exp(50))
    np.testing.assert_allclose(got.weight, [[sigmoid / (2 * sigmoid + 1e-20)] * 2], rtol=1e-5)


def test_deepseek_v2_by_hand():
    # Groups (0 1) (2 3) (4 5), one kept: its best expert decides, though the second group has the larger sum.
    logits = np.log(np.array([[6.0, 1.0, 5.0, 5.0, 2.0, 1.0]], np.float32))
    got = run(routing.deepseek_v2, logits, 2, num_groups=3, topk_group=1, scale=16.0)
    np.testing.assert_array_equal(got.expert_idx, [[0, 1]])
    np.testing.assert_allclose(got.weight, [[16 * 6 / 20, 16 * 1 / 20]], rtol=1e-6)
    got = run(routing.deepseek_v2, logits, 2, num_groups=3, topk_group=1, renormalize=True)
    np.testing.assert_allclose(got.weight, [[6 / 7, 1 / 7]], rtol=1e-6)


@ALL
def test_ties_go_to_the_lowest_index(name):
    tied = np.zeros((T, E), np.float32)
    tied[1:, :2] = -0.0  # equal to 0, whatever a sort thinks
    options = dict(OPTIONS[name], **({"correction_bias": np.zeros(E, np.float32)} if name == "glm4" else {}))
    np.testing.assert_array_equal(run(routing.get_router(name), tied, K, **options).expert_idx, [[0, 1, 2]] * T)


@ALL
def test_low_precision_logits_are_routed_in_f32(name):
    logits = jnp.asarray(random_logits(0), jnp.bfloat16)
    got = run(routing.get_router(name), logits, K, **OPTIONS[name])
    want = compiled(name)[0](np.asarray(logits.astype(jnp.float32)))
    assert got.weight.dtype == jnp.float32
    np.testing.assert_array_equal(got.expert_idx, want.expert_idx)
    np.testing.assert_allclose(got.weight, want.weight, rtol=1e-6)


# Selection


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(sorted(OPTIONS)), st.integers(0, 2**32 - 1), st.sampled_from([0.1, 2.0, 30.0]), st.booleans())
def test_selection_and_weights_are_sound(name, seed, scale, quantized):
    logits = random_logits(seed, scale)
    logits = np.round(logits) if quantized else logits
    got = jax.device_get(compiled(name)[0](logits))
    assert np.all((got.expert_idx >= 0) & (got.expert_idx < E))
    assert all(len(set(row)) == K for row in got.expert_idx), "an expert was taken twice"
    assert np.all(np.isfinite(got.weight)) and np.all(got.weight >= 0)
    if name == "deepseek_v2":
        size = E // GROUPS
        assert all(len(set(row // size)) <= KEPT for row in got.expert_idx)
        top = best(logits.reshape(T, GROUPS, size).max(-1), KEPT)
        assert all(set(row // size) <= set(groups) for row, groups in zip(got.expert_idx, top, strict=True))
        np.testing.assert_allclose(got.weight, 16 * np.take_along_axis(softmax(logits), got.expert_idx, 1), rtol=1e-4)
    else:
        total = 1.5 if name == "glm4" else 1.0
        np.testing.assert_allclose(got.weight.sum(1), total, rtol=1e-5)
        score = 1 / (1 + np.exp(-logits.astype(np.float64))) + BIAS if name == "glm4" else logits
        chosen = np.take_along_axis(score, got.expert_idx, 1)
        unchosen = np.where((np.arange(E) == got.expert_idx[..., None]).any(1), -np.inf, score)
        assert np.all(chosen.min(1) >= unchosen.max(1) - 1e-6)


@ALL
def test_renaming_experts_renames_the_selection(name):
    order = np.arange(E).reshape(GROUPS, -1)[[2, 0, 3, 1]].reshape(-1)  # whole groups move
    logits = random_logits(7)
    if name == "glm4":
        moved = run(routing.glm4, logits[:, order], K, correction_bias=BIAS[order], scale=1.5)
    else:
        moved = compiled(name)[0](logits[:, order])
    straight = compiled(name)[0](logits)
    np.testing.assert_array_equal(order[moved.expert_idx], straight.expert_idx)
    np.testing.assert_allclose(moved.weight, straight.weight, rtol=1e-6)


def test_masked_groups_lose_even_against_negative_scores():
    # One group kept, all logits negative: a masked group at 0 instead of -inf would win.
    logits = jnp.array([[-1.0, -9.0, -2.0, -2.0], [-9.0, -9.0, -8.0, -9.0]], jnp.float32)
    got = run(routing.deepseek_v2, logits, 2, num_groups=2, topk_group=1)
    np.testing.assert_array_equal(got.expert_idx, [[0, 1], [2, 3]])
    disabled = jnp.array([[-jnp.inf, -5.0, -jnp.inf, -6.0], [-7.0, -6.0, -jnp.inf, -5.0]], jnp.float32)
    got = run(routing.deepseek_v2, disabled, 2, num_groups=2, topk_group=1)
    np.testing.assert_array_equal(got.expert_idx, [[1, 0], [3, 2]], err_msg="a disabled expert beats a masked group")
    np.testing.assert_array_equal(got.weight[:, 1], 0)


@ALL
def test_disabled_experts_are_not_chosen(name):
    logits = random_logits(3)
    off = np.asarray([0, 4, 5, 9])
    logits[:, off] = -np.inf
    got = compiled(name)[0](logits)
    assert not np.isin(got.expert_idx, off).any()
    assert np.all(np.isfinite(got.weight)) and np.all(np.asarray(got.weight) > 0)


def test_no_bias_brings_a_disabled_expert_back():
    logits = np.array([[-np.inf, 1.0, 0.0, -1.0]], np.float32)
    got = run(routing.glm4, logits, 2, correction_bias=np.array([9.0, 0.0, 0.0, 0.0], np.float32))
    np.testing.assert_array_equal(got.expert_idx, [[1, 2]])


# Replay and padding


@ALL
def test_replaying_the_own_selection_changes_nothing(name):
    logits = random_logits(11)
    route, replay = compiled(name)
    own = route(logits)
    again = replay(logits, own.expert_idx)
    np.testing.assert_array_equal(again.expert_idx, own.expert_idx)
    np.testing.assert_array_equal(again.weight, own.weight)


@ALL
def test_replay_keeps_order_and_padding(name):
    logits = random_logits(12)
    route, replay = compiled(name)
    own = jax.device_get(route(logits))
    record = own.expert_idx[:, ::-1].copy()
    record[3] = -1  # a padding token
    record[5, 0] = -7  # one assignment less
    got = jax.device_get(replay(logits, record))
    np.testing.assert_array_equal(got.expert_idx, np.maximum(record, -1))
    assert np.all(got.weight[record < 0] == 0)
    whole = np.setdiff1d(np.arange(T), [3, 5])
    np.testing.assert_allclose(got.weight[whole], own.weight[whole][:, ::-1], rtol=1e-6)
    if name != "deepseek_v2":
        np.testing.assert_allclose(got.weight[5].sum(), 1.5 if name == "glm4" else 1.0, rtol=1e-6)


@ALL
def test_gradients_are_finite_and_those_of_the_formula(name):
    logits = random_logits(13)
    route, replay = compiled(name)
    idx = np.asarray(route(logits).expert_idx)
    record = idx.copy()
    record[2], record[4, 1] = -1, -1
    ones = np.random.default_rng(0).normal(size=(T, K)).astype(np.float32)
    gradient = jax.jit(jax.grad(lambda x: (replay(x, record).weight * ones).sum()))(logits)
    assert np.all(np.isfinite(gradient)) and np.all(np.asarray(gradient)[2] == 0)

    def formula(x):
        if name == "qwen3":
            return jax.nn.softmax(jnp.take_along_axis(x, idx, 1), 1)
        if name == "glm4":
            score = jnp.take_along_axis(jax.nn.sigmoid(x), idx, 1)
            return 1.5 * score / (score.sum(1, keepdims=True) + 1e-20)
        return 16.0 * jnp.take_along_axis(jax.nn.softmax(x, 1), idx, 1)

    got = jax.jit(jax.grad(lambda x: (route(x).weight * ones).sum()))(logits)
    want = jax.jit(jax.grad(lambda x: (formula(x) * ones).sum()))(logits)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


@ALL
@pytest.mark.parametrize("extreme", [-100.0, 80.0, -np.inf])
def test_extreme_logits_stay_finite(name, extreme):
    """Underflowing scores, replayed experts of probability 0, rows of disabled experts: no NaN, forward or backward."""
    logits = random_logits(14)
    logits[0] = extreme
    logits[1, :K] = extreme
    logits[2, 0] = 200.0  # what padding may look at: its exponential overflows
    record = np.tile(np.arange(K, dtype=np.int32), (T, 1))
    record[2:4] = -1
    route, replay = compiled(name)

    def loss(x):
        return (route(x).weight ** 2).sum() + (replay(x, record).weight ** 2).sum()

    value, gradient = jax.jit(jax.value_and_grad(loss))(logits)
    assert np.isfinite(value) and np.all(np.isfinite(gradient))


def test_glm4_bias_gets_no_gradient():
    logits = random_logits(15)
    gradient = jax.jit(jax.grad(lambda b: (routing.glm4(jnp.asarray(logits), K, correction_bias=b).weight ** 2).sum()))(
        BIAS
    )
    np.testing.assert_array_equal(gradient, np.zeros(E))


def test_mask_takes_padding_out_of_values_and_gradients():
    logits = random_logits(16)
    mask = np.ones(T, bool)
    mask[4:9] = False

    def loss(x):
        got = routing.apply_mask(compiled("qwen3")[0](x), mask)
        return (got.weight * jnp.arange(1.0, K + 1, dtype=jnp.float32)[None]).sum(), got

    (value, got), gradient = jax.value_and_grad(loss, has_aux=True)(logits)
    assert np.isfinite(value)
    assert np.all(np.asarray(got.expert_idx)[4:9] == -1) and np.all(np.asarray(got.weight)[4:9] == 0)
    assert np.all(np.asarray(got.expert_idx)[mask] >= 0)
    assert np.all(np.asarray(gradient)[4:9] == 0) and np.all(np.isfinite(gradient))
    assert np.all(np.abs(gradient).max(1)[mask] > 0)


def test_bad_logits_are_found_on_valid_tokens_only():
    clean = random_logits(17)
    clean[0, 3] = -np.inf
    mask = np.arange(T) != 6
    check = jax.jit(routing.has_bad_logits)
    assert not check(clean) and not check(clean, mask)
    for poison in (np.nan, np.inf):
        bad = clean.copy()
        bad[6, 2] = poison
        assert check(bad) and not check(bad, mask)
    nothing_left = clean.copy()
    nothing_left[2] = -np.inf
    assert check(nothing_left) and check(nothing_left, mask)
    assert not routing.has_bad_logits(jnp.zeros((0, E), jnp.float32))


@ALL
def test_no_token_is_routed_to_nothing(name):
    got = run(routing.get_router(name), jnp.zeros((0, E), jnp.float32), K, **OPTIONS[name])
    assert got.expert_idx.shape == got.weight.shape == (0, K)


# Bad arguments

LOGITS = np.zeros((4, 8), np.float32)
DEEPSEEK = functools.partial(routing.deepseek_v2, LOGITS, 4)
REPLAY = np.zeros((4, 2), np.int32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: routing.qwen3(LOGITS, 9), ValueError, r"top_k=9 must lie in 1\.\.8"),
        (lambda: routing.qwen3(LOGITS, 0), ValueError, r"top_k=0 must lie in 1\.\.8"),
        (lambda: routing.qwen3(LOGITS, 2.0), TypeError, r"top_k=2\.0 must be a Python integer"),
        (lambda: routing.qwen3(LOGITS[0], 2), ValueError, r"shape \(8,\).*flatten"),
        (lambda: routing.qwen3(LOGITS.astype(np.int32), 2), TypeError, "dtype int32.*float32"),
        (lambda: routing.glm4(LOGITS, 2, correction_bias=np.zeros(7, np.float32)), ValueError, r"\(7,\).*\(8,\)"),
        (lambda: routing.glm4(LOGITS, 2, correction_bias=np.zeros(8, np.int32)), TypeError, "int32.*floats"),
        (lambda: DEEPSEEK(num_groups=3, topk_group=1), ValueError, "num_groups=3 does not divide the 8"),
        (lambda: DEEPSEEK(num_groups=0, topk_group=1), ValueError, "num_groups=0"),
        (lambda: DEEPSEEK(num_groups=4, topk_group=5), ValueError, "topk_group=5"),
        (lambda: DEEPSEEK(num_groups=4, topk_group=1), ValueError, "hold 2 experts, fewer than top_k=4"),
        (lambda: routing.qwen3(LOGITS, 3, expert_idx=REPLAY), ValueError, r"\(4, 2\), not .*\(4, 3\)"),
        (lambda: routing.qwen3(LOGITS, 2, expert_idx=REPLAY + 8), ValueError, r"expert 8, .*0\.\.7"),
        (lambda: routing.qwen3(LOGITS, 2, expert_idx=jnp.asarray(REPLAY + 8)), ValueError, r"expert 8, .*0\.\.7"),
        (lambda: routing.qwen3(LOGITS, 2, expert_idx=REPLAY * 1.0), TypeError, "float64.*int32"),
        (lambda: routing.get_router("mixtral"), ValueError, r"'mixtral'.*deepseek_v2.*glm4.*qwen3"),
        (lambda: routing.has_bad_logits(LOGITS, np.ones(4, np.int32)), ValueError, "mask is int32, but bool is needed"),
        (lambda: routing.has_bad_logits(LOGITS, np.ones(3, bool)), ValueError, r"shape \(3,\), but \(4,\)"),
    ],
)
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_wide_recorded_integers_do_not_wrap_around():
    wide = np.full((4, 2), 2**32 + 1, np.int64)
    with pytest.raises(ValueError, match="expert 4294967297"):
        routing.qwen3(LOGITS, 2, expert_idx=wide)
    assert np.all(run(routing.qwen3, LOGITS, 2, expert_idx=wide - 2**33).expert_idx == -1)
