"""What sets moonep, lplb, echo, taot, placemoe and metro apart, beyond the laws that all baselines keep."""

import math
import sys

import numpy as np
import pytest

from tests.support.cases import named, tagged
from tests.support.generator import GOOD_KINDS, about, biased_demand, small_demand
from topoep_jax.plan.baselines import BASELINES
from topoep_jax.plan.baselines.common import quota_in_proportion, spilled_rows
from topoep_jax.plan.baselines.echo import clone
from topoep_jax.plan.baselines.lplb import least_max_load, mirror_graph
from topoep_jax.plan.baselines.metro import activate
from topoep_jax.plan.baselines.placemoe import allocate
from topoep_jax.topology import Topology


def on_small_cases(check):
    """A test of each case, that `check(case, omega)` holds for every kind of demand."""

    @pytest.mark.parametrize("case", tagged("laws"), ids=lambda case: case.name)
    def test(case):
        for kind in GOOD_KINDS:
            with about(f"{kind} demand"):
                check(case, small_demand(case, kind).astype(np.int64))

    test.__doc__ = check.__doc__
    return test


def rows(name, case, omega):
    """int64 [E, R]: what every instance executes."""
    return BASELINES[name](omega, case.problem()).quota.sum(axis=2)


@on_small_cases
def test_moonep_is_exact_and_each_rank_receives_from_one_home(case, omega):
    executed = rows("moonep", case, omega)
    load, main = executed.sum(axis=0), case.problem().main_rank()
    assert load.max() - load.min() <= 1
    for rank in range(load.size):
        received = (executed[:, rank] > 0) & (main != rank)
        assert np.unique(main[received]).size <= 1
        assert received.sum() <= case.num_experts // load.size


@on_small_cases
def test_clones_fill_cold_ranks_to_the_mean_at_most(case, omega):
    for name in ("echo", "taot"):
        executed, main = rows(name, case, omega), case.problem().main_rank()
        before = np.bincount(main, weights=omega.sum(axis=0)).astype(np.int64)
        after, mean = executed.sum(axis=0), omega.sum() / before.size
        assert (after[before <= mean] <= np.ceil(mean)).all()
        assert (after[before > mean] <= before[before > mean]).all()


def test_echo_by_hand():
    load = np.array([10, 2, 1, 1, 0, 4])  # ranks with 12, 2 and 4 rows, mean 6
    assert spilled_rows(load, 3, 6).tolist() == [6, 0, 0, 0, 0, 0]
    assert clone(np.array([6, 0, 3, 0, 0, 0]), np.array([0, 4, 5]), 1)[[0, 2]].tolist() == [[0, 0, 5], [0, 3, 0]]
    assert clone(np.array([6, 0, 3, 0, 0, 0]), np.array([0, 4, 5]), 2)[[0, 2]].tolist() == [[0, 1, 5], [0, 3, 0]]


def test_taot_prefers_a_clone_in_the_home_domain():
    case = named("two_by_two")
    omega = np.zeros((4, 8), np.int64)
    omega[:, 0] = 8  # rank 0 has 32 rows of one expert, the mean is 8: every other rank may take 8
    omega[:, 4] = 1  # rank 2 has 4 of its own
    executed = rows("taot", case, omega)
    assert executed[0, 1] == 9, "the nearest cold rank takes all it can"
    assert executed[0].tolist() == [9, 9, 5, 9]


@on_small_cases
def test_lplb_reaches_the_value_of_its_program(case, omega):
    pytest.importorskip("scipy")
    executed, problem = rows("lplb", case, omega), case.problem()
    main, load = problem.main_rank(), omega.sum(axis=0)
    graph = mirror_graph(case.topology, min(problem.num_slots, problem.mains_per_rank))
    mirror, slot = np.nonzero(graph >= 0)
    hottest = -np.sort(-load.reshape(graph.shape[0], -1), axis=1)
    home = graph[mirror, slot]
    value = load.reshape(graph.shape[0], -1).sum(axis=1).max()
    if home.size:
        value = least_max_load(np.bincount(main, weights=load), home, mirror, hottest[home, slot])
    assert executed.sum(axis=0).max() == math.ceil(value - 1e-3)
    executed[np.arange(load.size), main] = 0
    assert ((executed > 0).sum(axis=1) <= 1).all(), "two instances per expert at most"


def test_lplb_says_what_to_install(monkeypatch):
    case = named("two_by_two")
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ImportError, match="in a clone run `make setup`, elsewhere `pip install scipy`"):
        BASELINES["lplb"](small_demand(case, "skewed").astype(np.int64), case.problem())


def test_lplb_uneven_domains_form_a_ring():
    assert mirror_graph(Topology((0, 1, 0, 1, 2, 1)), 2).tolist() == [[2, 1], [3, 5], [1, 3], [5, 4], [0, 2], [4, 0]]
    assert mirror_graph(Topology((0,)), 2).tolist() == [[-1, -1]]


@on_small_cases
def test_placemoe_sends_each_source_to_one_copy(case, omega):
    quota = BASELINES["placemoe"](omega, case.problem()).quota
    assert ((quota > 0).sum(axis=1) <= 1).all()


def test_placemoe_uses_all_slots_for_the_most_demanded():
    assert allocate(np.array([5, 9, 9, 1]), 2, 4).tolist() == [0, 1, 1, 0]
    assert allocate(np.array([5, 9, 9, 1]), 7, 4).tolist() == [2, 2, 2, 1]
    assert allocate(np.array([5, 9]), 12, 2).tolist() == [1, 1]


@on_small_cases
def test_metro_activates_one_instance_per_expert(case, omega):
    executed = rows("metro", case, omega)
    assert ((executed > 0).sum(axis=1) == (omega.sum(axis=0) > 0)).all()


def test_metro_balances_active_experts():
    holds = np.array([[1, 1, 1, 1], [0, 1, 1, 0], [0, 0, 0, 1]], bool)
    assert activate(np.array([9, 1, 1, 1]), holds).tolist() == [0, 1, 0, 2]
    assert activate(np.array([0, 1, 1, 1]), holds).tolist() == [0, 0, 1, 2], "an expert without rows is not active"


def test_quota_in_proportion_by_hand():
    case = named("two_ranks")  # mains: experts 0 and 1 on rank 0
    omega = np.array([[6, 0, 0, 0], [3, 0, 0, 5]])
    moved = np.zeros((4, 2), np.int64)
    moved[0, 1] = 5
    quota = quota_in_proportion(moved, omega, case.problem())
    assert quota[0].tolist() == [[2, 2], [4, 1]]  # 10/3 and 5/3, rounded down; the fifth row is the low source's
    assert quota[3].tolist() == [[0, 0], [0, 5]]


@pytest.mark.parametrize("name", ["moonep", "lplb", "echo", "taot", "placemoe"])  # metro does not look at rows
def test_makes_skewed_load_more_even(name):
    case = named("qwen3_30b")
    omega = biased_demand(case, [-2], 0)[-2]
    before = np.bincount(case.problem().main_rank(), weights=omega.sum(axis=0)).max()
    after = rows(name, case, omega).sum(axis=0).max()
    print(f"{name}: largest load {after / before:.3f} of that without replicas")
    assert after <= 0.5 * before
