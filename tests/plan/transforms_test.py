"""`solve_plan` is one function under every JAX transformation: same bits, zero gradient, the right varying type."""

import dataclasses
import functools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from topoep_jax.plan import CostModel, Hardware, Plan, Status, api, solve_plan
from topoep_jax.plan.problem import Problem
from topoep_jax.topology import Topology

ROOT = Path(__file__).parent.parent.parent
R, E = 8, 16
TOPOLOGY = Topology.uniform(2, 4)
COST = CostModel.from_model(64, 64, Hardware.h800())
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["reference", "cpu"])


def demand(seed=0):
    omega = np.random.default_rng(seed).integers(0, 200, (R, E))
    omega[:, 3] += 1000
    return omega.astype(np.int32)


@functools.cache
def solver(implementation, planner="topoep_paper"):
    return functools.partial(
        solve_plan, topology=TOPOLOGY, cost=COST, num_slots=2, planner=planner, implementation=implementation
    )


@functools.cache
def expected(seed=0):
    plan = jax.tree.map(np.asarray, solver("reference")(demand(seed)))
    assert not int(plan.status) & Status.EMPTY
    return plan


def assert_plan(plan, wanted):
    assert isinstance(plan, Plan)
    for name, field, want in zip(Plan._fields, plan, wanted, strict=True):
        assert field.dtype == jnp.int32
        np.testing.assert_array_equal(np.asarray(field), want, err_msg=name)


def mesh():
    return Mesh(np.array(jax.devices()[:R]), ("ep",))


@IMPLEMENTATIONS
def test_eager_and_jit(implementation):
    solve = solver(implementation)
    assert_plan(solve(demand()), expected())
    assert_plan(solve(demand().astype(np.int64)), expected())
    assert_plan(solve(demand().astype(np.uint16)), expected())
    assert_plan(jax.jit(solve)(demand()), expected())


@IMPLEMENTATIONS
def test_scan_and_vmap(implementation):
    solve, seeds = solver(implementation), range(3)
    omegas = jnp.stack([demand(seed) for seed in seeds])
    wanted = Plan(*(np.stack(fields) for fields in zip(*(expected(seed) for seed in seeds), strict=True)))
    assert_plan(jax.jit(lambda o: jax.lax.scan(lambda carry, x: (carry, solve(x)), 0, o)[1])(omegas), wanted)
    assert_plan(jax.vmap(solve)(omegas), wanted)
    assert_plan(jax.jit(jax.vmap(solve, in_axes=2))(jnp.moveaxis(omegas, 0, 2)), wanted)


@IMPLEMENTATIONS
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(implementation, check_vma):
    """Each device gathers the demand and plans for itself; all agree."""

    def plan_here(rows):
        omega = jax.lax.all_gather(rows, "ep", tiled=True)
        plan = solver(implementation)(omega)
        for field in plan:
            assert jax.typeof(field).manual_axis_type == jax.typeof(omega).manual_axis_type
        return jax.tree.map(lambda field: field[None], plan)

    shard_map = functools.partial(jax.shard_map, mesh=mesh(), check_vma=check_vma)
    plan = shard_map(plan_here, in_specs=P("ep"), out_specs=P("ep"))
    for plans in (jax.jit(plan)(demand()), plan(demand())):
        for device in range(R):
            assert_plan(jax.tree.map(lambda field: field[device], plans), expected())  # noqa: B023
    replicated = shard_map(solver(implementation), in_specs=P(), out_specs=P())
    assert_plan(jax.jit(replicated)(demand()), expected())


@IMPLEMENTATIONS
def test_a_varying_plan_is_not_taken_for_a_replicated_one(implementation):
    def plan_here(rows):
        return solver(implementation)(jax.lax.all_gather(rows, "ep", tiled=True))

    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(jax.shard_map(plan_here, mesh=mesh(), in_specs=P("ep"), out_specs=P()))(demand())


@IMPLEMENTATIONS
def test_vmap_and_scan_inside_shard_map(implementation):
    """Two microbatches at once, then one after the other, on every device."""

    def plan_here(rows):
        omegas = jax.lax.all_gather(rows, "ep", axis=1, tiled=True)
        together = jax.vmap(solver(implementation))(omegas)
        in_turn = jax.lax.scan(lambda carry, omega: (carry, solver(implementation)(omega)), 0, omegas)[1]
        return jax.tree.map(lambda a, b: jnp.stack([a, b])[None], together, in_turn)

    omegas = np.stack([demand(0), demand(1)])
    plans = jax.jit(jax.shard_map(plan_here, mesh=mesh(), in_specs=P(None, "ep"), out_specs=P("ep")))(omegas)
    for device in range(R):
        for way in range(2):
            for seed in range(2):
                assert_plan(jax.tree.map(lambda field: field[device, way, seed], plans), expected(seed))  # noqa: B023


