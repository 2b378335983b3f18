"""Every planner obeys every law that binds it, on every case; and each law notices a plan that breaks it."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cases import SKEWS, Case, named, tagged
from tests.support.generator import BAD_KINDS, GOOD_KINDS, about, biased_demand, small_demand
from topoep_jax import _native
from topoep_jax.plan import CostModel, Plan, Status, laws, paper, picoseconds, reference
from topoep_jax.plan.cost import OBJECTIVES, split_picoseconds
from topoep_jax.plan.laws import LawError, check_plan
from topoep_jax.plan.problem import Problem, none
from topoep_jax.plan.reference import PLANNERS, SCORED_ONLY
from topoep_jax.topology import Topology

RUNNABLE = [planner for planner in PLANNERS if planner not in SCORED_ONLY]
ALL_PLANNERS = pytest.mark.parametrize("planner", RUNNABLE)


def solve(omega, problem, planner):
    """In NumPy, but for "topoep", whose reference is slow; topoep_test asks that about the laws."""
    if planner == "topoep":
        return _native.plan(jnp.asarray(omega, jnp.int32), problem, planner)
    return reference.solve(omega, problem, planner)


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.full)])
@ALL_PLANNERS
@pytest.mark.parametrize("case", tagged("laws"), ids=lambda case: case.name)
def test_laws_on_small_cases(case, planner, stride):
    """Every kind of demand; of the three questions about each every `stride`-th."""
    mean_rows = case.tokens * case.top_k
    questions = ((0, "bottleneck", None), (1, "eq8", mean_rows), (2, "bottleneck", 2 * mean_rows))
    for at, (kind, question) in enumerate(itertools.product([*GOOD_KINDS, *BAD_KINDS], questions)):
        if (at + at // 3) % stride:
            continue
        seed, objective, cap_rows = question
        problem = case.problem(objective=objective, cap_rows=cap_rows, block_rows=8, effort="fast")
        omega = small_demand(case, kind, seed)
        with about(f"{kind} demand, question {seed}"):
            plan = solve(omega, problem, planner)
            again = solve(omega, problem, planner) if seed == 0 else None
            check_plan(plan, omega, problem, planner, again=again)


@ALL_PLANNERS
def test_laws_on_a_published_model(planner):
    case = dataclasses.replace(named("qwen3_30b"), tokens=512)
    problem = dataclasses.replace(
        case.problem(effort="fast"), cost=CostModel(9_437_184 // 8, 4096, 70_778, 20_000, 5_000)
    )
    for omega in biased_demand(case, SKEWS, seed=0).values():
        check_plan(solve(omega, problem, planner), omega, problem, planner)


@st.composite
def problems(draw):
    """A small problem and demand for it, good or bad."""
    num_ranks = draw(st.integers(1, 6))
    domains = draw(st.lists(st.integers(0, 3), min_size=num_ranks, max_size=num_ranks))
    renumber = {domain: i for i, domain in enumerate(dict.fromkeys(domains))}
    num_experts = num_ranks * draw(st.integers(1, 3))
    problem = Problem(
        topology=Topology(tuple(renumber[domain] for domain in domains)),
        cost=CostModel(
            expert_bytes=draw(st.integers(1, 200)),
            token_bytes=draw(st.integers(1, 8)),
            row_ps=draw(st.integers(0, 50)),
            inter_fs_per_byte=draw(st.sampled_from([0, 999, 20_000])),
            intra_fs_per_byte=draw(st.sampled_from([0, 333, 5_000])),
        ),
        num_experts=num_experts,
        num_slots=draw(st.integers(0, min(3, num_experts - num_experts // num_ranks))),
        cap_rows=draw(st.none() | st.integers(0, 100)),
        block_rows=draw(st.sampled_from([1, 4, 128])),
        objective=draw(st.sampled_from(sorted(OBJECTIVES))),
        effort="fast",  # default effort takes seconds in NumPy; backends_test has it
    )
    rows = st.integers(0, 30) | st.sampled_from([0, 0, 2**29, 2**31 - 1, -1])
    size = num_ranks * num_experts
    omega = np.array(draw(st.lists(rows, min_size=size, max_size=size)), np.int64).reshape(num_ranks, num_experts)
    return problem, omega


@settings(max_examples=200)
@given(problems())
def test_laws_on_anything(problem_and_omega):
    problem, omega = problem_and_omega
    for planner in RUNNABLE:
        check_plan(reference.solve(omega, problem, planner), omega, problem, planner)


@settings(max_examples=100)
@given(problems())
def test_refinement_never_raises_the_busiest_rank_of_a_domain(problem_and_omega):
    """Stage 2 only ever moves rows down a gap: each domain's largest load is at most what even splitting left."""
    problem, omega = problem_and_omega
    if laws.bad_input(reference.solve(omega, problem, "none"), omega, problem):
        return
    used = np.zeros(problem.topology.num_ranks, np.int64)
    holds = none(omega, problem).holds
    for domain in range(problem.topology.num_domains):
        paper.place_remote_experts(domain, omega, problem, holds, used)
    before = paper.split_evenly(omega, problem, holds).sum(axis=(0, 2))
    after = reference.solve(omega, problem, "topoep_paper").rank_load
    for domain in range(problem.topology.num_domains):
        ranks = list(problem.topology.ranks_of_domain(domain))
        assert after[ranks].max() <= before[ranks].max()
        assert after[ranks].sum() == before[ranks].sum()


