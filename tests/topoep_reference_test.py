"""The stages of planner `topoep` in NumPy, one law each, and cases whose best plan is known by hand."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import SKEWS, Case, named, tagged
from tests.generator import GOOD_KINDS, biased_demand, small_demand
from topoep_jax.plan import CostModel, picoseconds, reference
from topoep_jax.plan.laws import (
    benefit,
    bookkeeping,
    capacity,
    conservation,
    never_worse,
    no_idle_replica,
    reachability,
    slots,
    well_formed,
)
from topoep_jax.plan.problem import Problem, meets_cap, none
from topoep_jax.plan.topoep import EFFORTS, Kind, candidates, topoep
from topoep_jax.plan.topoep.apportion import apportion
from topoep_jax.plan.topoep.effort import EMPTY, NO_SPREAD, UNLIMITED, served_experts
from topoep_jax.plan.topoep.facts import NOWHERE, Facts
from topoep_jax.plan.topoep.fill import fill
from topoep_jax.plan.topoep.improve import improve, max_aligned_rows, objective, thrifty_objective
from topoep_jax.plan.topoep.search import build, choose
from topoep_jax.plan.topoep.select import find_pairs, select
from topoep_jax.topology import Topology

LAWS = (
    well_formed,
    slots,
    reachability,
    conservation,
    benefit,
    no_idle_replica,
    never_worse,
    capacity,
    bookkeeping,
)
SMALL = pytest.mark.parametrize("case", tagged("laws"), ids=lambda case: case.name)


def solve(omega, problem):
    draft = topoep(omega.astype(np.int64), problem)
    return reference.finish(draft, omega.astype(np.int64), problem)


def ps(plan):
    return int(picoseconds(plan.predicted_ps))


def demand(case, seed=0):
    return [(kind, small_demand(case, kind, seed).astype(np.int64)) for kind in GOOD_KINDS]


EFFORT = dataclasses.replace(EFFORTS["fast"], spread=(NO_SPREAD, 10), greedy_spread=(0, 50), price=(0, 5), fill_moves=8)
"""Few candidates, but of every sort."""


def batch(case):
    """The candidates of a case."""
    return candidates(case.topology, case.num_slots, EFFORT)


@pytest.mark.parametrize("name", EFFORTS)
def test_candidates_come_in_order_and_once(name):
    """The empty plan; then from it, move by move and by intervals; then the grid, the last field fastest."""
    effort = EFFORTS[name]
    found = candidates(Topology.uniform(4, 8), 2, effort)
    by_moves = [(spread, price) for spread in effort.greedy_spread for price in effort.price]
    by_intervals = [(spread, -1) for spread in effort.empty_spread]
    start = 1 + len(by_moves) + len(by_intervals)
    assert found[0] == EMPTY
    assert [(c.spread, c.price) for c in found[1:start]] == by_moves + by_intervals
    own = [UNLIMITED if halves is None else 3 * halves // 2 for halves in effort.own]
    grid = itertools.product(own, effort.inbound, effort.sixteenths, effort.spread)
    assert [(c.own, c.inbound, c.sixteenths, c.spread) for c in found[start:]] == list(grid)
    assert len(found) == len(set(found))


def test_shares_of_few_slots_are_not_tried_twice():
    topology = Topology((0, 0, 1))
    found = candidates(topology, 1, EFFORTS["full"])
    served = [served_experts(topology, 1, c.sixteenths) for c in found if c.own == UNLIMITED and c.spread == NO_SPREAD]
    assert sorted(set(served)) == [(0, 0), (1, 1), (2, 1)]
    assert next(c.sixteenths for c in found if served_experts(topology, 1, c.sixteenths) == (2, 1)) == 9


@pytest.mark.parametrize(("topology", "num_slots"), [(Topology((0,)), 3), (Topology((0, 1)), 0)])
def test_without_slots_there_is_only_the_empty_plan(topology, num_slots):
    assert candidates(topology, num_slots, EFFORTS["full"]) == (EMPTY,)


@st.composite
def margins(draw):
    """Two lists of rows with the same sum, up to the largest that int32 holds."""
    total = draw(st.integers(0, 50) | st.integers(0, 2**31 - 1))
    cuts = st.lists(st.integers(0, total), max_size=7).map(sorted)
    return [np.diff([0, *draw(cuts), total]).astype(np.int64) for _ in range(2)]


@given(margins())
def test_apportion_sums_to_both_sides_and_is_near_the_proportion(given_and_taken):
    given, taken = given_and_taken
    parts = apportion(given, taken)
    assert (parts >= 0).all()
    assert (parts.sum(axis=1) == given).all()
    assert (parts.sum(axis=0) == taken).all()
    exact = given.astype(float)[:, None] * taken / max(given.sum(), 1)
    assert (abs(parts - exact) <= max(given.size, taken.size)).all()


def test_apportion_by_hand():
    # Proportional shares 1.5 1.5 | 1.5 1.5 round down to 1 each; the rest lies end to end: 1 1 against 1 1.
    assert apportion(np.array([3, 3]), np.array([3, 3])).tolist() == [[2, 1], [1, 2]]


@SMALL
def test_fill_serves_what_was_selected_and_moves_every_row_once(case):
    if len(batch(case)) == 1:
        return
    serving = [c for c in batch(case) if c.sixteenths]
    for kind, omega in demand(case):
        facts = Facts.of(omega, case.problem())
        pairs = find_pairs(facts)
        chosen = select(facts, pairs, serving)
        slot_expert, rows = fill(facts, pairs, chosen, moves=8)
        assert (rows >= 0).all(), kind
        assert (rows.sum(axis=(1, 2)) == omega.sum()).all(), kind
        mains = case.problem().mains_per_rank
        for c in range(len(serving)):
            executed = np.zeros_like(facts.demand)  # [M, E]
            domain_of_main = np.repeat(facts.domain, mains)
            np.add.at(executed, (domain_of_main, np.arange(case.num_experts)), rows[c, :, :mains].ravel())
            rank, slot = np.nonzero(slot_expert[c] != NOWHERE)
            np.add.at(executed, (facts.domain[rank], slot_expert[c, rank, slot]), rows[c, rank, mains + slot])
            expected = np.zeros_like(facts.demand)
            served = (pairs.domain[chosen[c]], pairs.expert[chosen[c]])
            expected[served] = facts.demand[served]
            expected[facts.home, np.arange(case.num_experts)] = omega.sum(axis=0) - expected.sum(axis=0)
            assert (executed == expected).all(), kind


@SMALL
def test_candidates_conserve_rows_and_hold_no_expert_twice(case):
    for kind, omega in demand(case, seed=1):
        facts = Facts.of(omega, case.problem())
        plans = build(facts, find_pairs(facts), batch(case), EFFORT.fill_moves)
        assert (plans.quota >= 0).all()
        for index in range(len(plans)):
            assert (omega == plans.draft(index, facts).quota.sum(axis=1).T).all(), kind
            for rank, experts in enumerate(plans.experts()[index]):
                held = experts[experts != NOWHERE]
                assert held.size == np.unique(held).size, (kind, rank)
        idle = (plans.slot_expert != NOWHERE) & (plans.rows()[..., case.problem().mains_per_rank :] == 0)
        assert not idle.any(), kind


@SMALL
def test_a_candidate_does_not_depend_on_the_others(case):
    for _, omega in demand(case, seed=3):
        facts = Facts.of(omega, case.problem())
        pairs = find_pairs(facts)
        together = build(facts, pairs, batch(case), EFFORT.fill_moves)
        for index, candidate in list(enumerate(batch(case)))[::3]:
            alone = build(facts, pairs, (candidate,), EFFORT.fill_moves)
            improve(facts, alone, tuple(Kind), functools.partial(objective, facts))
            if index == 0:
                improve(facts, together, tuple(Kind), functools.partial(objective, facts))
            assert (alone.slot_expert[0] == together.slot_expert[index]).all()
            assert (alone.quota[0] == together.quota[index]).all()


@SMALL
@pytest.mark.parametrize("kind", Kind)
def test_no_round_raises_the_cost(case, kind):
    for _, omega in demand(case, seed=2):
        facts = Facts.of(omega, case.problem(block_rows=4))
        plans = build(facts, find_pairs(facts), batch(case), EFFORT.fill_moves)
        for costs, level in ((objective, False), (thrifty_objective, False), (max_aligned_rows, True)):
            if level and kind != Kind.LOAD:
                continue
            before, rows = costs(facts, plans), plans.quota.sum(axis=(2, 3))
            improve(facts, plans, (kind, kind), functools.partial(costs, facts), level=level)
            assert (costs(facts, plans) <= before).all()
            assert (plans.quota >= 0).all()
            assert (plans.quota.sum(axis=(2, 3)) == rows).all()


def test_choice():
    cost, cross, aligned = (
        np.array([1300, 1280, 1290, 1291, 1289]),
        np.array([9, 8, 7, 0, 6]),
        np.array([5, 9, 9, 9, 9]),
    )
    everything = np.ones(5, bool)
    assert choose(cost, cross, aligned, everything, paper=False) == 4, "1290 is the limit; the fewest rows cross"
    assert choose(cost, cross, aligned, everything, paper=True) == 4, "the paper's plan is the limit"
    assert choose(cost, cross, aligned, aligned < 9, paper=True) == 0, "only the empty plan meets the cap"
    assert choose(cost, cross, aligned, aligned < 5, paper=True) == 0, "none does: the smallest"
    assert choose(np.full(5, 7), cross, aligned, everything, paper=True) == 0, "the empty plan wins ties"


@SMALL
@pytest.mark.parametrize("effort", ["fast", pytest.param("default", marks=pytest.mark.full)])
def test_laws(case, effort):
    mean_rows = case.tokens * case.top_k
    for seed, objective_name, cap_rows in ((0, "bottleneck", None), (1, "eq8", mean_rows), (2, "bottleneck", 40)):
        problem = case.problem(objective=objective_name, cap_rows=cap_rows, block_rows=8)
        problem = dataclasses.replace(problem, effort=effort)
        for _, omega in demand(case, seed):
            plan = solve(omega, problem)
            for law in LAWS:
                law(plan, omega, problem)


def test_a_cap_is_met_where_balance_alone_would_stop_short():
    """Compute is free, so only the cap asks for balance: 4 ranks, all rows for one expert."""
    topology = Topology((0, 0, 0, 0))
    problem = Problem(topology, CostModel(1, 1, 0, 1000, 1000), 4, 1, 16, 4, "bottleneck", "fast")
    omega = np.zeros((4, 4), np.int64)
    omega[0, 0] = 64
    assert solve(omega, dataclasses.replace(problem, cap_rows=None)).rank_load.max() == 64
    plan = solve(omega, problem)
    assert plan.rank_load.tolist() == [16, 16, 16, 16]
    assert meets_cap(plan.quota, problem)


def one_domain(num_experts, num_slots, cost, num_ranks=4, effort="fast"):
    return Problem(Topology((0,) * num_ranks), cost, num_experts, num_slots, None, 1, "bottleneck", effort)


def test_a_slow_rank_gets_as_much_less():
    """Four mains of 950 rows, one rank at 0.8 of the speed: 3800 rows at 1000 : 1000 : 800 : 1000 is the optimum."""
    cost = CostModel(1, 1, 1000, 0, 0, rank_speed=(1000, 1000, 800, 1000))
    omega = np.zeros((4, 4), np.int64)
    omega[:, :] = 950 // 4
    omega[0] += 2
    plan = solve(omega, one_domain(4, 1, cost))
    assert plan.rank_load.tolist() == [1000, 1000, 800, 1000]
    assert ps(plan) == 1_000_000


def test_few_rows_activate_fewer_replicas_than_many():
    """An instance takes as long as 100 rows: 90 + 10 rows are best left alone, 900 + 100 rows are best halved."""
    cost = CostModel(1, 1, 1000, 0, 0, instance_ps=100_000)
    few = np.array([[90, 0, 10, 0], [0, 0, 0, 0]])
    problem = one_domain(4, 2, cost, num_ranks=2)
    plan = solve(few, problem)
    assert ((plan.slot_expert >= 0).sum(), ps(plan)) == (0, 100_000)
    plan = solve(few * 10, problem)
    assert ((plan.slot_expert >= 0).sum(), ps(plan)) == (1, 500_000)


def test_tiles_are_not_split():
    """11 tiles of 128 rows beside mains of 8.5: ten tiles are the best a rank can reach, with one copy of one tile.

    Without padding it is split further: three copies give 1164 rows each for three pulls, worth ten rows each, and two
    copies with a third rank's expert handed on do better still.
    """
    row_ps, pull_ps = 100, 1000
    cost = CostModel(1_000_000, 1, row_ps, 1, 1)  # a few hundred rows of two bytes take no time
    omega = np.diag([1408, 1083, 1083, 1082])
    plan = solve(omega, one_domain(4, 1, cost, effort="default"))
    assert (plan.slot_expert == 0).sum() > 1
    assert ps(plan) <= 1164 * row_ps + 3 * pull_ps
    cost = dataclasses.replace(cost, tile_rows=128)
    plan = solve(omega, one_domain(4, 1, cost, effort="default"))
    assert ((plan.slot_expert == 0).sum(), ps(plan)) == (1, 1280 * row_ps + pull_ps)
    assert plan.quota.sum(axis=0)[:, 1].max() == 128


def test_refinement_finds_what_no_candidate_tries(monkeypatch):
    """Two tiles of one expert, four ranks: one copy of one tile is best; candidates split 64 rows to every rank."""
    monkeypatch.setitem(
        EFFORTS, "fast", dataclasses.replace(EFFORTS["fast"], refine_changes=100, refine_starts=1, refine_waves=4)
    )
    problem = one_domain(4, 1, CostModel(1_000_000, 1, 100, 1, 1, tile_rows=128))
    omega = np.diag([256, 0, 0, 0])
    plan = solve(omega, problem)
    assert ((plan.slot_expert == 0).sum(), ps(plan)) == (1, 128 * 100 + 1000)
    for law in LAWS:
        law(plan, omega, problem)


def model(tokens, **cost):
    """Qwen3 30B with so few tokens that drawing them is quick, and experts as much lighter."""
    case = dataclasses.replace(named("qwen3_30b"), tokens=tokens)
    full = case.cost
    scaled = dataclasses.replace(full, expert_bytes=full.expert_bytes * tokens // 4096, **cost)
    return case, Problem(case.topology, scaled, case.num_experts, case.num_slots, None, 1, "bottleneck", "fast")


def test_a_published_model_runs_faster_than_without_replicas_and_than_the_papers_plan():
    case, problem = model(512)
    for skew, omega in biased_demand(case, SKEWS, seed=0).items():
        ours = ps(solve(omega, problem))
        assert ours <= ps(reference.solve(omega, problem, "none"))
        assert ours <= ps(reference.solve(omega, problem, "topoep_paper")), skew


def test_a_slow_rank_of_a_published_model():
    speed = (1000,) * 5 + (800,) + (1000,) * 26
    case, problem = model(512, rank_speed=speed)
    load = solve(biased_demand(case, (-2,), seed=0)[-2], problem).rank_load
    assert abs(load[5] / np.delete(load, 5).mean() - 0.8) < 0.08


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_never_worse_than_the_empty_plan(data):
    domains = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
    number = {domain: i for i, domain in enumerate(dict.fromkeys(domains))}
    topology = Topology(tuple(number[domain] for domain in domains))
    num_experts = len(domains) * data.draw(st.integers(1, 3))
    num_slots = data.draw(st.integers(0, num_experts - num_experts // len(domains)))
    case = Case("drawn", topology, num_experts, 2, 2, 2, num_slots, tokens=data.draw(st.integers(0, 99)))
    rank_speed = data.draw(st.none() | st.lists(st.integers(300, 3000), min_size=len(domains), max_size=len(domains)))
    cost = CostModel(
        expert_bytes=data.draw(st.integers(1, 300)),
        token_bytes=data.draw(st.integers(1, 8)),
        row_ps=data.draw(st.integers(0, 50)),
        inter_fs_per_byte=data.draw(st.sampled_from([0, 999, 20_000])),
        intra_fs_per_byte=data.draw(st.sampled_from([0, 333, 5_000])),
        instance_ps=data.draw(st.sampled_from([0, 300])),
        tile_rows=data.draw(st.sampled_from([0, 4, 16])),
        rank_speed=None if rank_speed is None else tuple(rank_speed),
        pulls=data.draw(st.sampled_from(["direct", "relayed", "striped", "best"])),
    )
    omega = small_demand(case, data.draw(st.sampled_from(GOOD_KINDS[:-2])), data.draw(st.integers(0, 9)))
    problem = Problem(topology, cost, num_experts, num_slots, None, 1, "bottleneck", "fast")
    plan = solve(omega, problem)
    for law in LAWS:
        law(plan, omega, problem)
    empty = reference.finish(none(omega.astype(np.int64), problem), omega.astype(np.int64), problem)
    assert ps(plan) < ps(empty) or (plan.slot_expert == NOWHERE).all()
