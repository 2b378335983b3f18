"""`solve_plan` beyond its first planners: bad arguments, priced instances, and baselines through a host callback."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from absl import logging

from tests.plan.transforms_test import COST, TOPOLOGY, E, assert_plan, demand
from topoep_jax import LayerConfig
from topoep_jax.plan import CostModel, Status, api, reference, solve_plan
from topoep_jax.plan.baselines import BASELINES
from topoep_jax.plan.problem import Problem
from topoep_jax.plan.reference import SCORED_ONLY
from topoep_jax.topology import Topology

GOOD = {"omega": demand(), "topology": TOPOLOGY, "cost": COST, "num_slots": 2, "planner": "none"}
BAD = {
    "speeds": ({"cost": CostModel(1, 1, 1, 1, 1, rank_speed=(1000, 900))}, "rank_speed has 2 ent"),
    "effort": ({"effort": "extreme"}, r"effort='extreme' is unknown: choose one of \['default', 'fast', 'full'\]"),
    "moved mains": ({"planner": "eplb"}, "planner='eplb' makes drafts that no layer can run .it moves .*topoep plan"),
    "more slots": ({"planner": "moonep"}, "planner='moonep' makes drafts that no layer can run .it takes up to E/R"),
    "no such C++": ({"planner": "llep", "implementation": "cpu"}, "planner='llep' is a baseline in NumPy alone"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_bad_arguments_are_named(change, message):
    solve_plan(**GOOD)
    with pytest.raises(ValueError, match=message):
        solve_plan(**(GOOD | change))


@pytest.mark.parametrize("term", ["instance_ps", "tile_rows"])
def test_priced_instances_have_a_limit(term):
    def solve(**terms):
        cost = CostModel(1, 1, 1, 1, 1, **terms)
        shape = jax.ShapeDtypeStruct((1, 2**17 + 1), jnp.int32)
        return jax.eval_shape(lambda o: solve_plan(o, Topology((0,)), cost, num_slots=0, planner="none"), shape)

    solve()
    with pytest.raises(ValueError, match=rf"a rank has 131073 instances .* above the 131072 .* {term}"):
        solve(**{term: 1})


def warnings_of(monkeypatch):
    """What `absl.logging.warning` is told from now on, as if nothing had been said before."""
    said = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: said.append(text % values))
    api._announce_callback.cache_clear()
    return said


@pytest.mark.parametrize("planner", [name for name in BASELINES if name not in SCORED_ONLY])
def test_baselines_run_inside_a_program_and_say_how(planner, monkeypatch):
    said = warnings_of(monkeypatch)
    solve = functools.partial(solve_plan, topology=TOPOLOGY, cost=COST, num_slots=2, planner=planner)
    problem = Problem(TOPOLOGY, COST, E, 2, None, 128, "bottleneck")
    for seed in range(2):
        wanted = reference.solve(demand(seed), problem, planner)
        assert_plan(jax.jit(solve)(demand(seed)), wanted)
        assert_plan(solve(demand(seed), implementation="reference"), wanted)
    assert len(said) == 1
    assert re.match(f"planner='{planner}' is a baseline in NumPy: .* host callback", said[0])


def test_a_layer_takes_baselines_that_it_can_run():
    sizes = {"hidden": 16, "ffn": 8, "num_experts": E, "top_k": 2, "topology": TOPOLOGY}
    assert LayerConfig(**sizes, planner="llep").planner == "llep"
    for planner in SCORED_ONLY:
        with pytest.raises(ValueError, match=f"planner='{planner}' makes drafts that no layer can run"):
            LayerConfig(**sizes, planner=planner)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"planner": ["topoep"]}, "planner=.* is unknown"),
        ({"effort": [1]}, "effort=.* is unknown"),
        ({"implementation": []}, "implementation=.* is unknown"),
        ({"topology": (0, 0, 1, 1)}, "must be a Topology and a CostModel"),
        ({"cost": None}, "must be a Topology and a CostModel"),
    ],
)
def test_arguments_of_another_type_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        solve_plan(demand(), **({"topology": TOPOLOGY, "cost": COST, "num_slots": 2} | change))


@pytest.mark.parametrize("effort", ["fast", "default", "full"])
def test_without_slots_the_plan_is_empty(effort):
    plan = solve_plan(demand(), TOPOLOGY, COST, num_slots=0, effort=effort)
    assert int(plan.status) == Status.CAP_MET | Status.EMPTY
