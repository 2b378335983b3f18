"""The bodies of the transfer kernels, on host threads, give the bits of the transport over lax collectives."""

import itertools

import jax
import numpy as np
import pytest

from tests.native.host_transfer import host_pull, host_push
from tests.transfer.xla_test import on_mesh, placements
from topoep_jax import Topology, solve_plan
from topoep_jax.plan.problem import PULLS, CostModel
from topoep_jax.transfer import pull, push

CASES = [  # topology, experts, slots, elements of an expert
    (Topology((0, 0)), 8, 1, 24),
    (Topology((0, 1, 0, 1, 1)), 10, 3, 33),
    (Topology((0, 0, 0, 1, 1, 2, 2, 2)), 16, 2, 96),
    (Topology.uniform(2, 4), 8, 4, 1),
]


def cost(mode: str) -> CostModel:
    return CostModel(1000, 1, 0, inter_fs_per_byte=20_000, intra_fs_per_byte=5_000, pulls=mode)


def bits(x) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


# What moves are bytes, so a sample of the narrow dtype will do.
NARROW = [pytest.param(case, "bfloat16", marks=[] if case is CASES[1] else pytest.mark.full) for case in CASES]


@pytest.mark.parametrize(("case", "dtype"), [*((case, "float32") for case in CASES), *NARROW], ids=str)
def test_pulls_are_those_of_the_xla_transport(case, dtype):
    topology, num_experts, num_slots, size = case
    num_ranks = topology.num_ranks
    mains = jax.random.normal(jax.random.key(1), (num_ranks, num_experts // num_ranks, size)).astype(dtype)
    xla = on_mesh(lambda mains, slots: pull(mains, slots, "ep"), num_ranks, 1)
    ways = itertools.cycle(itertools.product(PULLS, ("all", "domain", "none"), (1, 2, 3)))
    for slot_expert in placements(num_ranks, num_experts, num_slots):
        want = np.asarray(xla(mains.reshape(num_experts, size), slot_expert)).reshape(num_ranks, num_slots, size)
        for mode, gets, workers in itertools.islice(ways, 9):
            got = host_pull(mains, slot_expert, topology, cost(mode), gets=gets, workers=workers)
            np.testing.assert_array_equal(bits(got), bits(want), err_msg=f"{mode}, {gets}, {workers} workers")


@pytest.mark.parametrize("staging_bytes", [2**20, 1024])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_pushes_are_those_of_the_xla_transport(case, staging_bytes):
    topology, num_experts, num_slots, size = case
    num_ranks = topology.num_ranks
    rng = np.random.default_rng(2)
    # Magnitudes far apart, so that another order of the sum would give other bits; some zeros are negative.
    spread = 10.0 ** rng.integers(-6, 6, size=(num_ranks, num_slots, 1))
    slot_grads = (rng.normal(size=(num_ranks, num_slots, size)) * spread).astype(np.float32)
    main_grads = rng.normal(size=(num_ranks, num_experts // num_ranks, size)).astype(np.float32)
    main_grads[rng.random(main_grads.shape) < 0.2] = -0.0
    xla = on_mesh(lambda slots, mains, plan: push(slots, mains, plan, "ep"), num_ranks, 0)
    for slot_expert, workers in zip(placements(num_ranks, num_experts, num_slots), itertools.cycle((1, 2, 3))):
        sent = np.where((slot_expert >= 0)[:, :, None], slot_grads, np.float32(np.nan))
        want = xla(slot_grads.reshape(-1, size), main_grads.reshape(-1, size), slot_expert)
        got = host_push(sent, main_grads, slot_expert, topology, workers=workers, staging_bytes=staging_bytes)
        np.testing.assert_array_equal(bits(got).reshape(-1), bits(want).reshape(-1))


def test_transfers_of_a_planner_s_plan():
    topology, num_experts, size = Topology.uniform(2, 4), 32, 40
    omega = np.random.default_rng(3).multinomial(4096, np.r_[np.full(4, 0.15), np.full(28, 0.4 / 28)], size=8)
    plan = solve_plan(omega.astype(np.int32), topology, cost("best"), num_slots=2)
    slot_expert = np.asarray(plan.slot_expert)
    assert (slot_expert >= 0).any()
    mains = np.random.default_rng(4).normal(size=(8, 4, size)).astype(np.float32)
    slots = np.asarray(host_pull(mains, slot_expert, topology, cost("best")))
    want = np.where((slot_expert >= 0)[:, :, None], mains.reshape(num_experts, size)[slot_expert], 0)
    np.testing.assert_array_equal(slots, want)
    summed = np.asarray(host_push(slots, mains, slot_expert, topology))
    for rank, slot in np.argwhere(slot_expert >= 0):
        mains.reshape(num_experts, size)[slot_expert[rank, slot]] += slots[rank, slot]
    np.testing.assert_array_equal(summed, mains)


@pytest.mark.parametrize(("num_ranks", "num_slots"), [(1, 0), (1, 2), (3, 0), (3, 2)])
def test_nothing_to_move(num_ranks, num_slots):
    topology, mains = Topology((0,) * num_ranks), np.ones((num_ranks, 2, 5), np.float32)
    empty, rows = np.full((num_ranks, num_slots), -1, np.int32), (num_ranks, num_slots, 5)
    np.testing.assert_array_equal(host_pull(mains, empty, topology, cost("best"), gets="none"), np.zeros(rows))
    garbage = np.full(rows, np.nan, np.float32)
    np.testing.assert_array_equal(host_push(garbage, mains, empty, topology), mains)


TWO = Topology((0, 0))
MAINS = np.zeros((2, 2, 8), np.float32)
EMPTY = np.full((2, 1), -1, np.int32)


@pytest.mark.parametrize(
    ("slot_expert", "message"),
    [
        ([[0], [-1]], r"slot_expert\[0, 0\]=0 is a main of that rank"),
        ([[4], [-1]], r"slot_expert\[0, 0\]=4 must be in \[-1, 3\]"),
        ([[2, 2], [-1, -1]], r"slot_expert\[0, 0\]=2 is held twice by that rank"),
        ([[-1]], r"slot_expert has shape \[1, 1\], expected \[2, N\]"),
    ],
)
def test_illegal_placements_are_refused(slot_expert, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(host_pull(MAINS, np.array(slot_expert, np.int32), TWO, cost("direct")))


def test_bad_calls_are_refused():
    with pytest.raises(ValueError, match="gets='some' is unknown"):
        host_pull(MAINS, EMPTY, TWO, cost("direct"), gets="some")
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"workers=0 must be at least 1"):
        jax.block_until_ready(host_pull(MAINS, EMPTY, TWO, cost("direct"), workers=0))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"staging_bytes=32 must be at least 64"):
        slots = np.zeros((2, 1, 8), np.float32)
        jax.block_until_ready(host_push(slots, MAINS, EMPTY, TWO, staging_bytes=32))
