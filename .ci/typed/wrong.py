"""A user's file with a mistake in each line that says so: mypy reports them, and nothing else."""

import jax
import numpy as np
from flax import nnx

from topoep_jax import CostModel, Hardware, MoE, MoEMetrics, Topology, collect_metrics, linen, solve_plan

COST = CostModel.from_model(64, 32, Hardware.h800())


def mistakes(mesh: jax.sharding.Mesh, x: jax.Array, omega: np.ndarray) -> None:
    """Each of a kind of its own."""
    MoE(64, 32, 8, "2", mesh=mesh, rngs=nnx.Rngs(0))  # error: arg-type
    MoE(64, 32, 8, 2, mesh=mesh, overflow="wait", rngs=nnx.Rngs(0))  # error: arg-type
    MoE(64, 32, 8, 2, mesh=mesh)  # error: call-arg
    MoE(64, 32, 8, 2, mesh=mesh, experts=4, rngs=nnx.Rngs(0))  # error: call-arg
    linen.MoE(64, 32, 8, 2, mesh=mesh, gemm="cublas")  # error: arg-type
    linen.MoE(64, 32, 8, 2, mesh=mesh, experts=4)  # error: call-arg
    solve_plan(omega, (0, 0, 1, 1), COST, num_slots=1)  # error: arg-type
    solve_plan(omega, Topology.uniform(2, 2), COST)  # error: call-arg
    slots: str = solve_plan(omega, Topology.uniform(2, 2), COST, num_slots=1).slot_expert  # error: assignment
    y: jax.Array = MoE(64, 32, 8, 2, mesh=mesh, rngs=nnx.Rngs(0))(x)  # error: assignment
    metrics: MoEMetrics = collect_metrics([slots, y])
    print(metrics.imbalanced)  # error: attr-defined
    int(metrics.summary)  # error: call-overload
