"""One ruler for every draft: equal to the tests' own scoring where both apply, and right where only it applies."""

import dataclasses

import numpy as np
import pytest

from tests.support.cases import SKEWS, named, tagged
from tests.support.generator import GOOD_KINDS, biased_demand, score, small_demand
from topoep_jax.plan import Status, reference
from topoep_jax.plan.cost import OBJECTIVES, terms_ps
from topoep_jax.plan.evaluate import evaluate, nic_bytes
from topoep_jax.plan.finish import draft_of
from topoep_jax.plan.problem import none
from topoep_jax.plan.reference import PLANNERS


def assert_scored(case, plan, evaluation):
    scored = score(case, plan)
    assert evaluation.objective_ps == scored.bottleneck_ps
    assert evaluation.eq8_ps == scored.eq8_ps
    if plan.rank_load.any():
        assert evaluation.imbalance == scored.imbalance
    assert (evaluation.inter_domain, evaluation.replica) == (scored.inter_domain, scored.replica)
    assert evaluation.num_replicas == (plan.slot_expert >= 0).sum()
    assert evaluation.status == plan.status


@pytest.mark.parametrize("kind", GOOD_KINDS)
@pytest.mark.parametrize("case", tagged("laws"), ids=lambda case: case.name)
def test_the_tests_own_scoring(case, kind):
    problem, omega = case.problem(cap_rows=case.tokens * case.top_k, block_rows=8), small_demand(case, kind)
    plan = reference.solve(omega, problem, "topoep_paper")
    assert_scored(case, plan, evaluate(PLANNERS["topoep_paper"](omega.astype(np.int64), problem), omega, problem))
    assert_scored(case, plan, evaluate(draft_of(plan, problem), omega, problem))


def test_a_published_model():
    case = dataclasses.replace(named("qwen3_30b"), tokens=512)
    for omega in biased_demand(case, SKEWS, seed=0).values():
        plan = reference.solve(omega, case.problem(), "topoep_paper")
        assert_scored(case, plan, evaluate(draft_of(plan, case.problem()), omega, case.problem()))


@pytest.mark.parametrize("pulls", ["direct", "relayed", "striped", "best"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_terms_sum_to_the_objective(objective, pulls):
    case = named("two_by_two")
    problem = case.problem(objective=objective)
    problem = dataclasses.replace(problem, cost=dataclasses.replace(problem.cost, pulls=pulls, instance_ps=500))
    omega = small_demand(case, "skewed")
    plan = evaluate(PLANNERS["topoep_paper"](omega.astype(np.int64), problem), omega, problem)
    assert plan.num_replicas > 0
    terms = terms_ps(plan.plan, problem)
    assert sum(terms.values()) == {"bottleneck": plan.objective_ps, "eq8": plan.eq8_ps}[objective]


def test_bytes_on_a_nic():
    case = named("two_by_two")  # 4-byte rows, 24-byte experts
    problem = case.problem()
    omega = np.zeros((4, 8), np.int64)
    omega[0, 7] = 5  # main on rank 3: five rows cross, and five results come back
    empty = evaluate(none(omega, problem), omega, problem)
    assert nic_bytes(empty.plan, problem).tolist() == [[20, 0, 0, 20], [20, 0, 0, 20]]
    copied = none(omega, problem)
    copied.holds[0, 7] = True
    copied.quota[7, 0], copied.quota[7, 3] = copied.quota[7, 3].copy(), 0
    there = evaluate(copied, omega, problem)
    assert nic_bytes(there.plan, problem).tolist() == [[0, 0, 0, 24], [24, 0, 0, 0]]
    assert (empty.worst_nic_bytes, there.worst_nic_bytes) == (20, 24)
    assert (there.inter_domain, there.replica, there.num_replicas) == (0, 1, 1)


def test_a_moved_main_is_a_replica_that_was_pulled():
    case = named("no_slots")
    problem = case.problem()
    omega = np.full((4, 8), 3)
    draft = none(omega, problem)
    draft.holds[3, 0] = True
    draft.holds[0, 0] = False
    draft.quota[0, 3], draft.quota[0, 0] = draft.quota[0, 0].copy(), 0
    plan = evaluate(draft, omega, problem)
    assert plan.plan.slot_expert.tolist() == [[-1], [-1], [-1], [0]]
    assert plan.rank_load.tolist() == [12, 24, 24, 36]
    assert (plan.num_replicas, plan.replica, plan.imbalance) == (1, 1 / 8, 1.5)
    assert terms_ps(plan.plan, problem)["pulls between domains"] > 0


def test_replicas_without_rows_are_not_there():
    case = named("two_by_two")
    problem, omega = case.problem(), small_demand(case, "uniform")
    draft = none(omega.astype(np.int64), problem)
    draft.holds[:] = True
    plan = evaluate(draft, omega, problem)
    assert plan.num_replicas == 0
    assert Status.EMPTY in plan.status


def test_no_demand():
    case = named("two_by_two")
    omega = np.zeros((4, 8), np.int64)
    plan = evaluate(none(omega, case.problem()), omega, case.problem())
    assert (plan.imbalance, plan.inter_domain, plan.objective_ps, plan.worst_nic_bytes) == (1, 0, 0, 0)
