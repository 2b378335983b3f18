"""Rotary positions: lengths kept, scores by distance alone, both pairings, the partial form, and YaRN's formula."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from models.deepseek_v2 import DeepSeekV2Config
from models.rotary import Yarn, rotate_halves, rotate_pairs, rotation

LENGTH, DIM = 6, 8


def turn_by(theta: float, yarn: Yarn | None = None):
    return rotation(jnp.arange(LENGTH, dtype=jnp.int32)[None, :], DIM, theta, yarn)


@pytest.mark.parametrize("rotate", [rotate_halves, rotate_pairs])
def test_rotation_keeps_lengths_and_depends_on_distance_alone(rotate):
    rng = np.random.default_rng(0)
    one, other = (np.tile(rng.standard_normal((1, 1, 1, DIM), np.float32), (1, LENGTH, 1, 1)) for _ in range(2))
    a, b = (np.asarray(rotate(jnp.asarray(x), turn_by(100.0)))[0, :, 0] for x in (one, other))
    np.testing.assert_allclose(np.linalg.norm(a, axis=1), np.linalg.norm(one[0, 0, 0]), rtol=1e-5)
    product = a @ b.T
    for distance in range(-3, 4):
        along = np.diagonal(product, distance)
        np.testing.assert_allclose(along, along[0], rtol=1e-4, atol=1e-4)
    assert abs(product[0, 3] - product[0, 0]) > 0.1


def test_pairs_are_halves_in_another_order():
    x = np.random.default_rng(0).standard_normal((2, LENGTH, 3, DIM), np.float32)
    order = np.arange(DIM).reshape(2, -1).T.ravel()  # 0, 4, 1, 5, ...
    halves = np.asarray(rotate_halves(jnp.asarray(x), turn_by(100.0)))
    pairs = np.asarray(rotate_pairs(jnp.asarray(x[..., order]), turn_by(100.0)))
    np.testing.assert_allclose(pairs, halves[..., order], rtol=1e-6)


def test_each_pair_turns_by_its_own_angle():
    x = np.zeros((1, LENGTH, 1, DIM), np.float32)
    x[..., : DIM // 2] = 1
    turned = np.asarray(rotate_halves(jnp.asarray(x), turn_by(100.0)))[0, :, 0]
    angle = np.arange(LENGTH)[:, None] * 100.0 ** (-np.arange(0, DIM, 2) / DIM)
    np.testing.assert_allclose(turned, np.concatenate([np.cos(angle), np.sin(angle)], axis=1), atol=1e-6)


def test_what_is_beyond_the_rotated_part_passes():
    x = np.random.default_rng(0).standard_normal((1, LENGTH, 2, DIM + 4), np.float32)
    turned = np.asarray(rotate_halves(jnp.asarray(x), turn_by(100.0)))
    np.testing.assert_array_equal(turned[..., DIM:], x[..., DIM:])
    np.testing.assert_array_equal(
        turned[..., :DIM], np.asarray(rotate_halves(jnp.asarray(x[..., :DIM]), turn_by(100.0)))
    )


def test_yarn_of_the_released_model():
    """The ramp of DeepSeek-V2 goes from the pair that turns 32 times in 4096 tokens to the one that turns once."""
    config = DeepSeekV2Config.deepseek_v2()
    before = 1e4 ** (-np.arange(0, 64, 2) / 64)
    turns = 4096 * before / (2 * math.pi)
    low, high = np.flatnonzero(turns >= 32)[-1], np.flatnonzero(turns <= 1)[0]
    ramp = np.clip((np.arange(32) - low) / (high - low), 0, 1)
    np.testing.assert_allclose(config.yarn.stretch(before, 1e4), before * (1 - ramp + ramp / 40), rtol=1e-12)
    assert (low, high) == (10, 23)
    np.testing.assert_allclose(config.yarn.rotation_magnitude, 1.0)
    np.testing.assert_allclose(config.yarn.score_magnitude, (1 + 0.0707 * math.log(40)) ** 2)


def test_unequal_weights_of_yarn_change_the_lengths():
    yarn = Yarn(factor=4.0, original_length=64, mscale=1.0, mscale_all_dim=0.5)
    magnitude = (1 + 0.1 * math.log(4)) / (1 + 0.05 * math.log(4))
    by = turn_by(100.0, yarn)
    np.testing.assert_allclose(np.hypot(by.cos, by.sin), magnitude, rtol=1e-6)
    assert Yarn(factor=1.0, original_length=64, mscale_all_dim=1.0).score_magnitude == 1.0


def test_where_the_ramp_has_no_length_it_is_a_step():
    # All pairs turn less than once over so short a context, so all are stretched, but for the first, where it begins.
    frequency = 1e4 ** (-np.arange(0, DIM, 2) / DIM)
    stretched = Yarn(factor=4.0, original_length=2).stretch(frequency, 1e4)
    np.testing.assert_allclose(stretched, frequency / [1, 4, 4, 4])
