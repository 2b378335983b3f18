"""What the emulated ranks move and multiply for replicas, counted: nothing where the planner sees no gain."""

import contextlib

import jax
import numpy as np
import pytest

from tests.moe_test import NODES, Program, Scenario, layer, make_inputs, run_on_mesh, with_gradients
from topoep_jax import Status
from topoep_jax.experts import scan
from topoep_jax.transfer import api as transfer
from topoep_jax.transport import xla

STAGING_BYTES = 160 * 2**10
SIZES = {"hidden": 64, "ffn": 64, "block_rows": 4, "staging_bytes": STAGING_BYTES}
PROGRAM = Program("skip", layer(NODES, 16, 3, 2, planner="topoep", chunks=2, cap_factor=1.6, **SIZES), 37)
EVEN, HOT = Scenario("uniform", seed=2), Scenario("one_hot_expert", hot=True, skew=2.0)
NOTHING = Scenario("no_token", padding=1.0)


class Counts:
    """What instrumented programs did on all devices together, and the buffers in which they receive replicas."""

    def __init__(self):
        self.seen = []
        self.moving = "rows"
        self.buffers = []

    def add(self, kind, amount):
        jax.debug.callback(lambda amount: self.seen.append((kind, int(amount))), amount)

    @contextlib.contextmanager
    def of_replicas(self, into):
        self.buffers.append(into)
        self.moving = "replicas"
        yield
        self.moving = "rows"

    def take(self):
        jax.effects_barrier()
        totals = dict.fromkeys(("rows", "replicas", "slot_products", "main_products"), 0)
        for kind, amount in self.seen:
            totals[kind] += amount
        self.seen.clear()
        return totals


def instrument(patch, counts):
    """Counts the bytes that exchanges move, and the blocks of rows that products take, in programs traced from now."""
    exchange, gather_rows, gmm, wgrad = transfer.exchange, xla.gather_rows, scan.gmm, scan.wgrad

    def exchange_replicas(rows, into, *args):
        with counts.of_replicas(into):
            return exchange(rows, into, *args)

    def count_bytes(rows, *args):
        counts.add(counts.moving, np.int32(rows.nbytes))
        return gather_rows(rows, *args)

    def count_blocks(block_instance, first, num_instances, kind):
        served = (block_instance >= first) & (block_instance < first + num_instances)
        counts.add(kind, served.sum(dtype=np.int32))

    def counted_gmm(rows, params, block_instance, **options):
        mains = params.mains.shape[0]
        count_blocks(block_instance, 0, mains, "main_products")
        count_blocks(block_instance, mains, params.num_instances - mains, "slot_products")
        return gmm(rows, params, block_instance, **options)

    def counted_wgrad(sums, works, first_row, *, first_instance, block_rows):
        kind = "slot_products" if first_instance else "main_products"
        for work in works:
            count_blocks(work.block_instance, first_instance, sums.shape[0], kind)
        return wgrad(sums, works, first_row, first_instance=first_instance, block_rows=block_rows)

    patch.setattr(transfer, "exchange", exchange_replicas)
    patch.setattr(xla, "gather_rows", count_bytes)
    patch.setattr(scan, "gmm", counted_gmm)
    patch.setattr(scan, "wgrad", counted_wgrad)


@pytest.fixture(scope="module")
def counts():
    return Counts()


@pytest.fixture(scope="module")
def run(counts):
    """The instrumented layer, forward and backward: scenario -> (metrics, (results, gradients))."""
    program = with_gradients(lambda params, x, mask: run_on_mesh(PROGRAM.config, params, x, mask))
    with pytest.MonkeyPatch.context() as patch:
        instrument(patch, counts)
        compiled = program.lower(*make_inputs(PROGRAM, EVEN)).compile()

    def run(scenario):
        counts.take()  # of a test before, which need not have looked
        (_, (y, metrics, _)), grads = compiled(*make_inputs(PROGRAM, scenario))
        return jax.tree.map(lambda v: np.asarray(v)[0], metrics), jax.tree.map(np.asarray, (y, grads))

    return run


def test_without_replicas_no_parameter_and_no_gradient_moves(run, counts):
    metrics, _ = run(EVEN)
    even = counts.take()
    assert metrics.status & Status.EMPTY
    assert even["replicas"] == even["slot_products"] == 0
    assert even["rows"] > 0 < even["main_products"]

    metrics, _ = run(HOT)
    hot = counts.take()
    assert not metrics.status & Status.EMPTY
    # Each replica comes twice, for the forward and for the backward pass, and its gradient goes home, in f32.
    assert hot["replicas"] >= 3 * 4 * PROGRAM.config.expert_size * metrics.slots_used > 0
    assert hot["slot_products"] > 0 < hot["main_products"]

    run(NOTHING)
    assert set(counts.take().values()) == {0}, "without a token not even a row moves"


def test_gradients_with_replicas_repeat_bit_by_bit(run):
    metrics, first = run(HOT)
    assert metrics.slots_used > 0
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, run(HOT)[1], first)


def test_replica_gradients_are_staged_within_the_bound(run, counts):
    staged = [into.nbytes for into in counts.buffers if into.shape[0] == 8 * 2]
    assert staged
    assert max(staged) <= STAGING_BYTES < 8 * 2 * 64 * 2 * 64 * 4, (
        "the bound must bind: gate and up in one piece exceed it"
    )
