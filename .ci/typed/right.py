"""A user's file that is right: mypy in strict mode has nothing to say of it, which .ci/typed/check.py sees to."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from topoep_jax import (
    CostModel,
    Hardware,
    LayerConfig,
    MoE,
    MoEMetrics,
    Plan,
    Topology,
    collect_metrics,
    init_params,
    linen,
    moe_layer,
    solve_plan,
)


def plan(omega: np.ndarray) -> tuple[Plan, int]:
    """Planning alone."""
    cost = CostModel.from_model(hidden=64, ffn=32, hardware=Hardware.h800())
    made = solve_plan(omega, Topology.uniform(2, 2), cost, num_slots=1, planner="topoep", implementation="cpu")
    return made, int(made.rank_load.max())


def nnx_layer(mesh: jax.sharding.Mesh, x: jax.Array) -> tuple[jax.Array, str]:
    """The nnx form, and what it measured."""
    layer = MoE(64, 32, 8, 2, mesh=mesh, topology=Topology.uniform(1, 4), overflow="flag", rngs=nnx.Rngs(0))
    y, metrics = layer(x)
    _, _, routed = layer(x, return_routing=True)
    both: MoEMetrics = collect_metrics([metrics, metrics])
    chosen: jax.Array = routed.expert_idx
    return y + chosen.sum(), both.summary()


def linen_layer(mesh: jax.sharding.Mesh, x: jax.Array) -> jax.Array:
    """The linen form: a module with typed fields."""
    layer = linen.MoE(64, 32, 8, 2, mesh=mesh, gemm="scan", dtype=jnp.bfloat16, name="experts")
    experts: int = layer.num_experts
    variables = layer.init(jax.random.key(experts), x)
    y, _ = layer.apply(variables, x)
    return jnp.asarray(y)


def own_shard_map(config: LayerConfig, x: jax.Array) -> jax.Array:
    """The function for a shard_map of one's own."""
    params = init_params(jax.random.key(0), config)
    y, metrics = moe_layer(params, x, axis_name="ep", config=config)
    load: jax.Array = metrics.expert_load
    return y * load.max()
