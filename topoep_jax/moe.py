"""The MoE layer: routing -> demand -> plan -> transfer | dispatch -> experts -> combine, in this order.

`moe_layer` is the function for your own shard_map or pmap; `MoE` is the Flax module that places it on a mesh
(`topoep_jax.linen.MoE` is its linen form).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from topoep_jax import routing
from topoep_jax._compat import vary_like
from topoep_jax.config import LayerConfig, Overflow
from topoep_jax.demand import gather_demand
from topoep_jax.dispatch import build_layout
from topoep_jax.metrics import MoEMetrics, measure, merge_over
from topoep_jax.pipeline import dropped_rows, planned_experts
from topoep_jax.plan import Hardware, Status, solve_plan
from topoep_jax.topology import Topology

Params = dict[str, Any]


def moe_layer(
    params: Params,
    x: jax.Array,
    *,
    axis_name: str,
    config: LayerConfig,
    mask: jax.Array | None = None,
    replay: jax.Array | None = None,
    layer: jax.Array | int = 0,
    step: jax.Array | int = 0,
) -> tuple[jax.Array, MoEMetrics]:
    """One MoE layer on one rank; call it inside shard_map or pmap over `axis_name`.

    Args:
      params: `w` [E/R, 3 H I] this rank's packed experts (gate and up as [H, 2 I], then down as [I, H]);
        `router` [H, E]; `correction_bias` f32 [E] for the "glm4" router; `shared_gate_up` [H, 2 S] and `shared_down`
        [S, H] where `config.shared_ffn` = S > 0. All but `w` are the same on every rank. `init_params` makes them.
      x: [T, H] this rank's tokens; T may be anything, and is the same on every rank.
      axis_name: the expert-parallel axis, of `config.num_ranks` ranks.
      config: the layer.
      mask: bool [T], false for padding, which is routed nowhere and yields zeros; None where every token counts.
      replay: int32 [T, K], recorded experts to use instead of the router's choice; negative entries are padding.
      layer: index of this layer; only forced routing reads it.
      step: index of this call; only forced routing reads it.

    Returns:
      [T, H] in the dtype of `x`, and the metrics, equal on every rank. Where `metrics.status` holds `Status.BAD_INPUT`
      (a NaN among the logits of any rank, say) nothing was routed and y is that of the shared experts alone: stop.

    Raises:
      ValueError: shapes that disagree with `config`, or an axis of another size.
    """
    _check_shapes(params, x, axis_name, config)
    if mask is not None:
        x = jnp.where(mask[:, None], x, jnp.zeros((), x.dtype))
    logits = lax.dot_general(x.astype(jnp.float32), params["router"].astype(jnp.float32), (((1,), (0,)), ((), ())))
    bad = routing.has_bad_logits(logits, mask)
    if config.forced is not None:
        rank = lax.axis_index(axis_name)
        logits = routing.forced_logits(config.forced, logits, layer=layer, step=step, rank=rank)
    chosen = _route(config, params, logits, replay)
    if mask is not None:
        chosen = routing.apply_mask(chosen, mask)
    omega = gather_demand(chosen.expert_idx, config.num_experts, axis_name, bad=bad)
    num_assignments = chosen.expert_idx.size
    plan = solve_plan(
        omega,
        config.topology,
        config.cost,
        num_slots=config.num_slots,
        cap_rows=config.cap_rows(num_assignments),
        block_rows=config.block_rows,
        planner=config.planner,
    )
    slot_expert, quota = jnp.asarray(plan.slot_expert), jnp.asarray(plan.quota)
    y = planned_experts(
        config,
        axis_name,
        x,
        vary_like(chosen.weight, x),
        vary_like(params["w"], x),
        chosen.expert_idx,
        omega,
        slot_expert,
        quota,
    )
    if config.shared_ffn:
        y = y + _shared_experts(params, x)
    layout = build_layout(config, omega, slot_expert, quota, num_assignments, axis_name)
    overflow = dropped_rows(config, layout, num_assignments)
    drops = config.overflow == "drop"
    return y, measure(
        omega,
        plan,
        config.topology,
        passes=jnp.ones_like(layout.passes) if drops else layout.passes,
        overflow_rows=overflow,
        dropped_rows=overflow if drops else jnp.zeros_like(overflow),
    )


def init_params(key: jax.Array, config: LayerConfig, dtype: Any = jnp.float32) -> Params:
    """Fresh global parameters of a layer, as `moe_layer` takes them, with `w` of all E experts: [E, 3 H I].

    Every matrix is normal with variance 1 / fan-in. The router and the correction bias are f32.
    """
    hidden, ffn, shared = config.hidden, config.ffn, config.shared_ffn
    keys = iter(jax.random.split(key, 5))

    def normal(shape: tuple[int, ...], fan_in: int, dtype: Any) -> jax.Array:
        return (jax.random.normal(next(keys), shape, jnp.float32) * fan_in**-0.5).astype(dtype)

    gate_up = normal((config.num_experts, 2 * hidden * ffn), hidden, dtype)
    down = normal((config.num_experts, hidden * ffn), ffn, dtype)
    params: Params = {
        "w": jnp.concatenate([gate_up, down], axis=1),
        "router": normal((hidden, config.num_experts), hidden, jnp.float32),
    }
    if config.router == "glm4":
        params["correction_bias"] = jnp.zeros((config.num_experts,), jnp.float32)
    if shared:
        params["shared_gate_up"] = normal((hidden, 2 * shared), hidden, dtype)
        params["shared_down"] = normal((shared, hidden), shared, dtype)
    return params


def apply_on_mesh(
    params: Params,
    x: jax.Array,
    mask: jax.Array | None,
    replay: jax.Array | None,
    layer: jax.Array | int,
    step: jax.Array | int,
    *,
    config: LayerConfig,
    mesh: Mesh,
    axis: str,
    data_axes: tuple[str, ...],
) -> tuple[jax.Array, MoEMetrics]:
    """`moe_layer` on global arrays: what both Flax modules do. x is [..., H]; mask [...]; replay [..., K]."""
    num_groups = int(np.prod([mesh.shape[a] for a in (*data_axes, axis)]))
    num_tokens = x.size // x.shape[-1]
    if num_tokens % num_groups:
        raise ValueError(
            f"x holds {num_tokens} tokens, which do not divide among the {num_groups} ranks of axes"
            f" {(*data_axes, axis)}: pad them and pass mask=, false on the padding"
        )
    index = {"layer": jnp.asarray(layer, jnp.int32), "step": jnp.asarray(step, jnp.int32)}
    y, metrics = _sharded_layer(params, x, mask, replay, index, config, mesh, axis, data_axes)
    if not isinstance(metrics.status, jax.core.Tracer) and int(metrics.status) & Status.BAD_INPUT:
        raise ValueError(
            "the router's logits hold NaN or +inf (or disable every expert of a token, or a replayed expert does not"
            " exist), so no token was routed: look at x and the router's parameters. Under jit this does not raise but"
            " sets BAD_INPUT in metrics.status"
        )
    return y, metrics


@partial(jax.jit, static_argnums=(5, 6, 7, 8))
def _sharded_layer(
    params: Params,
    x: jax.Array,
    mask: jax.Array | None,
    replay: jax.Array | None,
    index: dict[str, jax.Array],
    config: LayerConfig,
    mesh: Mesh,
    axis: str,
    data_axes: tuple[str, ...],
) -> tuple[jax.Array, MoEMetrics]:
    """The layer under shard_map. Jitted, since eager shard_map runs one operation at a time."""
    groups = (*data_axes, axis)
    explicit = jax.sharding.AxisType.Explicit in mesh.axis_types

    def flat(value: jax.Array, *width: int) -> jax.Array:
        return value.reshape(-1, *width)

    per_token = {
        "mask": None if mask is None else flat(mask),
        "replay": None if replay is None else flat(replay, config.top_k),
    }
    inputs = (params, flat(x, x.shape[-1]), per_token, index)
    specs = ({name: P(axis) if name == "w" else P() for name in params}, P(groups), P(groups), P())
    if explicit:
        # Here shard_map does not move its inputs by itself.
        inputs = jax.reshard(inputs, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))

    def on_rank(
        params: Params, x: jax.Array, per_token: dict[str, Any], index: dict[str, Any]
    ) -> tuple[jax.Array, MoEMetrics]:
        y, metrics = moe_layer(params, x, axis_name=axis, config=config, **per_token, **index)
        return y, merge_over(metrics, data_axes)

    # Metrics are equal on all ranks by construction, which the type system cannot see: check_vma must be off.
    mapped = jax.shard_map(on_rank, mesh=mesh, in_specs=specs, out_specs=(P(groups), P()), check_vma=False)
    y, metrics = mapped(*inputs)
    return lax.reshape(y, x.shape, out_sharding=jax.typeof(x).sharding if explicit else None), metrics


class CorrectionBias(nnx.Variable):
    """The selection bias of a "glm4" router: moved by a rule of the trainer, never by a gradient."""


class MoE(nnx.Module):
    """A mixture-of-experts block that balances its ranks anew at every call; drop it in where an MLP was.

    Args:
      hidden: H, width of a token.
      ffn: I, inner width of one expert.
      num_experts: E, a multiple of the axis size.
      top_k: K, experts per token.
      mesh: the device mesh; x is sharded over (data_axes..., axis) on its flattened token axes.
      axis: the expert-parallel mesh axis.
      router, router_options, num_slots, planner, cap_factor, block_rows, chunks, overflow, transport, shared_ffn,
        forced: see `LayerConfig`.
      dtype: rows, activations and products; sums are f32.
      param_dtype: dtype of the parameters and of their gradients.
      topology: domain of each rank of `axis`; read from the mesh's devices where None.
      hardware: rates that price a plan; those of an H800 node where None.
      data_axes: mesh axes over which tokens are sharded as well; each group of them plans on its own.
      rngs: source of the initial parameters.

    Raises:
      ValueError: see `LayerConfig`, and a mesh without `axis` or a topology of another size.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        num_experts: int,
        top_k: int,
        *,
        mesh: Mesh,
        axis: str = "ep",
        router: str = "qwen3",
        router_options: dict[str, Any] | None = None,
        num_slots: int = 2,
        planner: str = "topoep_paper",
        cap_factor: float = 1.05,
        block_rows: int = 128,
        chunks: int = 1,
        overflow: Overflow = "loop",
        transport: str = "xla",
        shared_ffn: int = 0,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        topology: Topology | None = None,
        hardware: Hardware | None = None,
        data_axes: tuple[str, ...] = (),
        forced: routing.Forced | None = None,
        rngs: nnx.Rngs,
    ):
        self.config = LayerConfig(
            hidden=hidden,
            ffn=ffn,
            num_experts=num_experts,
            top_k=top_k,
            topology=topology_on_mesh(mesh, axis, data_axes, topology),
            router=router,
            router_options=router_options or {},
            num_slots=num_slots,
            planner=planner,
            cap_factor=cap_factor,
            block_rows=block_rows,
            chunks=chunks,
            overflow=overflow,
            transport=transport,
            shared_ffn=shared_ffn,
            hardware=hardware or Hardware.h800(),
            forced=forced,
        )
        self.mesh, self.axis, self.data_axes, self.dtype = mesh, axis, tuple(data_axes), dtype
        for name, value in init_params(rngs.params(), self.config, param_dtype).items():
            names = (axis, None) if name == "w" else (None,) * value.ndim
            kind = CorrectionBias if name == "correction_bias" else nnx.Param
            setattr(self, name, kind(value, out_sharding=names, mesh=mesh))

    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None = None,
        replay: jax.Array | None = None,
        *,
        layer: jax.Array | int = 0,
        step: jax.Array | int = 0,
    ) -> tuple[jax.Array, MoEMetrics]:
        """Routes, plans and runs the experts.

        Args:
          x: [..., H] tokens; their number must be a multiple of the ranks they are sharded over.
          mask: bool [...], false for padding.
          replay: int32 [..., K], recorded experts instead of the router's choice; negative entries are padding.
          layer: index of this layer; only forced routing reads it.
          step: index of this call; only forced routing reads it.

        Returns:
          [..., H] in the module's dtype, and `MoEMetrics`.

        Raises:
          ValueError: shapes; outside jit also logits that no token can be routed by.
        """
        params = {name: value[...] for name, value in vars(self).items() if isinstance(value, nnx.Variable)}
        return apply_on_mesh(
            params,
            x.astype(self.dtype),
            mask,
            replay,
            layer,
            step,
            config=self.config,
            mesh=self.mesh,
            axis=self.axis,
            data_axes=self.data_axes,
        )


