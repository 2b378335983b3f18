"""`MoE`, the layer as a Flax module on a device mesh (`topoep_jax.linen.MoE` is its linen form)."""

from functools import partial
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from topoep_jax.config import STAGING_BYTES, Gemm, LayerConfig, Overflow, Residuals, Transport
from topoep_jax.metrics import MoEMetrics, merge_over
from topoep_jax.moe import Params, holds_rows, init_params, moe_layer
from topoep_jax.plan import Hardware, Status
from topoep_jax.plan.reference import DEFAULT_PLANNER
from topoep_jax.routing import Forced, Routed, as_expert_idx
from topoep_jax.topology import Topology
from topoep_jax.transport import Group, group


class CorrectionBias(nnx.Variable):
    """The selection bias of a "glm4" router: moved by a rule of the trainer, never by a gradient."""


class MoE(nnx.Module):
    """A mixture-of-experts block that balances its ranks anew at every call; drop it in where an MLP was.

    Args:
      hidden: H, width of a token.
      ffn: I, inner width of one expert.
      num_experts: E, a multiple of the axis size.
      top_k: K, experts per token.
      mesh: the device mesh; x is sharded over (data_axes..., axis) on its flattened token axes. Best with Auto axes, as
        `jax.sharding.Mesh(devices, names)` makes them: `jax.make_mesh` makes Explicit ones, with which JAX wants to be
        told the sharding of every product in the rest of the model.
      axis: the expert-parallel mesh axis.
      chunks: see `LayerConfig`; None: 2 on GPUs, where chunks overlap, else 1.
      router, router_options, num_slots, planner, effort, planner_implementation, cap_factor, block_rows, overflow,
        residuals, gemm, staging_bytes, transport, pulls, shared_ffn, forced: see `LayerConfig`.
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
        planner: str = DEFAULT_PLANNER,
        effort: str = "fast",
        planner_implementation: str | None = None,
        cap_factor: float = 1.05,
        block_rows: int = 128,
        chunks: int | None = None,
        overflow: Overflow = "loop",
        residuals: Residuals = "none",
        gemm: Gemm = "auto",
        staging_bytes: int = STAGING_BYTES,
        transport: Transport = "xla",
        pulls: str = "direct",
        shared_ffn: int = 0,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        topology: Topology | None = None,
        hardware: Hardware | None = None,
        data_axes: tuple[str, ...] = (),
        forced: Forced | None = None,
        rngs: nnx.Rngs,
    ):
        self.config = LayerConfig(
            hidden=hidden,
            ffn=ffn,
            num_experts=num_experts,
            top_k=top_k,
            topology=_topology_on_mesh(mesh, axis, data_axes, topology),
            router=router,
            router_options=router_options or {},
            num_slots=num_slots,
            planner=planner,
            effort=effort,
            planner_implementation=planner_implementation,
            cap_factor=cap_factor,
            block_rows=block_rows,
            chunks=_chunks_on_mesh(mesh) if chunks is None else chunks,
            overflow=overflow,
            residuals=residuals,
            gemm=gemm,
            staging_bytes=staging_bytes,
            transport=transport,
            pulls=pulls,
            shared_ffn=shared_ffn,
            hardware=hardware or Hardware.h800(),
            forced=forced,
        )
        for name, kind in (("dtype", dtype), ("param_dtype", param_dtype)):
            if not holds_rows(kind):
                raise ValueError(f"{name}={kind} must be a float dtype of 16 bits or more, as in jnp.bfloat16")
        self.mesh, self.axis, self.data_axes, self.dtype = mesh, axis, tuple(data_axes), dtype
        for name, value in init_params(rngs.params(), self.config, param_dtype).items():
            names = (axis, None) if name == "w" else (None,) * value.ndim
            kind = CorrectionBias if name == "correction_bias" else nnx.Param
            setattr(self, name, kind(value, out_sharding=names, mesh=mesh))

    @overload
    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None = None,
        replay: jax.Array | None = None,
        *,
        layer: jax.Array | int = 0,
        step: jax.Array | int = 0,
        return_routing: Literal[False] = False,
    ) -> tuple[jax.Array, MoEMetrics]: ...

    @overload
    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None = None,
        replay: jax.Array | None = None,
        *,
        layer: jax.Array | int = 0,
        step: jax.Array | int = 0,
        return_routing: Literal[True],
    ) -> tuple[jax.Array, MoEMetrics, Routed]: ...

    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None = None,
        replay: jax.Array | None = None,
        *,
        layer: jax.Array | int = 0,
        step: jax.Array | int = 0,
        return_routing: bool = False,
    ) -> tuple[jax.Array, MoEMetrics] | tuple[jax.Array, MoEMetrics, Routed]:
        """Routes, plans and runs the experts.

        Args:
          x: [..., H] tokens; their number must be a multiple of the ranks they are sharded over.
          mask: bool [...], false for padding.
          replay: int32 [..., K], recorded experts instead of the router's choice; negative entries are padding.
          layer: index of this layer; only forced routing reads it.
          step: index of this call; only forced routing reads it.
          return_routing: also return what the router chose, to record it or for a balance loss.

        Returns:
          [..., H] in the module's dtype, `MoEMetrics` and, if asked for, `Routed`.

        Raises:
          ValueError: shapes; outside jit also logits that no token can be routed by, and overflow that is only flagged.
        """
        if not holds_rows(getattr(x, "dtype", None)):
            raise ValueError(f"x is {getattr(x, 'dtype', type(x).__name__)}, but an array of floats is needed")
        params = {name: value[...] for name, value in vars(self).items() if isinstance(value, nnx.Variable)}
        y, metrics, routed = _apply_on_mesh(
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
            return_routing=return_routing,
        )
        return (y, metrics) if routed is None else (y, metrics, routed)


def _chunks_on_mesh(mesh: Mesh) -> int:
    return 1 if mesh.devices.flat[0].platform == "cpu" else 2


def _topology_on_mesh(mesh: Mesh, axis: str, data_axes: tuple[str, ...], topology: Topology | None) -> Topology:
    """The topology of `axis`: read from the devices, or the given one if it fits."""
    if isinstance(data_axes, str) or axis in data_axes:
        raise ValueError(f"data_axes={data_axes!r} must be a tuple of mesh axes other than axis={axis!r}")
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
            " give one domain per device of that axis. To emulate missing devices on CPU, set before JAX starts:"
            f" XLA_FLAGS=--xla_force_host_platform_device_count={topology.num_ranks}"
        )
    return topology


def _apply_on_mesh(
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
    return_routing: bool,
) -> tuple[jax.Array, MoEMetrics, Routed | None]:
    """`moe_layer` on global arrays: what both Flax modules do. x is [..., H]; mask [...]; replay [..., K]."""
    if x.ndim == 0 or x.shape[-1] != config.hidden:
        raise ValueError(f"x has shape {x.shape}, but [..., {config.hidden}] is needed: its last axis is hidden")
    mask = _per_token("mask", mask, x.shape[:-1])
    replay = _per_token("replay", replay, (*x.shape[:-1], config.top_k))
    if replay is not None:
        replay = as_expert_idx(replay, config.num_experts)
    num_groups = int(np.prod([mesh.shape[a] for a in (*data_axes, axis)]))
    num_tokens = x.size // config.hidden
    if num_tokens % num_groups or not num_tokens:
        raise ValueError(
            f"x holds {num_tokens} tokens, which do not divide among the {num_groups} ranks of axes"
            f" {(*data_axes, axis)}: pad them and pass mask=, false on the padding"
        )
    index = {"layer": jnp.asarray(layer, jnp.int32), "step": jnp.asarray(step, jnp.int32)}
    # The traced layer holds its group's number, and the next group of the axis has another one.
    made = group(axis) if config.transport == "device" and config.num_slots else None
    y, metrics, routed = _sharded_layer(
        params, x, mask, replay, index, config, mesh, axis, data_axes, made, return_routing
    )
    if not isinstance(metrics.status, jax.core.Tracer) and int(metrics.status) & Status.BAD_INPUT:
        raise ValueError(
            "the router's logits hold NaN or +inf (or disable every expert of a token, or the correction bias is not"
            " finite), so no token was routed: look at x and the router's parameters. Under jit this does not raise but"
            " sets BAD_INPUT in metrics.status"
        )
    if config.overflow == "flag" and not isinstance(metrics.passes, jax.core.Tracer) and int(metrics.passes) > 1:
        raise ValueError(
            f"{int(metrics.overflow_rows)} assignments lie beyond the receive buffer, and overflow='flag' leaves them"
            " out: run this batch with a layer of overflow='loop', or raise cap_factor. Under jit this does not raise"
            " but sets metrics.passes above 1"
        )
    return y, metrics, routed


@partial(jax.jit, static_argnums=(5, 6, 7, 8, 9, 10))
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
    made: Group | None,
    return_routing: bool,
) -> tuple[jax.Array, MoEMetrics, Routed | None]:
    """The layer under shard_map, traced anew for each group `made` for the axis.

    Jitted, since eager shard_map runs one operation at a time.
    """
    groups = (*data_axes, axis)
    explicit = jax.sharding.AxisType.Explicit in mesh.axis_types

    def flat(value: jax.Array, *width: int) -> jax.Array:
        if not explicit:
            return value.reshape(-1, *width)
        # Joining token axes of which an inner one is sharded has no default sharding.
        shape = (value.size // int(np.prod(width)), *width)
        return lax.reshape(value, shape, out_sharding=NamedSharding(mesh, P(groups)))

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
    ) -> tuple[jax.Array, MoEMetrics, Routed | None]:
        y, metrics, routed = moe_layer(
            params, x, axis_name=axis, config=config, **per_token, **index, return_routing=True
        )
        return y, merge_over(metrics, data_axes), routed if return_routing else None

    # Metrics are equal on all ranks by construction, which the type system cannot see: check_vma must be off.
    mapped = jax.shard_map(on_rank, mesh=mesh, in_specs=specs, out_specs=(P(groups), P(), P(groups)), check_vma=False)
    y, metrics, routed = mapped(*inputs)

    def unflat(value: jax.Array) -> jax.Array:
        # The sharding of x fits: it has as many axes, and its last one is whole.
        shape = (*x.shape[:-1], value.shape[-1])
        return lax.reshape(value, shape, out_sharding=jax.typeof(x).sharding if explicit else None)

    return unflat(y), metrics, jax.tree.map(unflat, routed)


def _per_token(name: str, value: jax.Array | None, shape: tuple[int, ...]) -> jax.Array | None:
    """`value` if it has the token axes of x: it is flattened with them, so any other order would be silently wrong."""
    if value is None or getattr(value, "shape", None) == shape:
        return value
    got = getattr(value, "shape", type(value).__name__)
    raise ValueError(f"{name} has shape {got}, but {shape} is needed: the token axes of x in the same order")
