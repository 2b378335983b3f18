"""Balance losses against sums written out by hand, uniform routing, padding, gradients; the rule of the bias."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from topoep_jax import Routed, balance
from topoep_jax.routing import deepseek_v2

SEQUENCES, LENGTH, EXPERTS, TOP_K, GROUPS = 3, 10, 8, 2, 4


def some_routing(seed: int = 0) -> Routed:
    logits = np.random.default_rng(seed).standard_normal((SEQUENCES, LENGTH, EXPERTS)).astype(np.float32) * 2
    chosen = np.argsort(-logits, axis=-1, kind="stable")[..., :TOP_K].astype(np.int32)
    return Routed(jnp.asarray(chosen), jnp.asarray(logits))


def by_hand(routed: Routed, score: str, groups: list[tuple[int, ...]], *, once: bool = False, limit: int = 1) -> float:
    """Mean over the sequences of sum_d f_d P_d, token by token; a group counts each visit, or each token once."""
    losses = []
    for chosen, logits in zip(np.asarray(routed.expert_idx), np.asarray(routed.logits, np.float64), strict=True):
        raw = np.exp(logits) if score == "softmax" else 1 / (1 + np.exp(-logits))
        probability = (raw / raw.sum(-1, keepdims=True)).mean(0)
        loss = 0.0
        for group in groups:
            hits = np.isin(chosen, group)
            if once:
                frequency = len(groups) / (limit * len(chosen)) * hits.any(1).sum()
            else:
                frequency = EXPERTS / (TOP_K * len(chosen)) * hits.sum() / len(group)
            loss += frequency * probability[list(group)].sum()
        losses.append(loss)
    return float(np.mean(losses))


EACH = [(e,) for e in range(EXPERTS)]
NEIGHBOURS = [tuple(range(2 * d, 2 * d + 2)) for d in range(GROUPS)]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_expert_loss(score):
    routed = some_routing()
    got = balance.expert_loss(routed, score=score, over="sequence")
    np.testing.assert_allclose(got, by_hand(routed, score, EACH), rtol=1e-5)
    joined = jax.tree.map(lambda leaf: leaf.reshape(1, -1, leaf.shape[-1]), routed)
    got = balance.expert_loss(routed, score=score, over="batch")
    np.testing.assert_allclose(got, by_hand(joined, score, EACH), rtol=1e-5)


def test_losses_of_groups():
    routed = some_routing()
    got = balance.device_loss(routed, num_groups=GROUPS)
    np.testing.assert_allclose(got, by_hand(routed, "softmax", NEIGHBOURS), rtol=1e-5)
    got = balance.communication_loss(routed, num_groups=GROUPS, topk_group=2)
    np.testing.assert_allclose(got, by_hand(routed, "softmax", NEIGHBOURS, once=True, limit=2), rtol=1e-5)


def test_level_routing_costs_one():
    token = np.arange(EXPERTS * 4)
    chosen = np.stack([token % EXPERTS, (token + 1) % EXPERTS], axis=1).astype(np.int32)
    routed = Routed(jnp.asarray(chosen), jnp.zeros((len(token), EXPERTS), jnp.float32))
    assert balance.expert_loss(routed) == pytest.approx(1)
    assert balance.expert_loss(routed, score="sigmoid", over="sequence") == pytest.approx(1)
    assert balance.device_loss(routed, num_groups=GROUPS) == pytest.approx(1)


def test_padding_counts_nowhere():
    routed = some_routing()
    short = jax.tree.map(lambda leaf: leaf[:, :-3], routed)
    padded = Routed(routed.expert_idx.at[:, -3:].set(-1), routed.logits)
    empty = Routed(jnp.full((1, LENGTH, TOP_K), -1, jnp.int32), jnp.ones((1, LENGTH, EXPERTS), jnp.float32))
    more = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), padded, empty)
    for loss in (
        lambda r: balance.expert_loss(r),
        lambda r: balance.expert_loss(r, score="sigmoid", over="sequence"),
        lambda r: balance.device_loss(r, num_groups=GROUPS),
        lambda r: balance.communication_loss(r, num_groups=GROUPS, topk_group=2),
    ):
        np.testing.assert_allclose(loss(more), loss(short), rtol=1e-6)
        assert loss(empty) == 0


def test_the_gradient_moves_scores_away_from_busy_experts():
    logits = jnp.zeros((LENGTH, EXPERTS), jnp.float32)
    chosen = jnp.tile(jnp.asarray([[0, 1]], jnp.int32), (LENGTH, 1))
    grad = jax.grad(lambda logits: balance.expert_loss(Routed(chosen, logits)))(logits)
    assert (grad[:, :2] > 0).all()
    assert (grad[:, 2:] < 0).all()


def test_layers_are_vmapped():
    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), some_routing(0), some_routing(1))
    each = jax.vmap(balance.expert_loss)(layers)
    np.testing.assert_allclose(each, [balance.expert_loss(some_routing(seed)) for seed in (0, 1)], rtol=1e-6)


def test_groups_that_routing_limits_bound_the_communication_loss():
    """A token visits at most M of D groups, so the visits of all groups sum to at most D."""
    logits = some_routing().logits.reshape(-1, EXPERTS)
    chosen = deepseek_v2(logits, TOP_K, num_groups=GROUPS, topk_group=1).expert_idx
    visits = balance.communication_loss(Routed(chosen, jnp.zeros_like(logits)), num_groups=GROUPS, topk_group=1)
    np.testing.assert_allclose(visits, 1, rtol=1e-6)


def test_the_bias_moves_against_the_load():
    bias = jnp.asarray([[0.5, 0.5, 0.5, 0.5], [0.0, 0.0, 0.0, 0.0]], jnp.float32)
    load = jnp.asarray([[9, 1, 2, 0], [3, 3, 3, 3]], jnp.int32)
    moved = balance.update_correction_bias(bias, load, 1e-3)
    np.testing.assert_allclose(moved, [[0.499, 0.501, 0.501, 0.501], [0, 0, 0, 0]], rtol=1e-6)


def test_the_bias_stays_where_the_load_is_level():
    for experts, load in ((7, 7), (49, 1001), (96, 5), (128, 1_000_003), (128, 5_592_405), (640, 3_000_000)):
        level = jnp.full(experts, load, jnp.int32)
        np.testing.assert_array_equal(balance.update_correction_bias(jnp.zeros(experts), level, 1e-3), 0)
        # One assignment more, and one expert is above a mean that all others are below.
        moved = balance.update_correction_bias(jnp.zeros(experts), level.at[3].add(1), 1e-3)
        np.testing.assert_array_equal(jnp.sign(moved), np.where(np.arange(experts) == 3, -1, 1))


def test_logits_in_half_precision_are_scored_in_f32():
    routed = some_routing()
    half = Routed(routed.expert_idx, routed.logits.astype(jnp.bfloat16))
    full = Routed(routed.expert_idx, half.logits.astype(jnp.float32))
    assert balance.expert_loss(half) == balance.expert_loss(full)


def test_a_token_with_fewer_experts_is_still_a_token():
    logits = jnp.zeros((2, EXPERTS), jnp.float32)
    some = jnp.asarray([[0, -1], [1, 2]], jnp.int32)
    # Two tokens: shares of 1, 1 and 1 assignment in units of E / (2 K), each times a mean score of 1 / E.
    np.testing.assert_allclose(balance.expert_loss(Routed(some, logits)), 3 / 4, rtol=1e-6)


def test_bad_arguments_are_refused():
    for options in ({"score": "softmx"}, {"over": "sequences"}):
        (name,) = options
        with pytest.raises(ValueError, match=f"{name}='.*' is unknown: choose one of"):
            balance.expert_loss(some_routing(), **options)
    for kept in (0, 9):
        with pytest.raises(ValueError, match=rf"topk_group={kept} must be within 1\.\.2"):
            balance.communication_loss(some_routing(), num_groups=2, topk_group=kept)
    with pytest.raises(ValueError, match="num_groups=0 does not divide"):
        balance.device_loss(some_routing(), num_groups=0)
    with pytest.raises(ValueError, match="expert_load is float32, but integers are needed"):
        balance.update_correction_bias(jnp.zeros(8), jnp.zeros(8), 1e-3)


def test_bad_shapes_are_refused():
    with pytest.raises(ValueError, match="num_groups=3 does not divide the 8 experts"):
        balance.device_loss(some_routing(), num_groups=3)
    with pytest.raises(ValueError, match=r"bias has shape \(4,\), but expert_load has \(8,\)"):
        balance.update_correction_bias(jnp.zeros(4), jnp.zeros(8, jnp.int32), 1e-3)