def topology_on_mesh(mesh: Mesh, axis: str, data_axes: tuple[str, ...], topology: Topology | None) -> Topology:
    """The topology of `axis`: read from the devices, or the given one if it fits."""
    for name in (axis, *data_axes):
        if name not in mesh.axis_names:
            raise ValueError(
                f"the mesh has axes {tuple(mesh.axis_names)} but no axis {name!r}: add it to the mesh or name another"
            )
    if topology is None:
        return Topology.from_mesh(mesh, axis)
    if topology.num_ranks != mesh.shape[axis]:
        raise ValueError(
            f"the topology describes {topology.num_ranks} ranks, but axis {axis!r} of the mesh has {mesh.shape[axis]}:"
            " give one domain per device of that axis"
        )
    return topology


def _route(config: LayerConfig, params: Params, logits: jax.Array, replay: jax.Array | None) -> routing.Routing:
    options = dict(config.router_options)
    if config.router == "glm4":
        options["correction_bias"] = params["correction_bias"]
    return routing.get_router(config.router)(logits, config.top_k, expert_idx=replay, **options)


def _shared_experts(params: Params, x: jax.Array) -> jax.Array:
    """SwiGLU that every token visits: no routing, no parallelism over experts."""
    gate, up = jnp.split((x @ params["shared_gate_up"].astype(x.dtype)).astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(x.dtype) @ params["shared_down"].astype(x.dtype)


def _check_shapes(params: Params, x: jax.Array, axis_name: str, config: LayerConfig) -> None:
    ranks = lax.axis_size(axis_name)
    if ranks != config.num_ranks:
        raise ValueError(
            f"axis {axis_name!r} has {ranks} ranks, but the layer's topology describes {config.num_ranks}: build the"
            " LayerConfig for this mesh"
        )
    wanted: dict[str, tuple[int, ...]] = {
        "w": (config.num_mains, config.expert_size),
        "router": (config.hidden, config.num_experts),
    }
    if config.router == "glm4":
        wanted["correction_bias"] = (config.num_experts,)
    if config.shared_ffn:
        wanted["shared_gate_up"] = (config.hidden, 2 * config.shared_ffn)
        wanted["shared_down"] = (config.shared_ffn, config.hidden)
    for name, shape in wanted.items():
        if name not in params or params[name].shape != shape:
            got = params[name].shape if name in params else "nothing"
            raise ValueError(f"params[{name!r}] must have shape {shape} on each rank, got {got}: see init_params")
    if x.ndim != 2 or x.shape[1] != config.hidden:
        raise ValueError(f"x has shape {x.shape}, but [tokens, {config.hidden}] is needed: flatten the token axes")
    if ranks * x.shape[0] * config.top_k >= 2**31:
        raise ValueError(
            f"{ranks} ranks x {x.shape[0]} tokens x top_k={config.top_k} is 2^31 assignments or more, which no plan can"
            " count: use smaller microbatches"
        )
