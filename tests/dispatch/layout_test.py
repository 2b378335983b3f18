"""Rows land where the plan says: against a loop that places one row at a time, and as a round trip."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from tests.support.plans import PLAN_KINDS, many_plans, random_demand, random_plan
from topoep_jax import LayerConfig, Topology
from topoep_jax.combine import combine, sum_over_experts
from topoep_jax.dispatch import as_triple, build_layout, dispatch, extent_of, send_order, window
from topoep_jax.dispatch.rails import receive_order
from topoep_jax.plan import Plan

CASES = [(1, 4, 0, 1), (2, 8, 3, 2), (8, 16, 2, 1), (8, 8, 4, 2)]  # ranks, experts, slots, chunks
NUM_TOKENS, TOP_K, BLOCK = 23, 2, 4


def make_config(num_ranks, num_experts, num_slots, chunks, cap_factor=0.5):
    return LayerConfig(
        hidden=4,
        ffn=4,
        num_experts=num_experts,
        top_k=TOP_K,
        topology=Topology.uniform(1, num_ranks),
        num_slots=num_slots,
        chunks=chunks,
        block_rows=BLOCK,
        cap_factor=cap_factor,
    )


def place_one_by_one(config, expert_idx, slot_expert, quota):
    """{(rank, virtual row): (source, assignment)}, the definition of the layout in plain loops."""
    mains, domain = config.num_mains, config.topology.domain_of_rank
    ahead_rows = sum(config.window_rows(NUM_TOKENS * TOP_K)[:-1])
    queue = {}
    for source in range(config.num_ranks):
        for assignment, expert in enumerate(expert_idx[source].reshape(-1)):
            if expert >= 0:
                queue.setdefault((source, int(expert)), []).append(assignment)
    taken = dict.fromkeys(queue, 0)
    placed = {}
    for rank in range(config.num_ranks):
        experts = [rank * mains + j for j in range(mains)] + slot_expert[rank].tolist()
        served = {}
        for j, expert in enumerate(experts):
            for source in range(config.num_ranks):
                key = source, expert
                for _ in range(quota[source, rank, j]):
                    served.setdefault((j, source), []).append((source, queue[key][taken[key]]))
                    taken[key] += 1
        first, row, room = 0, ahead_rows, ahead_rows
        for j in range(len(experts)):
            sources = receive_order(config.topology)[rank]
            rows = [row for source in sources for row in served.get((j, source), [])]
            own = sum(len(served.get((j, s), [])) for s in sources if domain[s] == domain[rank])
            # Whole blocks of mains' rows that do not leave their domain go to chunk 1, as far as it holds them.
            ahead = min(own // BLOCK * BLOCK, room) if j < mains else 0
            room -= ahead
            placed |= {(rank, first + i): who for i, who in enumerate(rows[:ahead])}
            placed |= {(rank, row + i): who for i, who in enumerate(rows[ahead:])}
            first += ahead
            row += -(-(len(rows) - ahead) // BLOCK) * BLOCK
    assert all(taken[key] == len(queue[key]) for key in queue)
    return placed


def make_case(rng, config, kind=None):
    """Expert choices per rank with some padding, their demand, and a random plan or one of an adversarial kind."""
    if kind is not None:
        omega, slot_expert, quota = (v[kind] for v in many_plans(rng, config, NUM_TOKENS * TOP_K, len(PLAN_KINDS)))
        experts = np.arange(-1, config.num_experts)
        padded = np.concatenate([NUM_TOKENS * TOP_K - omega.sum(1, keepdims=True), omega], axis=1)
        expert_idx = np.stack([rng.permutation(np.repeat(experts, row)) for row in padded]).astype(np.int32)
        return expert_idx.reshape(config.num_ranks, NUM_TOKENS, TOP_K), omega, slot_expert, quota
    num_ranks, num_experts = config.num_ranks, config.num_experts
    demand = random_demand(rng, num_ranks, num_experts, NUM_TOKENS * TOP_K)
    expert_idx = np.stack([rng.permutation(np.repeat(np.arange(num_experts), row)) for row in demand])
    expert_idx[rng.random(expert_idx.shape) < 0.1] = -1
    expert_idx = expert_idx.reshape(num_ranks, NUM_TOKENS, TOP_K).astype(np.int32)
    omega = np.stack([np.bincount(row[row >= 0], minlength=num_experts) for row in expert_idx.reshape(num_ranks, -1)])
    return expert_idx, omega.astype(np.int32), *random_plan(rng, omega, config.num_slots)


def compiled_round_trip(config, num_windows, mesh=None):
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
            is_ahead = config.chunks == 2 and index == 0
            count = config.num_mains if is_ahead else config.num_instances
            win = window(layout.ahead if is_ahead else layout.rest, lo, size, BLOCK, count)
            buffer = dispatch(sent, win, "ep")
            received.append((buffer, jnp.repeat(win.block_instance, BLOCK)))
            returned = combine(buffer, returned, win, "ep")
            lo += size
        buffers, owners = (jnp.concatenate(parts) for parts in zip(*received, strict=True))
        valid = expert_idx >= 0
        tokens = sum_over_experts(returned, jnp.where(valid, place.reshape(valid.shape), -1))
        starts, aligned = (
            jnp.stack(both)[None] for both in zip(*((p.start, p.aligned) for p in layout[:2]), strict=True)
        )
        return buffers, owners, returned[place], tokens, layout.passes[None], starts, aligned

    mesh = mesh or Mesh(np.array(jax.devices()[: config.num_ranks]), ("ep",))
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
    for seed, kind in enumerate([None] * 6 + [*range(len(PLAN_KINDS))] * (num_ranks > 1)):
        rng = np.random.default_rng(seed)
        expert_idx, omega, slot_expert, quota = make_case(rng, config, kind)
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
            inside = (start[rank, :, instance] <= row) & (row < (start + aligned)[rank, :, instance])
            assert inside.sum() == 1
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
        for source in range(num_ranks):
            served = quota[source].copy()
            for assignment, expert in enumerate(expert_idx[source].reshape(-1)):
                held = np.concatenate([np.arange(config.num_experts).reshape(num_ranks, -1), slot_expert], axis=1)
                for rank, instance in np.argwhere((held == expert) & (served > 0))[:1] if expert >= 0 else ():
                    served[rank, instance] -= 1
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
    gpu = AbstractDevice("NVIDIA H200", 132, "gpu")
    run = compiled_round_trip(config, 1, AbstractMesh((8,), ("ep",), (AxisType.Auto,), abstract_device=gpu))
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
    assert config.window_rows(num_assignments) == (4096, 34432 + 6 * 128)
    assert config.cap_rows(1000) == 1152 + 6 * 128, "1.05 x 1000 is 1050, no float noise may push it over a block"


@pytest.mark.parametrize("chunks", [1, 2])
def test_one_pass_suffices_within_the_cap_and_windows_tile_every_plan(chunks):
    """10,000 plans, each with all of its ranks and windows, in one program and on no device but the host's."""
    config = make_config(4, 8, 3, chunks, cap_factor=1.05)
    num_assignments = NUM_TOKENS * TOP_K
    omega, slot_expert, quota = many_plans(np.random.default_rng(chunks), config, num_assignments, 10_000)
    passes, overflow, holds = (np.asarray(v) for v in jax.jit(jax.vmap(layout_laws(config)))(omega, slot_expert, quota))
    names = np.asarray(PLAN_KINDS)[np.arange(10_000) % len(PLAN_KINDS)]
    load = (-(-quota.sum(1) // BLOCK) * BLOCK).sum(2).max(1)
    cap = config.cap_rows(num_assignments)
    np.testing.assert_array_equal(passes[load <= cap], 1)
    np.testing.assert_array_equal(overflow == 0, passes == 1)
    assert holds.all(0).all(), f"windows do not tile the rows of {set(names[~holds.all(1)])}"
    if chunks == 1:
        np.testing.assert_array_equal(passes, -(-np.maximum(load, 1) // cap))
    # The claim is about something: each kind of plan fits now and then, and all but the balanced one may not.
    assert (load == cap).sum() > 500
    assert {str(name) for name in names[load <= cap]} == set(PLAN_KINDS)
    assert {str(name) for name in names[passes > 1]} >= {"any", "slots_hot", "one_rank", "no_replica", "brim"}
    assert passes.max() >= 3


def are_the_plan(config, layout, quota):
    """Both parts are the plan; what is ahead comes first, and from the own domain, for mains."""
    me, (ahead, rest) = jax.lax.axis_index("ep"), layout[:2]
    domain = jnp.asarray(config.topology.domain_of_rank)
    return (
        (ahead.send_rows + rest.send_rows == quota[me]).all()
        & (ahead.recv_rows + rest.recv_rows == quota[:, me]).all()
        & (ahead.send_in + ahead.send_rows == rest.send_in).all()
        & (ahead.recv_in + ahead.recv_rows == rest.recv_in).all()
        & ((ahead.recv_rows == 0) | (domain == domain[me])[:, None]).all()
        & (ahead.recv_rows[:, config.num_mains :] == 0).all()
        & (ahead.recv_rows.sum(0) == ahead.aligned).all()
    )


def tiles(begin, size, whole_begin, whole_size):
    """Pieces [W, R, J] follow each other without a gap, and together are the whole."""
    done = jnp.cumsum(size, 0) - size
    return ((begin == whole_begin[None] + done) | (size == 0)).all() & (size.sum(0) == whole_size).all()


def layout_laws(config):
    """(omega, slot_expert, quota) of one plan -> passes, overflow_rows, and whether each law of its windows holds."""
    num_assignments, num_ranks = NUM_TOKENS * TOP_K, config.num_ranks
    sizes = config.window_rows(num_assignments)
    worst = num_ranks * num_assignments + config.num_instances * BLOCK + sum(sizes)
    later = np.arange(1, -(-worst // sum(sizes)), dtype=np.int32) * sum(sizes)

    def of_plan(omega, slot_expert, quota):
        def on_rank(_):
            layout = build_layout(config, omega, slot_expert, quota, num_assignments, "ep")
            ahead = [seen(layout.ahead, 0, 0, config.num_mains)] if len(sizes) > 1 else []
            lo = sum(sizes[:-1])
            extra = jax.vmap(lambda lo: seen(layout.rest, lo, len(sizes), config.num_instances))(later)
            rest = [seen(layout.rest, lo, len(sizes) - 1, config.num_instances)]
            rest = jax.tree.map(lambda v, w: jnp.concatenate([v[None], w]), rest[0], extra)
            laws = [
                jnp.bool_(len(sizes) > 1) | (layout.ahead.send_rows == 0).all(),
                are_the_plan(config, layout, quota),
            ]
            for part, windows in [
                (layout.rest, rest),
                *((layout.ahead, jax.tree.map(lambda v: v[None], w)) for w in ahead),
            ]:
                (send_from, send_size, send_at), (recv_from, recv_size, recv_at), placed = windows
                laws += [
                    tiles(send_from, send_size, part.send_in, part.send_rows),
                    tiles(send_at, send_size, part.send_out, part.send_rows),
                    tiles(recv_from, recv_size, part.recv_in, part.recv_rows),
                    tiles(recv_at, recv_size, part.recv_out, part.recv_rows),
                    placed.all(),
                ]
            windows = jax.tree.map(lambda v, *w: jnp.concatenate([*(u[None] for u in w), v]), rest, *ahead)
            return jnp.stack(laws), *windows[:2]

        laws, sent, received = jax.vmap(on_rank, axis_name="ep")(jnp.arange(num_ranks))
        # [rank, window, peer, instance]: what a rank sends to a peer is what the peer receives from it.
        agree = [(a == b.swapaxes(0, 2)).all() for a, b in zip(sent, received, strict=True)]
        extent = extent_of(config, quota, num_assignments)
        return extent.passes, extent.overflow_rows, jnp.concatenate([laws.all(0), jnp.stack(agree)])

    def seen(part, lo, index, count):
        """Segments of a window on one rank, each [R, J] and in virtual rows, and whether its blocks are theirs, from
        the first of which on they fill the rows that the window says."""
        rows = sizes[index] if index < len(sizes) else sum(sizes)
        win = window(part, lo, rows, BLOCK, count)
        wide = lambda v: jnp.pad(v.reshape(num_ranks, count), ((0, 0), (0, config.num_instances - count)))  # noqa: E731
        virtual = lambda at, size: jnp.where(wide(size) > 0, wide(at) + lo, 0)  # noqa: E731
        there, back = win.dispatch, win.combine
        sent = wide(there.input_offsets), wide(there.send_sizes), virtual(there.output_offsets, there.send_sizes)
        received = wide(back.output_offsets), wide(back.send_sizes), virtual(back.input_offsets, back.send_sizes)
        at, size = back.input_offsets.reshape(num_ranks, count), back.send_sizes.reshape(num_ranks, count)
        ends = win.block_instance[jnp.stack([at, at + jnp.maximum(size, 1) - 1]) // BLOCK]
        blocks = ((ends == jnp.arange(count)[None, None]) | (size == 0)[None]).all()
        inside = at + size <= (win.first_block * BLOCK + win.filled)[None]
        return sent, received, blocks & (inside | (size == 0)).all() & (size.sum(0) == win.filled).all()

    return of_plan
