"""The programs against brute force, against each other, and against plans that planners make."""

import itertools
import json

import numpy as np
import pytest

from tests.support.cases import Case, named
from tests.support.generator import biased_demand
from tests.support.make_milp_suite import FAMILIES, SUITE
from topoep_jax.plan import CostModel, picoseconds, reference
from topoep_jax.plan.bounds import lp_quota_bound, milp_optimum
from topoep_jax.plan.cost import OBJECTIVES, predict_ps
from topoep_jax.plan.finish import finish
from topoep_jax.plan.laws import check_plan
from topoep_jax.plan.problem import Draft, Problem
from topoep_jax.plan.types import unpriced
from topoep_jax.topology import Topology

pytest.importorskip("scipy")

COST = CostModel(expert_bytes=40, token_bytes=5, row_ps=30_000, inter_fs_per_byte=2_000_000, intra_fs_per_byte=500_000)
EXACT = {"mip_rel_gap": 0.0}


def question(domains, num_experts, num_slots=1, cost=COST, objective="bottleneck"):
    return Problem(Topology(domains), cost, num_experts, num_slots, None, 1, objective)


def placements(problem, omega):
    """Every legal `slot_expert` with at most one replica per rank."""
    domain, mains = np.array(problem.topology.domain_of_rank), problem.mains_per_rank
    choices = []
    for rank in range(domain.size):
        demand = omega[domain == domain[rank]].sum(axis=0)
        pays = 2 * demand * problem.cost.token_bytes > problem.cost.expert_bytes
        near = domain[np.arange(problem.num_experts) // mains] == domain[rank]
        choices.append([-1, *(e for e in range(problem.num_experts) if e // mains != rank and (pays | near)[e])])
    return [np.array(choice)[:, None] for choice in itertools.product(*choices)]


def quotas(slot_expert, omega):
    """Every quota [R, R, J] in whole rows, for a case that is tiny indeed."""
    num_ranks, num_experts = omega.shape
    mains = num_experts // num_ranks
    held = np.concatenate([np.arange(num_experts).reshape(num_ranks, mains), slot_expert], axis=1)
    splits = []
    for source, expert in itertools.product(range(num_ranks), range(num_experts)):
        at = np.argwhere(held == expert)
        parts = itertools.product(range(omega[source, expert] + 1), repeat=len(at) - 1)
        rows = [(*p, omega[source, expert] - sum(p)) for p in parts if sum(p) <= omega[source, expert]]
        splits.append([(source, at, row) for row in rows])
    for choice in itertools.product(*splits):
        quota = np.zeros((num_ranks, *held.shape), np.int64)
        for source, at, row in choice:
            quota[source, at[:, 0], at[:, 1]] = row
        yield quota


def least_ps(slot_expert, omega, problem):
    return min(predict_ps(unpriced(slot_expert, q), problem) for q in quotas(slot_expert, omega))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("domains", [(0, 0), (0, 1)])
@pytest.mark.parametrize(
    "omega", [[[6, 2], [8, 0]], [[0, 8], [2, 8]], [[4, 4], [4, 4]], [[12, 0], [6, 2]], [[0, 0], [0, 6]]]
)
def test_tiny_cases_against_brute_force(domains, omega, objective):
    """Whole rows bound the program from above, and its own plan is among them."""
    omega, problem = np.array(omega), question(domains, 2, objective=objective)
    best = {tuple(placed.ravel()): least_ps(placed, omega, problem) for placed in placements(problem, omega)}
    optimum = min(best.values())
    found = milp_optimum(omega, problem, **EXACT)
    assert found["status"] == "optimal"
    assert found["bound_ps"] <= optimum <= found["objective_ps"]
    # A fractional row is worth at most what one more row costs.
    row_ps = problem.cost.row_ps + 2 * problem.cost.token_bytes * problem.cost.inter_fs_per_byte // 1000
    assert found["objective_ps"] - found["bound_ps"] <= 2 * row_ps
    for placed, least in best.items():
        assert lp_quota_bound(np.array(placed)[:, None], omega, problem)["bound_ps"] <= least


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("domains", [(0, 0, 1), (0, 1, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_the_optimum_is_the_best_of_all_placements(domains, seed, objective):
    omega = np.random.default_rng(seed).integers(0, 30, (3, 3)) * 10
    problem = question(domains, 3, objective=objective)
    best = min(lp_quota_bound(placed, omega, problem)["bound_ps"] for placed in placements(problem, omega))
    assert milp_optimum(omega, problem, **EXACT)["bound_ps"] == pytest.approx(best, rel=1e-6)


def test_a_hot_expert_is_shared_when_nothing_else_costs():
    free = CostModel(expert_bytes=1, token_bytes=1, row_ps=7, inter_fs_per_byte=0, intra_fs_per_byte=0)
    omega = np.array([[10, 0], [10, 0]])
    found = milp_optimum(omega, question((0, 0), 2, cost=free))
    assert found["objective_ps"] == found["bound_ps"] == 70
    assert found["plan"].slot_expert.tolist() == [[-1], [0]]
    assert found["plan"].quota.sum(axis=(0, 2)).tolist() == [10, 10]


def test_slow_ranks_get_less():
    slow = CostModel(1, 1, 7, 0, 0, rank_speed=(1000, 250))
    omega = np.array([[10, 0], [10, 0]])
    found = milp_optimum(omega, question((0, 0), 2, cost=slow))
    assert found["plan"].quota.sum(axis=(0, 2)).tolist() == [16, 4]
    assert found["objective_ps"] == 16 * 7


def test_replicas_that_break_c4_are_not_considered():
    """40 bytes pulled for 2 x 5 bytes a row: four rows do not pay, five do."""
    problem = question((0, 1), 2)
    for rows, replicas in ((4, 0), (5, 1)):
        found = milp_optimum(np.array([[0, rows], [0, 0]]), problem)
        assert (found["plan"].slot_expert >= 0).sum() == replicas


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_plans_of_the_programs_are_legal(objective):
    """Laws judge the optimum as they judge a planner's plan."""
    case, _ = FAMILIES["r4"]
    omega = biased_demand(case, [-2], 0)[-2]
    problem = case.problem(objective=objective)
    found = milp_optimum(omega, problem, mip_rel_gap=0.01)
    draft = drafted(found, problem)
    plan = finish(draft, omega, problem)
    check_plan(plan, omega, problem, "none")
    assert int(picoseconds(plan.predicted_ps)) == found["objective_ps"]


def drafted(found, problem):
    num_ranks, mains = problem.topology.num_ranks, problem.mains_per_rank
    draft = Draft(
        np.zeros((num_ranks, problem.num_experts), bool),
        np.zeros((problem.num_experts, num_ranks, num_ranks), np.int64),
    )
    for rank in range(num_ranks):
        for instance, expert in enumerate([*range(rank * mains, (rank + 1) * mains), *found["plan"].slot_expert[rank]]):
            if expert >= 0:
                draft.holds[rank, expert] = True
                draft.quota[expert, rank] = found["plan"].quota[:, rank, instance]
    return draft


def test_time_runs_out():
    case, _ = FAMILIES["r6"]
    found = milp_optimum(biased_demand(case, [-1], 0)[-1], case.problem(), time_limit=0.02, mip_rel_gap=0)
    assert found["status"] == "time limit"
    assert found["objective_ps"] is None or found["bound_ps"] < found["objective_ps"]


def test_the_stored_suite_is_sound():
    """Sizes and gaps as promised; the plans of two planners and a few optima are computed again."""
    suite = json.loads(SUITE.read_text())
    assert [entry["family"] for entry in suite].count("r4") == 60
    assert len(suite) == 100
    for index, entry in enumerate(suite):
        case, omega = FAMILIES[entry["family"]][0], np.array(entry["omega"])
        for objective in OBJECTIVES:
            stored, problem = entry[objective], case.problem(objective=objective)
            for planner in ("none", "topoep_paper"):
                ps = int(picoseconds(reference.solve(omega, problem, planner).predicted_ps))
                assert ps == stored[f"{planner}_ps"] >= stored["bound_ps"]
            assert stored["bound_ps"] <= stored["optimum_ps"] <= 1.001 * stored["bound_ps"]
            if entry["family"] == "r4" and index % 12 == 0:
                found = milp_optimum(omega, problem)
                assert stored["bound_ps"] <= found["objective_ps"] <= 1.001 * stored["optimum_ps"]


@pytest.mark.parametrize("skew", [-1, -4])
def test_best_quotas_of_a_full_size_placement(skew):
    """The best quotas of a plan's placement are no slower than the plan, and all but attained in whole rows."""
    case = named("qwen3_30b")
    quick = Case("quick", case.topology, 128, 8, case.hidden, case.ffn, tokens=512)
    omega, problem = biased_demand(quick, [skew], 0)[skew], case.problem()
    plan = reference.solve(omega, problem, "topoep_paper")
    found = lp_quota_bound(plan.slot_expert, omega, problem)
    assert found["status"] == "optimal"
    assert found["bound_ps"] <= found["objective_ps"] <= int(picoseconds(plan.predicted_ps))
    assert found["objective_ps"] <= 1.01 * found["bound_ps"]


def test_no_demand():
    omega, problem = np.zeros((2, 2), int), question((0, 1), 2)
    assert milp_optimum(omega, problem)["objective_ps"] == 0


def test_bad_questions():
    omega = np.array([[9, 0], [3, 0]])
    for option in ({"instance_ps": 1}, {"tile_rows": 8}, {"pulls": "striped"}):
        with pytest.raises(ValueError, match=f"{next(iter(option))}=.*bounds are known for"):
            milp_optimum(omega, question((0, 1), 2, cost=CostModel(1, 1, 1, 1, 1, **option)))
