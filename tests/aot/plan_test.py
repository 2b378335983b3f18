"""The planner inside a program for GPUs, compiled ahead of time with the handler that nvcc built.

It must stay on the device: one custom call, in a CUDA graph, and nothing that hands data to the host.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from tests.support.aot import Compiler, targets, thunks_of
from topoep_jax.aot import host_reads
from topoep_jax.plan.api import solve_plan
from topoep_jax.plan.hardware import Hardware
from topoep_jax.plan.problem import CostModel
from topoep_jax.plan.types import Plan
from topoep_jax.topology import Topology

HOSTS, GPUS, EXPERTS = 4, 8, 128


def step(demand: jax.Array, *, planner: str, effort: str = "fast") -> Plan:
    """What the layer does on each rank: gather the demand (int32 [1, E] of this rank), then plan."""
    cost = CostModel.from_model(2048, 768, Hardware.h800())
    omega = jax.lax.all_gather(demand, "ep", tiled=True)
    topology = Topology.uniform(HOSTS, GPUS)
    plan = solve_plan(omega, topology, cost, num_slots=2, planner=planner, effort=effort, implementation="cuda")
    return jax.tree.map(lambda field: field[None], plan)


@pytest.mark.parametrize(
    ("planner", "effort"),
    [("none", "fast"), ("topoep_paper", "fast"), ("topoep", "fast"), ("topoep", "default")],
)
def test_the_planner_stays_on_the_device(aot: Compiler, planner: str, effort: str) -> None:
    mesh = aot.mesh(HOSTS, GPUS)
    ranks = HOSTS * GPUS
    program = aot.compile(
        jax.shard_map(partial(step, planner=planner, effort=effort), mesh=mesh, in_specs=P("ep"), out_specs=P("ep")),
        aot.struct((ranks, EXPERTS), jnp.int32, mesh, P("ep")),
        # So that even this short program is worth a graph to XLA.
        options={"xla_gpu_graph_min_graph_size": 1},
    )
    assert targets(program) == ["topoep_plan"]
    assert not host_reads(program)
    [call] = thunks_of(program, "topoep_plan")
    assert call.command_buffer, program.thunks
