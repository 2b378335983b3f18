"""Every baseline on small, awkward problems: whole rows, to instances that exist, in slots it may use, repeatably.

These laws are read off the draft, so that planners which move mains or need more slots are judged too. What `finish`
makes of a draft is judged with all other planners by the laws of plans.
"""

import dataclasses

import numpy as np
import pytest

from tests.support.cases import named, tagged
from tests.support.generator import GOOD_KINDS, about, biased_demand, small_demand
from topoep_jax.plan.baselines import BASELINES
from topoep_jax.plan.baselines.common import quota_local_first, split_evenly, split_in_proportion
from topoep_jax.plan.problem import Draft, Problem
from topoep_jax.plan.topoep.apportion import overlap

ALL_BASELINES = pytest.mark.parametrize("name", BASELINES)
MOVES_MAINS = {"eplb"}
"""Its E/R + N instances per rank hold any experts."""
SLOTS_AS_MAINS = {"moonep"}
"""Exact balance needs E/R slots per rank, whatever N is."""


def check_draft(draft: Draft, omega: np.ndarray, problem: Problem, name: str) -> None:
    num_ranks, num_experts = problem.topology.num_ranks, problem.num_experts
    assert draft.holds.shape == (num_ranks, num_experts)
    assert draft.holds.dtype == bool
    assert draft.quota.shape == (num_experts, num_ranks, num_ranks)
    assert draft.quota.dtype == np.int64
    assert (draft.quota >= 0).all(), "a quota is negative"
    np.testing.assert_array_equal(draft.quota.sum(axis=1), omega.T, "rows got lost or were invented")
    assert not draft.quota.sum(axis=2).T[~draft.holds].any(), "rows go to a rank that does not hold their expert"
    is_main = problem.main_rank() == np.arange(num_ranks)[:, None]
    if name in MOVES_MAINS:
        assert (draft.holds.sum(axis=1) <= problem.mains_per_rank + problem.num_slots).all()
        return
    assert draft.holds[is_main].all(), "a main is missing"
    served = draft.holds & ~is_main & (draft.quota.sum(axis=2).T > 0)
    limit = problem.mains_per_rank if name in SLOTS_AS_MAINS else problem.num_slots
    assert (served.sum(axis=1) <= limit).all(), "more replicas than slots"


@ALL_BASELINES
@pytest.mark.parametrize("case", tagged("laws"), ids=lambda case: case.name)
def test_laws_on_small_cases(case, name):
    problem = case.problem()
    for at, kind in enumerate(GOOD_KINDS):
        omega = small_demand(case, kind, at % 2).astype(np.int64)
        before = omega.copy()
        with about(f"{kind} demand"):
            draft, again = BASELINES[name](omega, problem), BASELINES[name](omega, problem)
            np.testing.assert_array_equal(omega, before, "the planner wrote on its input")
            check_draft(draft, omega, problem, name)
            np.testing.assert_array_equal(draft.holds, again.holds)
            np.testing.assert_array_equal(draft.quota, again.quota)


@ALL_BASELINES
@pytest.mark.parametrize("num_slots", [0, 1, 2, 5])
def test_laws_on_a_published_model(name, num_slots):
    case = dataclasses.replace(named("qwen3_30b"), num_slots=num_slots, tokens=1024)
    for omega in biased_demand(case, (0, -4), seed=0).values():
        check_draft(BASELINES[name](omega, case.problem()), omega, case.problem(), name)


def test_split_evenly_gives_the_remainder_to_low_ranks():
    holds = np.array([[True, False], [False, False], [True, True], [True, True]])
    np.testing.assert_array_equal(split_evenly(np.array([8, 3]), holds), [[3, 0, 3, 2], [0, 0, 2, 1]])


def test_split_in_proportion_is_by_largest_remainder():
    np.testing.assert_array_equal(split_in_proportion(10, np.array([1, 1, 1])), [4, 3, 3])
    np.testing.assert_array_equal(split_in_proportion(5, np.array([0, 2, 1])), [0, 3, 2])
    np.testing.assert_array_equal(split_in_proportion(np.array([7, 0]), np.array([1, 6])), [[1, 6], [0, 0]])
    np.testing.assert_array_equal(split_in_proportion(0, np.array([0, 0])), [0, 0])
    largest = 2**31 - 1
    np.testing.assert_array_equal(split_in_proportion(largest, np.array([largest])), [largest])
    with pytest.raises(ValueError, match="cannot split 3 rows"):
        split_in_proportion(3, np.array([0, 0]))


def test_overlap_fills_low_rooms_from_low_suppliers():
    np.testing.assert_array_equal(overlap(np.array([2, 2, 9]), np.array([3, 2])), [[2, 0], [1, 1], [0, 1]])


def test_quota_local_first_keeps_rows_on_their_rank_then_in_their_domain():
    problem = named("two_by_two").problem()
    omega = np.zeros((4, 8), np.int64)
    omega[:, 0] = [5, 1, 4, 2]
    rows = np.zeros((8, 4), np.int64)
    rows[0] = [2, 3, 0, 7]
    quota = quota_local_first(rows, omega, problem)[0]  # [rank, source]
    np.testing.assert_array_equal(quota, [[2, 0, 0, 0], [2, 1, 0, 0], [0, 0, 0, 0], [1, 0, 4, 2]])
    rows[0, 0] = 1
    with pytest.raises(ValueError, match="expert 0 is demanded 12 times, but its instances execute 11 rows"):
        quota_local_first(rows, omega, problem)
