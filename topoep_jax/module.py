"""`MoE`, the layer as a Flax nnx module on a device mesh (`topoep_jax.linen.MoE` is its linen form)."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from topoep_jax.config import STAGING_BYTES, Gemm, Overflow, Residuals, Transport
from topoep_jax.moe import Params, init_params
from topoep_jax.on_mesh import CORRECTION_BIAS, OnMesh, Options, Place, RouterOptions
from topoep_jax.plan import Hardware
from topoep_jax.plan.reference import DEFAULT_PLANNER
from topoep_jax.routing import Forced
from topoep_jax.topology import Topology


class CorrectionBias(nnx.Variable):
    """The selection bias of a "glm4" router: moved by a rule of the trainer, never by a gradient."""


class MoE(OnMesh, nnx.Module):
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
        router_options: RouterOptions = None,
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
    ) -> None:
        options = Options(
            hidden,
            ffn,
            num_experts,
            top_k,
            mesh=mesh,
            axis=axis,
            router=router,
            router_options=router_options,
            num_slots=num_slots,
            planner=planner,
            effort=effort,
            planner_implementation=planner_implementation,
            cap_factor=cap_factor,
            block_rows=block_rows,
            chunks=chunks,
            overflow=overflow,
            residuals=residuals,
            gemm=gemm,
            staging_bytes=staging_bytes,
            transport=transport,
            pulls=pulls,
            shared_ffn=shared_ffn,
            dtype=dtype,
            param_dtype=param_dtype,
            topology=topology,
            hardware=hardware,
            data_axes=data_axes,
            forced=forced,
        )
        place = options.place()
        if not isinstance(rngs, nnx.Rngs):
            raise ValueError(
                f"rngs is {type(rngs).__name__}, but nnx.Rngs is needed: rngs=nnx.Rngs(0), or nnx.Rngs(key)"
            )
        self.config, self.mesh, self.axis, self.data_axes, self.dtype = place
        for name, value in init_params(rngs.params(), place.config, param_dtype).items():
            kind = CorrectionBias if name == CORRECTION_BIAS else nnx.Param
            setattr(self, name, kind(value, out_sharding=place.names(name, value.ndim), mesh=mesh))

    def _placed(self) -> tuple[Place, Params]:
        params = {name: value[...] for name, value in vars(self).items() if isinstance(value, nnx.Variable)}
        return Place(self.config, self.mesh, self.axis, self.data_axes, self.dtype), params
