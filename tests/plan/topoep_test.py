"""The stages of planner `topoep` in NumPy, one law each, and cases whose best plan is known by hand."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cases import SKEWS, Case, named, tagged
from tests.support.generator import GOOD_KINDS, about, biased_demand, small_demand
from topoep_jax.plan import CostModel, picoseconds, reference
from topoep_jax.plan.finish import Worth, draft_of, finish, meets_cap
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
from topoep_jax.plan.problem import Problem, none
from topoep_jax.plan.topoep import EFFORTS, Kind, candidates, topoep
from topoep_jax.plan.topoep.apportion import apportion
from topoep_jax.plan.topoep.candidate import build
from topoep_jax.plan.topoep.context import NOWHERE, Context
from topoep_jax.plan.topoep.effort import EMPTY, NO_SPREAD, UNLIMITED, served_experts
from topoep_jax.plan.topoep.fill import fill
from topoep_jax.plan.topoep.fill_case import VARIANTS, FillCase
from topoep_jax.plan.topoep.improve import Improver, Target
from topoep_jax.plan.topoep.search import Entry, choose
from topoep_jax.plan.topoep.select import select
from topoep_jax.plan.topoep.state import State
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
    return finish(draft, omega.astype(np.int64), problem)


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


@SMALL
def test_fill_serves_what_was_selected_and_moves_every_row_once(case):
    for kind, omega in demand(case):
        context = Context(omega, case.problem())
        for candidate in [candidate for candidate in batch(case) if candidate.sixteenths][::4]:
            selection = select(context, candidate)
            slot_expert, rows = fill(context, selection, moves=8)
            assert (rows >= 0).all(), kind
            assert rows.sum() == omega.sum(), kind
            executed = np.zeros_like(context.demand)  # [M, E]
            expert = State(slot_expert, rows[None]).experts()
            exists = expert != NOWHERE
            rank = np.nonzero(exists)[0]
            np.add.at(executed, (context.domain_of[rank], expert[exists]), rows[exists])
            served = context.demand * selection.served
            served[context.home, np.arange(case.num_experts)] += selection.home_rows
            assert (executed == served).all(), kind


@SMALL
def test_a_filled_domain_counts_what_it_holds(case):
    """Loads and remote experts are counted as rows move, and decide on what follows."""
    for kind, omega in demand(case):
        context = Context(omega, case.problem())
        for candidate in [candidate for candidate in batch(case) if candidate.sixteenths][::6]:
            selection = select(context, candidate)
            for domain, variant in itertools.product(range(context.num_domains), range(VARIANTS)):
                filled = FillCase(context, selection, domain, variant)
                filled.fill(moves=8)
                rows = zip(filled.main_rows, filled.slot_rows, strict=True)
                assert filled.load == [sum(mains) + sum(slots) for mains, slots in rows], kind
                remote = [[e != NOWHERE and context.home[e] != domain for e in held] for held in filled.slot_expert]
                assert filled.remote == list(map(sum, remote)), kind


@SMALL
def test_candidates_conserve_rows_and_hold_no_expert_twice(case):
    for kind, omega in demand(case, seed=1):
        problem = case.problem()
        context = Context(omega, problem)
        for candidate in batch(case)[::3]:
            state = build(context, EFFORT, candidate)
            assert (state.quota >= 0).all()
            assert (omega == draft_of(state.plan(), problem).quota.sum(axis=1).T).all(), kind
            for rank, experts in enumerate(state.experts()):
                held = experts[experts != NOWHERE]
                assert held.size == np.unique(held).size, (kind, rank)
            idle = (state.slot_expert != NOWHERE) & (state.rows()[:, problem.mains_per_rank :] == 0)
            assert not idle.any(), kind


@SMALL
@pytest.mark.parametrize("target", Target)
def test_no_phase_raises_its_cost_or_loses_a_row(case, target):
    for kind, omega in demand(case, seed=2):
        context = Context(omega, case.problem(block_rows=4))
        for candidate in batch(case)[::8]:
            state = build(context, EFFORT, candidate)
            improver = Improver(context, state)
            for kinds in [(Kind.LOAD,) * 2] if target == Target.LEVEL else [(kind, kind) for kind in Kind]:
                cost, sent = improver.cost(target), state.quota.sum(axis=(1, 2))
                improver.run(target, kinds)
                assert improver.cost(target) <= cost, kind
                assert (state.quota >= 0).all()
                assert (state.quota.sum(axis=(1, 2)) == sent).all()


def test_choice():
    """Five entries, of which 0 is the empty plan, and 4 may be the paper's."""
    cost, inter_rows, aligned = [1300, 1280, 1290, 1291, 1289], [9, 8, 7, 0, 6], [5, 9, 9, 9, 9]

    def choice(cost=cost, *, paper, cap_rows=None):
        worth = [Worth(*both, has_replicas=True) for both in zip(cost, aligned, strict=True)]
        entries = [Entry(None, *both) for both in zip(worth, inter_rows, strict=True)]
        problem = dataclasses.replace(one_domain(4, 1, CostModel(1, 1, 1, 1, 1)), cap_rows=cap_rows)
        chosen = choose(problem, entries, paper=paper)
        return next(i for i, entry in enumerate(entries) if entry is chosen)

    assert choice(paper=False) == 4, "1290 is the limit; the fewest rows cross"
    assert choice(paper=True) == 4, "the paper's plan is the limit"
    assert choice(paper=True, cap_rows=8) == 0, "only the empty plan meets the cap"
    assert choice(paper=True, cap_rows=4) == 0, "none does: the smallest"
    assert choice([7] * 5, paper=True) == 0, "the empty plan wins ties"


@SMALL
@pytest.mark.parametrize("effort", ["fast", pytest.param("default", marks=pytest.mark.full)])
def test_laws(case, effort):
    """Every kind of demand, and by turns without a cap, with one and Eq. 8, and with one that is hard to meet."""
    questions = itertools.cycle([("bottleneck", None), ("eq8", case.tokens * case.top_k), ("bottleneck", 40)])
    for (kind, omega), (objective, cap_rows) in zip(demand(case), questions):  # noqa: B905
        problem = case.problem(objective=objective, cap_rows=cap_rows, block_rows=8, effort=effort)
        plan = solve(omega, problem)
        with about(f"{kind} demand"):
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
    assert meets_cap(plan, problem)


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


@settings(max_examples=40, deadline=None)
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
    empty = finish(none(omega.astype(np.int64), problem), omega.astype(np.int64), problem)
    assert ps(plan) < ps(empty) or (plan.slot_expert == NOWHERE).all()