CASE = Case("mutations", Topology((0, 0, 1, 1)), 8, 2, 2, 2, num_slots=2)
PROBLEM = CASE.problem(cap_rows=64, block_rows=4)
OMEGA = np.array(
    [
        [3, 3, 0, 0, 8, 0, 0, 0],
        [0, 0, 3, 3, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 10, 0, 0],
        [0, 0, 0, 0, 0, 0, 10, 0],
    ]
)
"""Replicas of expert 4 go to ranks 0 and 1; no other slot is filled."""


def edit(field, index, change):
    """The plan with `field[index]` increased by `change`."""

    def mutate(plan):
        array = getattr(plan, field).copy()
        array[index] += change
        return plan._replace(**{field: array})

    return mutate


def with_slots(*rows):
    """The plan with other slots."""
    return lambda plan: plan._replace(slot_expert=np.array(rows, np.int32))


def with_time(change):
    return lambda plan: plan._replace(predicted_ps=split_picoseconds(int(picoseconds(plan.predicted_ps)) + change))


def with_status(flip):
    return lambda plan: plan._replace(status=np.array(plan.status ^ flip, np.int32))


def both(first, second):
    return lambda plan: second(first(plan))


MUTATIONS = {
    "a row is lost": ("conservation", edit("quota", (0, 0, 2), -1), "rank 0 demands 8 rows of expert 4.* sum to 7"),
    "a row runs twice": ("conservation", edit("quota", (1, 0, 0), 1), "rank 1 demands 0 rows of expert 0.* sum to 1"),
    "rows swap sources": (
        "conservation",
        both(edit("quota", (0, 0, 0), -1), edit("quota", (1, 0, 0), 1)),
        "rank 0 demands 3 rows of expert 0",
    ),
    "rows in an empty slot": ("reachability", edit("quota", (3, 2, 2), 1), r"quota\[3, 2, 2\]=1.* empty slot"),
    "a negative quota": ("reachability", edit("quota", (3, 2, 0), -1), r"quota\[3, 2, 0\]=-1.* negative"),
    "a replica beside its main": ("slots", with_slots([4, -1], [4, -1], [4, -1], [-1, -1]), "rank 2 holds .* expert 4"),
    "an expert twice on a rank": ("slots", with_slots([4, 4], [4, -1], [-1, -1], [-1, -1]), "rank 0 holds .* twice"),
    "slots out of order": ("slots", with_slots([6, 4], [4, -1], [-1, -1], [-1, -1]), "rank 0 .* ascending"),
    "an empty slot first": ("slots", with_slots([-1, 4], [4, -1], [-1, -1], [-1, -1]), "rank 0 .* last"),
    "an unknown expert": ("slots", with_slots([4, 8], [4, -1], [-1, -1], [-1, -1]), r"rank 0 holds \[4, 8\]"),
    "a strange empty slot": ("slots", with_slots([4, -2], [4, -1], [-1, -1], [-1, -1]), r"rank 0 holds \[4, -2\]"),
    "a pull that does not pay": ("benefit", with_slots([4, -1], [4, 6], [-1, -1], [-1, -1]), "rank 1 holds expert 6"),
    "an idle replica": ("no_idle_replica", with_slots([4, -1], [2, 4], [-1, -1], [-1, -1]), None),
    "a cap that is not met": ("capacity", edit("quota", (2, 2, 1), 100), "rank 2 has 112 aligned rows .* 64"),
    "a cap that is denied": ("capacity", with_status(Status.CAP_MET), "CAP_MET is False"),
    "a load that is made up": ("bookkeeping", edit("rank_load", 1, 1), r"rank_load\[1\]=11, .* 10"),
    "a time that is made up": ("bookkeeping", with_time(1), "recount"),
    "a plan that says it is empty": ("bookkeeping", with_status(Status.EMPTY), "EMPTY"),
    "a cost above none that is not said": ("bookkeeping", with_status(Status.OVER_EMPTY_COST), "OVER_EMPTY_COST"),
}