@IMPLEMENTATIONS
def test_pmap_devices_agree(implementation):
    def plan_here(row):
        return solver(implementation)(jax.lax.all_gather(row, "ep"))

    plans = jax.pmap(plan_here, axis_name="ep", devices=jax.devices()[:R])(demand())
    for device in range(R):
        assert_plan(jax.tree.map(lambda field: field[device], plans), expected())  # noqa: B023


@pytest.mark.parametrize("make_mesh", [mesh, lambda: jax.make_mesh((R,), ("ep",), devices=jax.devices()[:R])])
def test_sharded_demand_under_plain_jit(make_mesh):
    omega = jax.device_put(demand(), NamedSharding(make_mesh(), P("ep")))
    assert_plan(jax.jit(solver("cpu"))(omega), expected())


@IMPLEMENTATIONS
def test_gradients_pass_by(implementation):
    """A loss that uses the plan is differentiable, with the plan a constant: eager, jit, remat, and scan over remat."""
    omega = demand()

    def loss(x):
        plan = solver(implementation)(omega + jnp.round(0 * x).astype(jnp.int32))
        return jnp.sum(x) * plan.rank_load[0].astype(jnp.float32)

    def scanned(x):
        step = jax.checkpoint(lambda carry, _: (carry + loss(carry) * 0, None))
        return jnp.sum(jax.lax.scan(step, x, None, length=2)[0])

    x = jnp.ones((R, E))
    for f in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.jit(jax.grad(jax.checkpoint(loss)))):
        np.testing.assert_array_equal(f(x), float(expected().rank_load[0]))
    np.testing.assert_array_equal(jax.jit(jax.grad(scanned))(x), 1.0)
    tangent = np.zeros((R, E), jax.dtypes.float0)
    _, tangents = jax.jvp(solver(implementation), (jnp.asarray(omega),), (tangent,))
    assert all(field.dtype == jax.dtypes.float0 for field in tangents)


@IMPLEMENTATIONS
@pytest.mark.parametrize("planner", ["none", "topoep_paper"])
def test_bad_demand_inside_a_program(implementation, planner):
    solve = jax.jit(solver(implementation, planner))
    negative = demand()
    negative[5] = -1
    large = np.zeros((R, E), np.int32)
    large[0, :2] = 2**30
    for omega in (negative, large):
        plan = jax.tree.map(np.asarray, solve(omega))
        assert plan.status == Status.BAD_INPUT | Status.EMPTY
        assert (plan.slot_expert == -1).all()
        assert not plan.quota.any() and not plan.rank_load.any() and not plan.predicted_ps.any()
    large[0, 1] -= 1
    assert not solve(large).status & Status.BAD_INPUT


SAME_BITS_WITH_X64 = """
import jax, numpy as np
assert jax.config.jax_enable_x64
from tests.plan.transforms_test import assert_plan, demand, solver
for implementation in ("reference", "cpu"):
    plans = [solver(implementation)(demand()), jax.jit(solver(implementation))(demand())]
    plans.append(jax.jit(jax.vmap(solver(implementation)))(demand()[None]))
    with np.load(r"{path}") as wanted:
        assert_plan(plans[0], list(wanted.values()))
        assert_plan(plans[1], list(wanted.values()))
        assert_plan(jax.tree.map(lambda field: field[0], plans[2]), list(wanted.values()))
try:
    jax.jit(solver("cpu"))(demand().astype(np.int64))
except ValueError as error:
    assert "int64" in str(error)
else:
    raise AssertionError("int64 demand was accepted")
"""


