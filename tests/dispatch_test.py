"""Rows land where the plan says: against a loop that places one row at a time, and as a round trip."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.plans import random_demand, random_plan
from topoep_jax import LayerConfig, Topology
from topoep_jax.combine import combine, sum_over_experts
from topoep_jax.dispatch import as_triple, build_layout, dispatch, send_order, window
from topoep_jax.plan import Plan

CASES = [(1, 4, 0, 1), (2, 8, 3, 2), (8, 16, 2, 1), (8, 8, 4, 2)]  # ranks, experts, slots, chunks
NUM_TOKENS, TOP_K, BLOCK = 23, 2, 4


def make_config(num_ranks, num_experts, num_slots, chunks):
    return LayerConfig(
        hidden=4,
        ffn=4,
        num_experts=num_experts,
        top_k=TOP_K,
        topology=Topology.uniform(1, num_ranks),
        num_slots=num_slots,
        chunks=chunks,
        block_rows=BLOCK,
        cap_factor=0.5,
    )


def place_one_by_one(config, expert_idx, slot_expert, quota):
    """{(rank, virtual row): (source, assignment)}, the definition of the layout in plain loops."""
    num_ranks, mains = config.num_ranks, config.num_mains
    first_slot_row = sum(config.window_rows(NUM_TOKENS * TOP_K)[:-1])
    queue = {}
    for source in range(num_ranks):
        for assignment, expert in enumerate(expert_idx[source].reshape(-1)):
            if expert >= 0:
                queue.setdefault((source, int(expert)), []).append(assignment)
    taken = dict.fromkeys(queue, 0)
    placed = {}
    for rank in range(num_ranks):
        row = 0
        experts = [rank * mains + j for j in range(mains)] + slot_expert[rank].tolist()
        for j, expert in enumerate(experts):
            row = -(-row // BLOCK) * BLOCK
            if j == mains:
                row = max(row, first_slot_row)
            for source in range(num_ranks):
                for _ in range(quota[source, rank, j]):
                    placed[rank, row] = (source, queue[source, expert][taken[source, expert]])
                    taken[source, expert] += 1
                    row += 1
    assert all(taken[key] == len(queue[key]) for key in queue)
    return placed


def make_case(rng, config):
    """Expert choices per rank with some padding, their demand, and a random plan."""
    num_ranks, num_experts = config.num_ranks, config.num_experts
    demand = random_demand(rng, num_ranks, num_experts, NUM_TOKENS * TOP_K)
    expert_idx = np.stack([rng.permutation(np.repeat(np.arange(num_experts), row)) for row in demand])
    expert_idx[rng.random(expert_idx.shape) < 0.1] = -1
    expert_idx = expert_idx.reshape(num_ranks, NUM_TOKENS, TOP_K).astype(np.int32)
    omega = np.stack([np.bincount(row[row >= 0], minlength=num_experts) for row in expert_idx.reshape(num_ranks, -1)])
    return expert_idx, omega.astype(np.int32), *random_plan(rng, omega, config.num_slots)


def compiled_round_trip(config, num_windows):
    """Sends each assignment's number, source and K tokens' features through `num_windows` buffers and back."""

    def on_rank(expert_idx, rows, omega, slot_expert, quota):
        layout = build_layout(config, omega, slot_expert, quota, expert_idx.size, "ep")
        order, place = send_order(expert_idx, config.num_experts)
        sent = rows[order]
        received, returned = [], jnp.zeros_like(sent)
        lo = 0
        sizes = config.window_rows(expert_idx.size)
        sizes = (sizes + (sum(sizes),) * num_windows)[:num_windows]
        for index, size in enumerate(sizes):
            mains_only = config.chunks == 2 and index == 0
            count = config.num_mains if mains_only else config.num_instances
            win = window(layout, lo, size, BLOCK, count)
            buffer = dispatch(sent, win, "ep")
            received.append((buffer, jnp.repeat(win.block_instance, BLOCK)))
            returned = combine(buffer, returned, win, "ep")
            lo += size
        buffers, owners = (jnp.concatenate(parts) for parts in zip(*received, strict=True))
        tokens = sum_over_experts(returned, place, expert_idx.shape[0])
        return buffers, owners, returned[place], tokens, layout.passes[None], layout.start[None], layout.aligned[None]

    mesh = Mesh(np.array(jax.devices()[: config.num_ranks]), ("ep",))
    specs = (P("ep"), P("ep"), P(), P(), P())
    return jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=specs, out_specs=P("ep"), check_vma=False))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_row_lands_where_one_by_one_placement_puts_it(case):
    config = make_config(*case)
    num_ranks, num_assignments = config.num_ranks, NUM_TOKENS * TOP_K
    # Enough buffers for any plan: all assignments on one rank, every instance padded.
    worst = num_ranks * num_assignments + config.num_instances * BLOCK + sum(config.window_rows(num_assignments))
    num_windows = config.chunks + -(-worst // sum(config.window_rows(num_assignments)))
    run = compiled_round_trip(config, num_windows)
    for seed in range(12):
        rng = np.random.default_rng(seed)
        expert_idx, omega, slot_expert, quota = make_case(rng, config)
        # Row content: 1 + source * A + assignment, so that zero means "nobody sent this".
        rows = 1.0 + np.arange(num_ranks * num_assignments, dtype=np.float32)[:, None] * np.ones((1, 2), np.float32)
        out = run(expert_idx.reshape(-1, TOP_K), rows, omega, slot_expert, quota)
        buffers, owners, returned, tokens, passes, start, aligned = (np.asarray(v) for v in out)
        buffers, owners = buffers.reshape(num_ranks, -1, 2)[:, :, 0], owners.reshape(num_ranks, -1)
        placed = place_one_by_one(config, expert_idx, slot_expert, quota)
        want = np.zeros_like(buffers)
        for (rank, row), (source, assignment) in placed.items():
            want[rank, row] = 1 + source * num_assignments + assignment
            instance = owners[rank, row]
            assert start[rank, instance] <= row < start[rank, instance] + aligned[rank, instance]
        np.testing.assert_array_equal(buffers, want)
        last_row = max((row for _, row in placed), default=0)
        assert len(set(passes.tolist())) == 1
        assert passes[0] == last_row // sum(config.window_rows(num_assignments)) + 1
        # Round trip: every assignment comes home, padding comes home as zero, a token sums its own.
        valid = expert_idx.reshape(-1) >= 0
        np.testing.assert_array_equal(returned, np.where(valid[:, None], rows, 0))
        np.testing.assert_array_equal(tokens, np.where(valid[:, None], rows, 0).reshape(-1, TOP_K, 2).sum(1))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_triple_names_the_instance_that_executes_each_assignment(case):
    config = make_config(*case)
    num_ranks, num_instances = config.num_ranks, config.num_instances
    run = jax.jit(as_triple)
    for seed in range(6):
        rng = np.random.default_rng(seed)
        expert_idx, _, slot_expert, quota = make_case(rng, config)
        plan = Plan(slot_expert, quota, quota.sum((0, 2)), np.zeros(2, np.int32), np.zeros((), np.int32))
        weight = rng.random(expert_idx.shape).astype(np.float32)
        want = np.full((num_ranks, NUM_TOKENS * TOP_K), -1)
        start, rows_of = {}, quota.sum(0)
        placed = place_one_by_one(config, expert_idx, slot_expert, quota)
        for (rank, _), (source, assignment) in sorted(placed.items()):
            instance, left = start.get(rank, (-1, 0))
            while left == 0:
                instance += 1
                left = rows_of[rank, instance]
            start[rank] = (instance, left - 1)
            want[source, assignment] = rank * num_instances + instance
        for rank in range(num_ranks):
            physical, instance, rerouted = (np.asarray(v) for v in run(plan, expert_idx[rank], weight[rank], rank))
            np.testing.assert_array_equal(instance.reshape(-1), want[rank])
            valid = expert_idx[rank] >= 0
            np.testing.assert_array_equal(physical[instance[valid]], expert_idx[rank][valid])
            np.testing.assert_array_equal(rerouted, np.where(valid, weight[rank], 0))


def test_the_triple_of_a_refused_plan_serves_nothing_and_bad_arguments_are_named():
    config = make_config(2, 8, 3, 2)
    plan = Plan(
        np.full((2, 3), -1, np.int32), np.zeros((2, 2, 7), np.int32), np.zeros(2), np.zeros(2), np.zeros((), np.int32)
    )
    assert config.num_instances == 7
    expert_idx, weight = jnp.zeros((4, 2), jnp.int32), jnp.ones((4, 2), jnp.float32)
    triple = as_triple(plan, expert_idx, weight, 1)
    assert (triple.rerouted_idx == -1).all()
    assert (triple.rerouted_weight == 0).all()
    with pytest.raises(ValueError, match=r"rank=2 must be within 0\.\.1"):
        as_triple(plan, expert_idx, weight, 2)
    with pytest.raises(ValueError, match="must be int32"):
        as_triple(plan, weight, weight, 0)


def test_send_order_is_stable_and_puts_padding_last():
    order, place = send_order(jnp.asarray([[2, 0], [-1, 2], [0, 1]], jnp.int32), 3)
    np.testing.assert_array_equal(order, [1, 4, 5, 0, 3, 2])
    np.testing.assert_array_equal(np.asarray(order)[np.asarray(place)], np.arange(6))


def test_ragged_exchange_is_in_the_gpu_program_and_the_emulation_is_not():
    config = make_config(8, 16, 2, 1)
    run = compiled_round_trip(config, 1)
    expert_idx, omega, slot_expert, quota = make_case(np.random.default_rng(0), config)
    rows = np.zeros((expert_idx.size, 2), np.float32)
    traced = run.trace(expert_idx.reshape(-1, TOP_K), rows, omega, slot_expert, quota)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("ragged_all_to_all") >= 2
    assert "all_gather" not in text


def test_window_rows_follow_the_glossary():
    config = LayerConfig(
        hidden=8, ffn=8, num_experts=128, top_k=8, topology=Topology.uniform(4, 8), num_slots=2, chunks=2
    )
    num_assignments = 4096 * 8
    assert config.cap_rows(num_assignments) == 34432 + 6 * 128
    assert config.window_rows(num_assignments) == (8192, 34432 + 6 * 128)
    assert config.cap_rows(1000) == 1152 + 6 * 128, "1.05 x 1000 is 1050, no float noise may push it over a block"
