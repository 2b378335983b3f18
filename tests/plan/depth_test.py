"""Dependent steps as the C++ bodies count them; `topoep` has a bound for any demand (issue 3, acceptance 7)."""

import dataclasses

import _topoep_tests
import numpy as np
import pytest

from tests.support.cases import Case, named
from tests.support.generator import small_demand
from topoep_jax import _native
from topoep_jax.plan.problem import Problem
from topoep_jax.plan.topoep import EFFORTS, dependent_steps, dependent_steps_of_paper

MOST_STEPS = 80
THREADS = 256
SKEWS = (0.5, 1, 2, 4)


def depth(omega: np.ndarray, problem: Problem) -> tuple[int, int, int, int]:
    """Steps on the path of a device, and the most items that a thread gets between two; both for the paper's plan."""
    return _topoep_tests.topoep_depth(_native.attributes(problem, "topoep"), omega.ravel(), THREADS)


def demand(case: Case, skew: float) -> np.ndarray:
    """Every source prefers the same experts; independent rows, since top-k takes minutes to draw at R = 128."""
    rng = np.random.default_rng(0)
    p = np.exp(rng.normal(0, skew, case.num_experts))
    return rng.multinomial(case.tokens * case.top_k, p / p.sum(), size=case.topology.num_ranks)


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("name", ["qwen3_30b", "r128"])
def test_steps_and_lane_work(name, capped, capsys):
    case = named(name)
    ranks, experts = case.topology.num_ranks, case.num_experts
    problem = case.problem(effort="fast", cap_rows=case.tokens * case.top_k * 21 // 20 if capped else None)
    bound = dependent_steps(problem)
    counted = {skew: depth(demand(case, skew), problem) for skew in SKEWS}
    unit = -(-max(experts, ranks * (experts // ranks + case.num_slots)) // THREADS)
    # The quotas of a plan, R x R x J, are its largest array: a thread writes its part of them once for each candidate.
    most_items = -(-ranks * ranks * (experts // ranks + case.num_slots) // THREADS) + unit
    with capsys.disabled():
        print(f"\nR={ranks} E={experts}{' capped' if capped else ''}: at most {bound} dependent steps, and at most")
        print(f"{most_items} items of a thread between two, where ceil(max(E, R J) / {THREADS}) = {unit};")
        print(f"(steps, items, those of the paper's plan beside it) by skew: {counted}")
    assert bound <= MOST_STEPS
    for steps, items, _, _ in counted.values():
        assert steps <= bound
        assert items <= most_items
    if not capped:
        assert max(steps for steps, *_ in counted.values()) == bound


@pytest.mark.parametrize("name", ["uneven", "interleaved", "one_domain", "every_rank_a_domain", "no_slots", "one_rank"])
def test_the_bound_holds_on_small_problems(name):
    case = named(name)
    for kind in ("zeros", "skewed", "own_skew", "hot_entry", "sparse"):
        omega = small_demand(case, kind)
        for cap_rows in (None, int(omega.sum()) // len(omega)):
            problem = case.problem(effort="fast", cap_rows=cap_rows)
            assert depth(omega, problem)[0] <= dependent_steps(problem)


@pytest.mark.parametrize("name", ["qwen3_30b", "uneven", "interleaved", "one_domain", "no_slots", "one_rank"])
def test_the_papers_moves_are_counted(name):
    case = named(name)
    problem = case.problem(effort="fast")
    assert EFFORTS["fast"].paper
    found = set()
    for kind in ("zeros", "skewed", "own_skew", "hot_entry", "sparse"):
        omega = small_demand(case, kind)
        alone = depth(omega, problem)[2]
        # As planner of its own it also prepares, concludes, and waits between its three kernels.
        assert dependent_steps_of_paper(omega, problem) == alone + 4
        found.add(alone)
    assert len(found) > 1 or name in ("no_slots", "one_rank")


def test_no_bound_where_loops_depend_on_the_demand():
    problem = named("two_by_two").problem(effort="fast")
    assert dependent_steps(dataclasses.replace(problem, effort="default")) is None
    changed = dataclasses.replace(problem, cost=dataclasses.replace(problem.cost, pulls="striped"))
    assert dependent_steps(changed) is None
    assert dependent_steps_of_paper(small_demand(named("two_by_two"), "skewed"), changed) is None