@pytest.mark.parametrize(("law", "mutate", "message"), MUTATIONS.values(), ids=MUTATIONS)
def test_each_law_rejects_its_mutation(law, mutate, message):
    plan = reference.solve(OMEGA, PROBLEM, "topoep_paper")
    check_plan(plan, OMEGA, PROBLEM, "topoep_paper")
    mutated = mutate(plan)
    with pytest.raises(LawError, match=message):
        getattr(laws, law)(mutated, OMEGA, PROBLEM)
    with pytest.raises(LawError):
        check_plan(mutated, OMEGA, PROBLEM, "topoep_paper")


def test_benefit_counts_the_pull_as_dear_as_the_tokens():
    """At equality a pull saves nothing: 24 bytes against 2 x 4 x 3."""
    omega = np.array([[0, 3], [0, 0]])
    problem = Problem(Topology((0, 1)), CASE.cost, 2, 1, None, 1, "bottleneck")
    plan = reference.solve(omega, problem, "none")
    quota = np.zeros_like(plan.quota)
    quota[0, 0, 1] = 3
    pulled = plan._replace(slot_expert=np.array([[1], [-1]], np.int32), quota=quota)
    with pytest.raises(LawError, match="24 bytes, but the 3 rows of domain 0 save only 24"):
        laws.benefit(pulled, omega, problem)
    laws.benefit(pulled, omega + np.array([[0, 1], [0, 0]]), problem)


def test_never_worse_rejects_a_loss_unless_the_empty_plan_misses_the_cap():
    """Balance that only costs: two ranks, free compute, one pull."""
    omega = np.array([[7, 0], [4, 0]])
    problem = Problem(Topology((0, 0)), CASE.cost, 2, 1, None, 1, "bottleneck")
    plan = reference.solve(omega, problem, "topoep_paper")
    with pytest.raises(LawError, match="320 ps, the empty plan 160 ps"):
        laws.never_worse(plan, omega, problem)
    capped = dataclasses.replace(problem, cap_rows=6)
    laws.never_worse(reference.solve(omega, capped, "topoep_paper"), omega, capped)
    laws.never_worse(reference.solve(omega, problem, "none"), omega, problem)


@pytest.mark.parametrize("field", Plan._fields)
def test_determinism_rejects_any_other_bit(field):
    plan = reference.solve(OMEGA, PROBLEM, "topoep_paper")
    laws.determinism(plan, plan)
    other = plan._replace(**{field: getattr(plan, field) ^ 1})
    with pytest.raises(LawError, match=field):
        laws.determinism(plan, other)
    with pytest.raises(LawError, match=field):
        laws.determinism(plan, plan._replace(**{field: getattr(plan, field).astype(np.int64)}))
    with pytest.raises(LawError, match=field):
        check_plan(plan, OMEGA, PROBLEM, "topoep_paper", again=other)


@pytest.mark.parametrize("kind", BAD_KINDS)
def test_bad_demand_must_be_refused_and_good_demand_must_not(kind):
    bad = small_demand(CASE, kind).astype(np.int64)
    refused = reference.solve(bad, PROBLEM, "topoep_paper")
    assert refused.status == Status.BAD_INPUT | Status.EMPTY
    with pytest.raises(LawError, match="bad input"):
        check_plan(refused, OMEGA, PROBLEM, "topoep_paper")
    with pytest.raises(LawError, match="bad input"):
        check_plan(reference.solve(OMEGA, PROBLEM, "none"), bad, PROBLEM, "none")
    with pytest.raises(LawError, match="rank_load"):
        check_plan(refused._replace(rank_load=refused.rank_load + 1), bad, PROBLEM, "none")


def test_every_planner_and_law_is_in_the_table_of_exemptions():
    assert set(laws.EXEMPT) == set(PLANNERS)
    for exemptions in laws.EXEMPT.values():
        assert all(callable(getattr(laws, law)) and reason for law, reason in exemptions.items())


def test_a_plan_of_the_wrong_shape_is_not_well_formed():
    plan = reference.solve(OMEGA, PROBLEM, "none")
    with pytest.raises(LawError, match=r"quota is int32\[4, 4, 3\], expected int32\[4, 4, 4\]"):
        check_plan(plan._replace(quota=plan.quota[..., :-1]), OMEGA, PROBLEM, "none")
