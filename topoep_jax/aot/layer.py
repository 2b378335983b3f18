"""The program that a layer is judged by: forward and backward, of one layer or of several in a scan."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from topoep_jax.aot.compiler import Program, compile_program, struct
from topoep_jax.config import LayerConfig
from topoep_jax.moe import init_params, moe_layer


@dataclasses.dataclass(frozen=True)
class LayerProgram:
    """Layers, compiled.

    Attributes:
      program: what the compiler made of them.
      config: of each layer.
      tokens: T, per rank.
      layers: how many.
      param_grad_bytes: of the gradients of all parameters that one device holds; 0 without a backward pass.
    """

    program: Program
    config: LayerConfig
    tokens: int
    layers: int
    param_grad_bytes: int

    @property
    def layer_bytes(self) -> int:
        """What the layers need on a device beside parameters, their gradients and the tokens: temporaries and results.

        The `peak_memory` of XLA's analysis would be less: it leaves out the memory space of collectives.
        """
        memory = self.program.memory
        return memory.temp + memory.outputs - memory.aliases - self.param_grad_bytes


def compile_layer(
    config: LayerConfig,
    mesh: Mesh,
    tokens: int,
    *,
    layers: int = 1,
    backward: bool = True,
    dtype: Any = jnp.bfloat16,
    **compile_options: Any,
) -> LayerProgram:
    """Compiles one layer, or several in a scan, for the devices of `mesh`.

    The program maps parameters, tokens x and a factor to the result y, and with `backward` also to the gradients of
    all, where the gradient of y is y times the factor: were it known before y, XLA would run the forward pass last.

    Args:
      config: the layer; `config.num_ranks` is the size of the mesh, whose axis is "ep".
      mesh: of `Target.mesh`.
      tokens: T, per rank.
      layers: how many, with parameters of their own.
      backward: whether to differentiate.
      dtype: of tokens and expert parameters.
      **compile_options: passed on to `compile_program`.
    """

    def on_rank(params: Any, x: jax.Array) -> jax.Array:
        return moe_layer(params, x, axis_name="ep", config=config)[0]

    shapes = jax.eval_shape(lambda: init_params(jax.random.key(0), config, dtype))
    specs = {name: PartitionSpec("ep") if name == "w" else PartitionSpec() for name in shapes}
    on_mesh = jax.shard_map(
        on_rank, mesh=mesh, in_specs=(specs, PartitionSpec("ep")), out_specs=PartitionSpec("ep"), check_vma=False
    )

    def forward(params: Any, x: jax.Array) -> jax.Array:
        if layers == 1:
            return on_mesh(params, x)
        return lax.scan(lambda x, own: (on_mesh(own, x), None), x, params)[0]

    def both(params: Any, x: jax.Array, factor: jax.Array) -> tuple[jax.Array, Any]:
        y, vjp = jax.vjp(forward, params, x)
        return y, vjp(y * factor)

    lead = (layers,) if layers > 1 else ()
    params = {
        name: struct((*lead, *shape.shape), shape.dtype, mesh, PartitionSpec(*(None for _ in lead), *specs[name]))
        for name, shape in shapes.items()
    }
    x = struct((config.num_ranks * tokens, config.hidden), dtype, mesh, PartitionSpec("ep"))
    args = (params, x, x) if backward else (params, x)
    program = compile_program(both if backward else forward, *args, **compile_options)
    shards = {name: value.sharding.shard_shape(value.shape) for name, value in params.items()}
    grads = sum(jnp.dtype(params[name].dtype).itemsize * math.prod(shard) for name, shard in shards.items())
    return LayerProgram(program, config, tokens, layers, grads if backward else 0)


def worst_case(config: LayerConfig) -> LayerConfig:
    """The same layer as a design without a plan needs it: no replicas, and a buffer for any routing, at once.

    A token sends a rank at most as many rows as it has experts there: R x min(K, E/R) / K times the mean load.
    """
    most = config.num_ranks * min(config.top_k, config.num_mains) / config.top_k
    return dataclasses.replace(config, num_slots=0, planner="none", cap_factor=most, chunks=1)
