"""The solver and the MoE layer under `jax.pmap`, on eight emulated devices.

    .venv/bin/python examples/pmap_layer.py

For those whose training loop is built on pmap, or who write their own shard_map: inside either, call `moe_layer`, the
functional form of `topoep_jax.MoE`. Every device gathers the same demand and solves the same integer problem, so all of
them hold the same plan and none of it is ever sent.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from topoep_jax import CostModel, Forced, Hardware, LayerConfig, Plan, Topology, init_params, moe_layer, solve_plan

NUM_RANKS, TOKENS, HIDDEN = 8, 64, 32
# Eight ranks in two domains of four, as two NVLink nodes would be. `forced` makes some experts hot, as training does.
CONFIG = LayerConfig(
    hidden=HIDDEN,
    ffn=16,
    num_experts=16,
    top_k=2,
    topology=Topology.uniform(2, 4),
    num_slots=2,
    block_rows=8,
    forced=Forced(skew=-2.0),
)


def per_device(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Gives every device a leading axis, as pmap wants it: its own experts, and a copy of all else."""
    experts = params["w"].reshape(NUM_RANKS, CONFIG.num_mains, -1)
    rest = {name: jnp.broadcast_to(value, (NUM_RANKS, *value.shape)) for name, value in params.items() if name != "w"}
    return {"w": experts, **rest}


@functools.partial(jax.pmap, axis_name="ep")
def plan_on_every_device(demand: jax.Array) -> Plan:
    """Solves for the plan on each device, from the demand int32 [E] of that device's tokens."""
    omega = jax.lax.all_gather(demand, "ep")
    cost = CostModel.from_model(CONFIG.hidden, CONFIG.ffn, Hardware.h800())
    return solve_plan(omega, CONFIG.topology, cost, num_slots=CONFIG.num_slots, block_rows=CONFIG.block_rows)


@functools.partial(jax.pmap, axis_name="ep")
def layer_and_gradient(params: dict[str, jax.Array], x: jax.Array) -> tuple:
    """This device's part of the layer, [T, H], the metrics, and the gradient of the mean square of the whole output."""

    def loss(params: dict[str, jax.Array]) -> tuple:
        y, metrics = moe_layer(params, x, axis_name="ep", config=CONFIG)
        return jnp.mean(jnp.square(y)), (y, metrics)

    gradient, (y, metrics) = jax.grad(loss, has_aux=True)(params)
    # A device's own experts have met the tokens of all devices, everything else only its own: for the mean over devices
    # divide the one and average the other.
    gradient = {name: g / NUM_RANKS if name == "w" else jax.lax.pmean(g, "ep") for name, g in gradient.items()}
    return y, metrics, gradient


def agree(tree: object) -> bool:
    """Whether all devices hold the same bits in every array of `tree`."""
    return all((np.asarray(leaf) == np.asarray(leaf)[:1]).all() for leaf in jax.tree.leaves(tree))


def main() -> None:
    rng = np.random.default_rng(0)
    demand = rng.poisson(rng.gamma(0.5, 400.0, CONFIG.num_experts), (NUM_RANKS, CONFIG.num_experts)).astype(np.int32)
    plan = plan_on_every_device(demand)
    print(f"slot_expert on device 0: {np.asarray(plan.slot_expert)[0].tolist()}")
    print(f"all {NUM_RANKS} devices hold the same plan, bit for bit: {agree(plan)}")

    x = rng.standard_normal((NUM_RANKS, TOKENS, HIDDEN), np.float32)
    params = per_device(init_params(jax.random.key(0), CONFIG))
    y, metrics, gradient = layer_and_gradient(params, x)
    before, after = float(metrics.imbalance_before[0]), float(metrics.imbalance[0])
    print(f"layer output {y.shape}, gradient of the experts {gradient['w'].shape}")
    print(f"rank load, max / mean: {before:.2f} without replicas, {after:.2f} with")
    print(f"all {NUM_RANKS} devices report the same metrics, bit for bit: {agree(metrics)}")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_RANKS)
    main()
