"""Forced routing: statistics, what is shared and what differs, bits equal in every kind of program, gradients."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from topoep_jax import routing
from topoep_jax.demand import count_demand
from topoep_jax.routing import Forced, forced_logits


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Forced(math.nan), ValueError, "skew=nan must be finite"),
        (lambda: Forced(-math.inf), ValueError, "skew=-inf must be finite"),
        (lambda: Forced("2"), TypeError, "skew='2'"),
        (lambda: Forced(1.0, seed=-1), ValueError, "seed=-1"),
        (lambda: Forced(1.0, seed=2**31), ValueError, "seed=2147483648"),
        (
            lambda: forced_logits(Forced(0), np.zeros(8, np.float32), layer=0, step=0, rank=0),
            ValueError,
            r"shape \(8,\)",
        ),
    ],
)
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


SHAPE = (512, 32)


@functools.cache
def drawer(skew, seed=0):
    """One program per (skew, seed), called with (layer, step, rank)."""
    return jax.jit(lambda layer, step, rank: draw(Forced(skew, seed), layer, step, rank))


def draw(forced, layer, step, rank, logits=None):
    logits = jnp.zeros(SHAPE, jnp.float32) if logits is None else logits
    return forced_logits(forced, logits, layer=layer, step=step, rank=rank)


def bias_of(skew, layer, step, rank):
    """The shared bias, one value per expert: what is left after the noise, which does not depend on the skew."""
    rest = np.asarray(drawer(skew)(layer, step, rank)) - np.asarray(drawer(0.0)(layer, step, rank))
    np.testing.assert_allclose(rest, rest[:1].repeat(len(rest), 0), atol=1e-5)
    return rest[0]


def test_noise_is_standard_normal_and_differs_everywhere():
    draws = [np.asarray(drawer(0.0)(*where)) for where in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)]]
    draws.append(np.asarray(drawer(0.0, seed=1)(0, 0, 0)))
    for draw in draws:
        assert abs(draw.mean()) < 0.04 and abs(draw.std() - 1) < 0.03
        assert np.abs(draw.mean(0)).max() < 0.2, "skew 0 has no preferred expert"
    correlation = np.corrcoef([d.ravel() for d in draws])
    assert np.abs(correlation - np.eye(len(draws))).max() < 0.04


def test_negative_skew_is_fixed_for_the_run_and_shared_by_ranks():
    first = bias_of(-2.0, layer=3, step=0, rank=0)
    for step, rank in [(0, 1), (1, 0), (1000, 7)]:
        np.testing.assert_allclose(bias_of(-2.0, 3, step, rank), first, atol=1e-5)
    assert np.abs(bias_of(-2.0, 4, 0, 0) - first).max() > 0.5, "layers have different biases"
    spread = np.std([bias_of(-2.0, layer, 0, 0) for layer in range(20)])
    assert 1.8 < spread < 2.2


def test_positive_skew_is_redrawn_at_every_step_and_shared_by_ranks():
    first = bias_of(2.0, layer=3, step=0, rank=0)
    np.testing.assert_allclose(bias_of(2.0, 3, 0, 5), first, atol=1e-5)
    for layer, step in [(3, 1), (4, 0)]:
        assert np.abs(bias_of(2.0, layer, step, 0) - first).max() > 0.5
    spread = np.std([bias_of(2.0, 0, step, 0) for step in range(20)])
    assert 1.8 < spread < 2.2


def test_values_replace_the_logits_and_gradients_pass_straight_through():
    rng = np.random.default_rng(1)
    factor, logits = (rng.normal(size=SHAPE).astype(np.float32) for _ in range(2))
    logits[0, 0] = np.nan

    def loss(x):
        values = draw(Forced(-2.0), 2, 5, 1, x)
        return (values * factor).sum(), values

    (_, values), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(logits)
    np.testing.assert_array_equal(values, drawer(-2.0)(2, 5, 1))
    np.testing.assert_array_equal(gradient, factor)


def test_dtype_follows_the_logits():
    low = jax.eval_shape(lambda: draw(Forced(-1.0), 0, 0, 0, jnp.zeros(SHAPE, jnp.bfloat16)))
    assert low.dtype == jnp.bfloat16 and low.shape == SHAPE


@pytest.mark.parametrize("setting", [lambda: jax.enable_x64(True), lambda: jax.default_prng_impl("rbg")])
def test_draws_do_not_depend_on_process_wide_settings(setting):
    plain = np.asarray(drawer(-2.0)(1, 2, 3))
    with setting():
        np.testing.assert_array_equal(jax.jit(lambda: draw(Forced(-2.0), 1, 2, 3))(), plain)


@pytest.mark.parametrize("spec", [P(), P("data"), P(("data", "ep"))])
def test_shard_map_gives_the_same_bits(spec):
    """Logits replicated, or varying over less or more than the ranks: values per rank, gradient summed where shared."""
    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(2, 4), ("data", "ep"))
    shards = {P(): 1, P("data"): 2, P(("data", "ep")): 8}[spec]
    logits = jnp.zeros((SHAPE[0] * shards, SHAPE[1]), jnp.float32)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=P(("data", "ep")))
    def run(x):
        return draw(Forced(-2.0), 1, 4, jax.lax.axis_index("ep"), x)

    value, pull = jax.vjp(run, logits)
    per_rank = np.concatenate([drawer(-2.0)(1, 4, rank) for rank in range(4)])
    np.testing.assert_array_equal(value, np.concatenate([per_rank] * 2))
    (gradient,) = pull(jnp.ones_like(value))
    np.testing.assert_array_equal(gradient, np.full(logits.shape, 8 // shards))


def test_pmap_scan_and_vmap_give_the_same_bits():
    ranks, layers, forced = np.arange(8), np.arange(2), Forced(2.0)
    want = np.stack([[drawer(2.0)(layer, 4, rank) for layer in layers] for rank in ranks])

    def per_layer(_):
        rank = jax.lax.axis_index("ep")
        return jax.lax.scan(lambda _, layer: (None, draw(forced, layer, 4, rank)), None, layers)[1]

    by_pmap = jax.pmap(per_layer, axis_name="ep", devices=jax.devices()[:8])(np.zeros(8, np.float32))
    np.testing.assert_array_equal(by_pmap, want)
    by_vmap = jax.jit(jax.vmap(lambda rank: draw(forced, 1, 4, rank)))(ranks)
    np.testing.assert_array_equal(by_vmap, want[:, 1])


def test_imbalance_has_the_size_that_megatron_semantics_give():
    """Rank max / mean of Qwen3 (E 128, top-8, 32 ranks): 1.06, 3.48 and 5.03 at skew 0, -1 and -2, in an independent
    Monte Carlo of the published semantics over 40 layers."""
    ranks, experts, tokens, layers = 32, 128, 64, 12
    logits = jnp.zeros((tokens, experts), jnp.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def demand(forced, layer):
        selected = jax.vmap(lambda rank: routing.qwen3(draw(forced, layer, 0, rank, logits), 8).expert_idx)
        return count_demand(selected(jnp.arange(ranks)).reshape(-1, 8), experts)

    for skew, low, high in [(0.0, 1.0, 1.2), (-1.0, 2.8, 4.2), (-2.0, 4.1, 6.0)]:
        load = np.stack([demand(Forced(skew, seed=1), n) for n in range(layers)]).reshape(layers, ranks, -1).sum(2)
        measured = np.mean(load.max(1) / load.mean(1))
        assert low <= measured <= high, f"skew {skew}: rank max / mean {measured:.2f}"


@pytest.mark.parametrize("skew", [1e39, 10**400, float("nan")])
def test_a_skew_beyond_f32_is_refused(skew):
    with pytest.raises(ValueError, match="must be finite and within"):
        Forced(skew)
