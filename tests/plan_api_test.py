"""`solve_plan` beyond its first planners: priced tokens, priced instances, and baselines through a host callback."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.plan_transforms_test import COST, IMPLEMENTATIONS, TOPOLOGY, E, R, assert_plan, demand
from topoep_jax import LayerConfig
from topoep_jax.plan import CostModel, Status, api, laws, reference, solve_plan
from topoep_jax.plan.baselines import BASELINES
from topoep_jax.plan.problem import Problem
from topoep_jax.plan.reference import SCORED_ONLY
from topoep_jax.topology import Topology

DEDUP = CostModel(200, 64, 1, 20_000, 5_000, dedup=True)
PROBLEM = Problem(TOPOLOGY, DEDUP, E, 2, None, 128, "bottleneck")


def tokens(seed=0):
    """int32 [R, T, K]: expert 3 is wanted by most tokens, and some tokens are padding."""
    rng = np.random.default_rng(seed)
    expert_idx = rng.integers(0, E, (R, 40, 2)).astype(np.int32)
    expert_idx[:, :30, 0] = 3
    expert_idx[:, -2:] = -1
    return expert_idx


def histogram(expert_idx):
    return np.stack([np.bincount(chosen[chosen >= 0], minlength=E) for chosen in expert_idx]).astype(np.int32)


def solver(implementation):
    solve = functools.partial(
        solve_plan, topology=TOPOLOGY, cost=DEDUP, num_slots=2, planner="topoep_paper", implementation=implementation
    )
    return lambda omega, expert_idx: solve(omega, expert_idx=expert_idx)


@functools.cache
def expected(seed=0):
    plan = reference.solve(histogram(tokens(seed)), PROBLEM, "topoep_paper", tokens(seed))
    laws.check_plan(plan, histogram(tokens(seed)), PROBLEM, "topoep_paper", expert_idx=tokens(seed))
    assert (plan.slot_expert >= 0).any()
    return plan


@IMPLEMENTATIONS
def test_tokens_are_priced_under_every_transformation(implementation):
    solve, omega = solver(implementation), histogram(tokens())
    assert_plan(solve(omega, tokens()), expected())
    assert_plan(jax.jit(solve)(omega, tokens().astype(np.int16)), expected())
    both = np.stack([tokens(0), tokens(1)])
    plans = jax.jit(jax.vmap(solve))(np.stack([histogram(t) for t in both]), both)
    for seed in range(2):
        assert_plan(jax.tree.map(lambda field: field[seed], plans), expected(seed))  # noqa: B023

    def plan_here(tokens_here):
        everywhere = jax.lax.all_gather(tokens_here, "ep", tiled=True)
        return jax.tree.map(lambda field: field[None], solve(jnp.asarray(omega), everywhere))

    mesh = Mesh(np.array(jax.devices()[:R]), ("ep",))
    plans = jax.jit(jax.shard_map(plan_here, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))(tokens())
    for device in range(R):
        assert_plan(jax.tree.map(lambda field: field[device], plans), expected())  # noqa: B023


def test_a_price_of_tokens_is_not_that_of_assignments():
    plain = Problem(TOPOLOGY, CostModel(200, 64, 1, 20_000, 5_000), E, 2, None, 128, "bottleneck")
    assignments = reference.solve(histogram(tokens()), plain, "topoep_paper")
    assert (assignments.predicted_ps != expected().predicted_ps).any()
    laws.check_plan(assignments, histogram(tokens()), plain, "topoep_paper")
    with pytest.raises(laws.LawError, match="bookkeeping"):
        laws.check_plan(assignments, histogram(tokens()), PROBLEM, "topoep_paper", expert_idx=tokens())


@IMPLEMENTATIONS
def test_tokens_of_other_demand_are_refused(implementation):
    solve, omega = solver(implementation), histogram(tokens())
    other, strange = tokens(1), tokens()
    strange[0, 0, 0] = E
    for expert_idx in (other, strange, np.where(tokens() < 0, -2, tokens())):
        with pytest.raises(ValueError, match="omega is not the histogram of expert_idx"):
            solve(omega, expert_idx)
        plan = jax.jit(solve)(omega, expert_idx)
        assert plan.status == Status.BAD_INPUT | Status.EMPTY
        laws.check_plan(plan, omega, PROBLEM, "topoep_paper", expert_idx=expert_idx)


GOOD = {
    "omega": histogram(tokens()),
    "topology": TOPOLOGY,
    "cost": DEDUP,
    "num_slots": 2,
    "expert_idx": tokens(),
    "planner": "none",
}
BAD = {
    "no tokens": ({"expert_idx": None}, r"cost.dedup .* pass expert_idx, an int32 array \[ranks, tokens, k\]"),
    "a list": ({"expert_idx": tokens().tolist()}, "not list"),
    "floats": (
        {"expert_idx": tokens().astype(np.float32)},
        r"expert_idx is float32\[8, 40, 2\]: expected int32 \[8, to",
    ),
    "dimensions": ({"expert_idx": tokens()[0]}, r"expert_idx is int32\[40, 2\]"),
    "ranks": ({"expert_idx": tokens()[:4]}, r"expert_idx is int32\[4, 40, 2\]"),
    "tokens for nothing": ({"cost": COST}, "cost.dedup is False, so nothing reads it"),
    "speeds": ({"cost": CostModel(1, 1, 1, 1, 1, rank_speed=(1000, 900)), "expert_idx": None}, "rank_speed has 2 ent"),
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


def test_wide_tokens_cannot_be_checked_in_a_trace():
    with jax.enable_x64(True), pytest.raises(ValueError, match="expert_idx has dtype int64, which may not fit int32"):
        jax.jit(solver("cpu"))(histogram(tokens()), tokens().astype(np.int64))


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