def test_x64_changes_nothing(tmp_path):
    path = tmp_path / "plan.npz"
    np.savez(path, *expected())
    command = ["env", "JAX_ENABLE_X64=1", sys.executable, "-c", SAME_BITS_WITH_X64.format(path=path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)


GOOD = {"omega": np.ones((4, 8), np.int32), "topology": Topology.uniform(2, 2), "cost": COST, "num_slots": 1}
BAD = {
    "experts": ({"omega": np.ones((4, 6), np.int32)}, "6 experts do not divide evenly over 4 ranks.* multiple of 4"),
    "no experts": ({"omega": np.ones((4, 0), np.int32)}, "0 experts"),
    "ranks": ({"omega": np.ones((8, 8), np.int32)}, r"shape \(8, 8\), but the topology has 4 ranks"),
    "dimensions": ({"omega": np.ones(8, np.int32)}, r"shape \(8,\)"),
    "floats": ({"omega": np.ones((4, 8), np.float32)}, "float32, but demand counts assignments"),
    "bools": ({"omega": np.ones((4, 8), bool)}, "bool, but demand counts"),
    "negative": ({"omega": np.eye(4, 8, dtype=np.int32) - 1}, r"omega\[0, 1\]=-1 is negative"),
    "total": ({"omega": np.full((4, 8), 2**26, np.int32)}, "total demand 2147483648 is not below 2"),
    "too big an entry": ({"omega": np.full((4, 8), 2**62, np.int64)}, "total demand 1475739525896764129"),
    "slots": ({"num_slots": 7}, r"num_slots=7 must be an integer in 0\.\.6"),
    "negative slots": ({"num_slots": -1}, "num_slots=-1"),
    "half a slot": ({"num_slots": 1.5}, "num_slots=1.5"),
    "cap": ({"cap_rows": -1}, "cap_rows=-1 .* None asks for no cap"),
    "fractional cap": ({"cap_rows": 10.0}, "cap_rows=10.0"),
    "block": ({"block_rows": 0}, "block_rows=0"),
    "planner": ({"planner": "best"}, r"planner='best' is unknown: choose one of \['echo', .*'none', "),
    "objective": ({"objective": "eq9"}, r"objective='eq9' is unknown: choose one of \['bottleneck', 'eq8'\]"),
    "implementation": ({"implementation": "tpu"}, r"implementation='tpu' is unknown: .*\['cpu', 'cuda', 'reference'\]"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_bad_arguments_are_named(change, message):
    solve_plan(**GOOD)
    with pytest.raises(ValueError, match=message):
        solve_plan(**(GOOD | change))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"expert_bytes": 0}, "expert_bytes=0"),
        ({"expert_bytes": 2**45}, "expert_bytes=35184372088832 is above .* overflow"),
        ({"token_bytes": 2**20}, "token_bytes=1048576 is above .* overflow"),
        ({"row_ps": 2**32}, "row_ps=4294967296 is above"),
        ({"row_ps": -1}, "row_ps=-1"),
        ({"inter_fs_per_byte": 0.5}, "inter_fs_per_byte=0.5 must be an integer"),
        ({"intra_fs_per_byte": 2**33}, "token_bytes=128 is above .* 8589934592 fs per byte"),
    ],
)
def test_costs_that_could_overflow_are_named(arguments, message):
    fields = {name: getattr(COST, name) for name in COST.__dataclass_fields__}
    with pytest.raises(ValueError, match=message):
        CostModel(**(fields | arguments))


def test_no_implementation_holds_every_reason(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(ExceptionGroup, match="implementation='reference' works everywhere") as failure:
        solve_plan(**GOOD)
    assert [str(reason).split(":")[0] for reason in failure.value.exceptions] == list(api.IMPLEMENTATIONS)


def test_a_missing_extension_says_how_to_build_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "topoep_jax._xla_ffi", None)
    monkeypatch.delitem(sys.modules, "topoep_jax._native", raising=False)
    monkeypatch.delattr("topoep_jax._native", raising=False)
    monkeypatch.delattr("topoep_jax._xla_ffi", raising=False)
    with pytest.raises(ExceptionGroup) as failure:
        solve_plan(**GOOD)
    assert "make setup" in str(failure.value.exceptions[0])
    assert_plan(solver("reference")(demand()), expected())


def test_malformed_native_calls_are_errors_not_crashes():
    from topoep_jax import _native

    def domains(*domain_of_rank):
        topology = Topology((0, 0, 1, 1))
        object.__setattr__(topology, "domain_of_rank", domain_of_rank)  # what Topology itself refuses
        return {"topology": topology}

    good = Problem(Topology((0, 0, 1, 1)), COST, 8, 1, None, 1, "eq8")
    omega = jnp.ones((4, 8), jnp.int32)
    _native.plan(omega, good, "none")
    for change, message in (
        (domains(0, 0), r"omega has shape \[4, 8\], expected \[2, 8\]"),
        (domains(0, 0, 1, 9), "domain_of_rank=9"),
        (domains(0, 0, 1, -1), "domain_of_rank=-1"),
        ({"num_slots": 7}, "num_slots=7"),
        ({"block_rows": 0}, "block_rows=0"),
        ({"cap_rows": -2}, "cap_rows=-2"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(_native.plan(omega, dataclasses.replace(good, **change), "none"))
