"""Two processes of four devices make the same plan, bit for bit, as one process of eight: nothing is broadcast."""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support.multiprocess_worker import run_processes
from topoep_jax.plan import CostModel, Hardware, Plan, solve_plan
from topoep_jax.topology import Topology

R, E = 8, 16
COST = CostModel.from_model(64, 64, Hardware.h800())


def demand() -> np.ndarray:
    omega = np.random.default_rng(0).integers(0, 200, (R, E))
    omega[:, 3] += 1000
    return omega.astype(np.int32)


def plan_on_every_device(topology: Topology) -> Plan:
    """[device, ...]: each device owns a row of the demand, gathers the others and plans."""
    mesh = Mesh(np.array(jax.devices()[:R]), ("ep",))
    rows = jax.make_array_from_callback((R, E), NamedSharding(mesh, P("ep")), lambda index: demand()[index])
    solve = functools.partial(solve_plan, topology=topology, cost=COST, num_slots=2)

    def plan_here(row):
        plan = solve(jax.lax.all_gather(row, "ep", tiled=True))
        return jax.tree.map(lambda field: field[None], plan)

    return jax.jit(jax.shard_map(plan_here, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))(rows)


def plan_everywhere(folder: str) -> None:
    """One process's part: saves the plans of its own devices."""
    assert jax.device_count() == R
    assert jax.local_device_count() == R // 2
    topology = Topology.from_mesh(Mesh(np.array(jax.devices()), ("ep",)))
    assert topology == Topology.uniform(2, 4), "the processes are the domains"
    for name, field in plan_on_every_device(topology)._asdict().items():
        for shard in field.addressable_shards:
            np.save(Path(folder) / f"{name}.{shard.index[0].start}.npy", np.asarray(shard.data)[0])


def test_two_processes_make_the_plan_of_one(tmp_path):
    run_processes("tests.plan.multiprocess_test:plan_everywhere", str(tmp_path))
    here = plan_on_every_device(Topology.uniform(2, 4))
    for name, field in here._asdict().items():
        for device in range(R):
            there = np.load(tmp_path / f"{name}.{device}.npy")
            assert there.dtype == np.int32
            np.testing.assert_array_equal(there, np.asarray(field)[0], err_msg=f"{name}, device {device}")


def fail_in_one_process(_: str) -> None:
    if jax.process_index() == 1:
        raise RuntimeError("process 1 gave up")


@pytest.mark.full
def test_a_failing_process_is_reported():
    with pytest.raises(AssertionError, match="process 1 gave up"):
        run_processes("tests.plan.multiprocess_test:fail_in_one_process", "", timeout_s=20)
