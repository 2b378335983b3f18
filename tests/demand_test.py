"""Demand counts every assignment once, padding nowhere, and is the same matrix on every rank."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from topoep_jax.demand import count_demand, gather_demand

R, T, K, E = 8, 13, 3, 10


@functools.cache
def compiled_count():
    return jax.jit(lambda idx: count_demand(idx, E))


def selection(seed, padding=0.2):
    rng = np.random.default_rng(seed)
    idx = rng.integers(0, E, (R, T, K))
    return np.where(rng.random((R, T, K)) < padding, rng.integers(-9, 0, (R, T, K)), idx).astype(np.int32)


def histogram(idx):
    return np.stack([np.bincount(row[row >= 0], minlength=E) for row in idx])


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.3, 1.0]))
def test_every_assignment_counts_once_and_padding_nowhere(seed, padding):
    idx = selection(seed, padding)[0]
    count = np.asarray(compiled_count()(idx))
    assert count.dtype == np.int32
    np.testing.assert_array_equal(count, histogram(idx[None])[0])
    assert count.sum() == (idx >= 0).sum()


def test_extreme_loads():
    assert compiled_count()(np.full((T, K), E - 1, np.int32)).tolist() == [0] * (E - 1) + [T * K]
    assert count_demand(np.zeros((0, K), np.int32), E).tolist() == [0] * E
    assert count_demand(np.array([[0, -1]], np.int64), 1).tolist() == [1]
    assert count_demand(np.array([[127, -128]], np.int8), 128).tolist() == [0] * 127 + [1]


def test_an_expert_out_of_range_raises_outside_traced_code():
    for array in (np.array([[0, E]], np.int32), jnp.array([[0, E]], jnp.int32), np.array([[2**32]])):
        with pytest.raises(ValueError, match=r"experts 0\.\.9"):
            count_demand(array, E)


def test_an_expert_out_of_range_spoils_the_row_in_traced_code():
    idx = selection(1)[0]
    idx[4, 1] = E
    np.testing.assert_array_equal(compiled_count()(idx), -np.ones(E))


@pytest.mark.parametrize(
    ("idx", "num_experts", "error", "message"),
    [
        (np.zeros(3, np.int32), E, ValueError, r"shape \(3,\)"),
        (np.zeros((3, 2), np.float32), E, TypeError, "dtype float32"),
        (np.zeros((3, 2), bool), E, TypeError, "dtype bool"),
        (np.zeros((3, 2), np.int32), 0, ValueError, "num_experts=0"),
    ],
)
def test_bad_arguments_are_named(idx, num_experts, error, message):
    with pytest.raises(error, match=message):
        count_demand(idx, num_experts)


def test_omega_is_equal_on_all_ranks_of_a_group_under_shard_map():
    """Beside a data axis: every group of four ranks has its own omega."""
    idx, bad = selection(2), np.arange(R) == 5
    mesh = Mesh(np.asarray(jax.devices()[:R]).reshape(2, 4), ("data", "ep"))
    both = P(("data", "ep"))

    def body(idx, bad):
        return gather_demand(idx[0], E, "ep", bad=bad[0])[None]

    omega = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=both, out_specs=both))(idx, bad)
    want = histogram(idx).reshape(2, 4, E)
    want[1, 1] = -1
    np.testing.assert_array_equal(np.asarray(omega).reshape(2, 4, 4, E), want[:, None].repeat(4, 1))


def test_omega_may_not_pass_as_replicated():
    """What follows from omega differs by rank, so its type must say varying: shard_map then refuses out_specs=P()."""
    mesh = Mesh(np.asarray(jax.devices()[:R]), ("ep",))
    run = jax.shard_map(lambda idx: gather_demand(idx[0], E, "ep"), mesh=mesh, in_specs=P("ep"), out_specs=P())
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(run, selection(2))


def test_omega_under_pmap_and_vmap():
    idx = selection(3)
    by_pmap = jax.pmap(lambda i: gather_demand(i, E, "ep"), axis_name="ep", devices=jax.devices()[:R])(idx)
    by_vmap = jax.vmap(lambda i: gather_demand(i, E, "ep"), axis_name="ep")(idx)
    want = np.broadcast_to(histogram(idx), (R, R, E))
    np.testing.assert_array_equal(by_pmap, want)
    np.testing.assert_array_equal(by_vmap, want)
