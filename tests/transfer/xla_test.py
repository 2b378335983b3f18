"""Replica parameters arrive unchanged; replica gradients come home exactly once, in a fixed order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.support.plans import random_demand, random_plan
from topoep_jax.config import STAGING_BYTES
from topoep_jax.transfer import accumulate, pack, pull, push
from topoep_jax.transfer.api import slice_rows

CASES = [(1, 4, 2), (2, 8, 1), (8, 16, 3), (8, 8, 2)]  # ranks, experts, slots
SIZE = 24


def on_mesh(function, num_ranks, num_replicated):
    mesh = Mesh(np.array(jax.devices()[:num_ranks]), ("ep",))
    specs = (P("ep"),) * (2 if num_replicated == 0 else 1)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(*specs, P()), out_specs=P("ep"), check_vma=False))


def placements(num_ranks, num_experts, num_slots):
    """Random placements, all slots empty among them."""
    yield np.full((num_ranks, num_slots), -1, np.int32)
    for seed in range(8):
        rng = np.random.default_rng(seed)
        yield random_plan(rng, random_demand(rng, num_ranks, num_experts, 64), num_slots)[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pull_brings_each_slot_its_expert(case):
    num_ranks, num_experts, num_slots = case
    params = np.random.default_rng(1).normal(size=(num_experts, SIZE)).astype(np.float32)
    run = on_mesh(lambda mains, slots: pull(mains, slots, "ep"), num_ranks, 1)
    for slot_expert in placements(*case):
        got = np.asarray(run(params, slot_expert)).reshape(num_ranks, num_slots, SIZE)
        want = np.where((slot_expert >= 0)[:, :, None], params[slot_expert], 0)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("staging_bytes", [2**20, 64, 1])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_push_adds_every_replica_gradient_once_in_rank_and_slot_order(case, staging_bytes):
    num_ranks, num_experts, num_slots = case
    rng = np.random.default_rng(2)
    # Magnitudes far apart, so that another order of the sum would give other bits.
    spread = 10.0 ** rng.integers(-6, 6, size=(num_ranks * num_slots, 1))
    slot_grads = (rng.normal(size=(num_ranks * num_slots, SIZE)) * spread).astype(np.float32)
    main_grads = rng.normal(size=(num_experts, SIZE)).astype(np.float32)
    run = on_mesh(lambda *args: push(*args, "ep", staging_bytes=staging_bytes), num_ranks, 0)
    for slot_expert in placements(*case):
        want = main_grads.copy()
        for row, expert in enumerate(slot_expert.reshape(-1)):
            if expert >= 0:
                want[expert] += slot_grads[row]
        np.testing.assert_array_equal(np.asarray(run(slot_grads, main_grads, slot_expert)), want)


def test_staging_is_bounded_and_divides_the_gradient():
    for num_rows, size in [(64, 3 * 2048 * 768), (64, 3 * 4096 * 1408), (512, 3 * 5120 * 1536), (8, 24), (3, 7)]:
        columns = slice_rows(num_rows, size, 1, STAGING_BYTES)
        assert size % columns == 0
        assert num_rows * columns * 4 <= STAGING_BYTES


def test_empty_slots_send_nothing_even_if_they_hold_garbage():
    grads = jnp.full((8 * 2, SIZE), jnp.nan, jnp.float32)
    mains = jnp.ones((16, SIZE), jnp.float32)
    run = on_mesh(lambda slots, mains, plan: push(slots, mains, plan, "ep"), 8, 0)
    np.testing.assert_array_equal(run(grads, mains, np.full((8, 2), -1, np.int32)), mains)


@pytest.mark.parametrize("num_columns", [64, 1024 * 3, 40])
def test_the_kernels_give_what_the_loops_give(num_columns):
    """As GPUs run them, interpreted: sums row by row, and copies of what is pulled."""
    rng = np.random.default_rng(3)
    grads = rng.normal(size=(4, num_columns)).astype(np.float32)
    staged = (rng.normal(size=(6, num_columns)) * 10.0 ** rng.integers(-6, 6, size=(6, 1))).astype(np.float32)
    target = np.array([2, -1, 0, 2, -1, 2], np.int32)
    grads[1] = -0.0
    got = accumulate.by_kernel(jnp.asarray(grads), jnp.asarray(staged), jnp.asarray(target), interpret=True)
    want = accumulate.by_loop(jnp.asarray(grads), jnp.asarray(staged), jnp.asarray(target))
    np.testing.assert_array_equal(np.asarray(got).view(np.int32), np.asarray(want).view(np.int32))
    pulled = np.array([1, 0, 0, 1], np.int32)
    packed = np.asarray(pack.copy_pulled(jnp.asarray(grads), jnp.asarray(pulled), interpret=True))
    np.testing.assert_array_equal(packed[pulled > 0], grads[pulled > 0])
