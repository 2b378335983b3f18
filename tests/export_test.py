"""jax.export of programs with the layer: as they are where nothing is planned, else by the recipe of docs/layer.md."""

import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.support.plans import random_demand
from topoep_jax import LayerConfig, MoE, MoEMetrics, Status, Topology, solve_plan
from topoep_jax.plan.mains import mains_only

SIZES = {"hidden": 16, "ffn": 8, "num_experts": 4, "top_k": 2, "block_rows": 4}


def program(**options):
    """(a program of one layer; its arguments, the parameters as a dict, which can be stored)."""
    devices = options.pop("devices", 2)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("ep",))
    moe = MoE(**SIZES, mesh=mesh, topology=Topology.uniform(1, devices), **options, rngs=nnx.Rngs(0))
    definition, state = nnx.split(moe)
    params, x = nnx.to_pure_dict(state), jax.random.normal(jax.random.key(1), (8, SIZES["hidden"]))

    def run(params, x):
        held = jax.tree.map(lambda leaf: leaf, state)
        nnx.replace_by_pure_dict(held, params)
        return nnx.merge(definition, held)(x)

    return jax.jit(run), (params, x)


@pytest.mark.parametrize(
    "options",
    [{"planner": "none", "num_slots": 1}, {"num_slots": 0}, {"devices": 1, "num_slots": 0}],
    ids=["no planner", "no slots", "one rank"],
)
def test_nothing_stands_in_the_way_where_nothing_is_planned(options):
    run, arguments = program(**options)
    exported = jax.export.export(run)(*arguments)
    assert "topoep" not in "".join(re.findall(r"custom_call @\w+", exported.mlir_module()))


def test_the_recipe_exports_stores_and_calls_back():
    run, arguments = program(num_slots=1, planner="topoep_paper")
    with pytest.raises(ValueError, match="topoep_plan"):
        jax.export.export(run)(*arguments).serialize()
    allowed = [jax.export.DisabledSafetyCheck.custom_call("topoep_plan")]
    stored = jax.export.export(run, disabled_checks=allowed)(*arguments).serialize()
    # As of another process, in which the arguments lie on no mesh yet.
    mesh = Mesh(np.array(jax.devices()[:2]), ("any",))
    placed = jax.device_put(jax.tree.map(np.asarray, arguments), NamedSharding(mesh, PartitionSpec()))
    y, metrics = jax.export.deserialize(stored).call(*placed)
    assert isinstance(metrics, MoEMetrics)
    jax.tree.map(np.testing.assert_array_equal, (y, metrics), run(*arguments))


@pytest.mark.parametrize("num_slots", [0, 2])
def test_mains_only_is_the_plan_of_no_planner(num_slots):
    config = LayerConfig(**SIZES | {"num_experts": 12}, topology=Topology((0, 1, 1, 0)), num_slots=num_slots)
    rng = np.random.default_rng(num_slots)
    demands = [random_demand(rng, 4, 12, 50) for _ in range(5)] + [np.zeros((4, 12)), np.full((4, 12), 2**31 // 48)]
    seen = set()
    for omega in (jnp.asarray(omega, jnp.int32) for omega in demands):
        for cap_rows in (10, 1000, 2**31 - 1):
            rows = {"num_slots": num_slots, "cap_rows": cap_rows, "block_rows": 4}
            got = mains_only(omega, **rows)
            want = solve_plan(omega, config.topology, config.cost, planner="none", **rows)
            seen.add(int(got.status))
            for name in ("slot_expert", "quota", "rank_load", "status"):
                np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
    assert seen == {Status.EMPTY, Status.EMPTY | Status.CAP_MET}
    marked = jnp.asarray(demands[0], jnp.int32).at[1].set(-1)
    bad = mains_only(marked, **rows)
    assert bad.status == Status.BAD_INPUT | Status.EMPTY
    assert not bad.quota.any() and not bad.rank_load.any()
