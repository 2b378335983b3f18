"""The MoE block as a Flax linen module."""

from typing import Any

from flax import linen as nn
from flax import nnx
from flax.nnx import bridge

from topoep_jax import module


def MoE(hidden: int, ffn: int, num_experts: int, top_k: int, **options: Any) -> nn.Module:
    """`topoep_jax.MoE` as a linen module: `init(key, x)`, then `apply(variables, x, mask, replay)`.

    Parameters are boxed as `nn.Partitioned`, so that `nn.get_sharding(jax.eval_shape(init, ...), mesh)` says where each
    belongs. The policy `overflow` does not change them: modules of two policies share one set.

    Args:
      hidden, ffn, num_experts, top_k: as for `topoep_jax.MoE`.
      **options: its keyword arguments but `rngs`, which linen's `params` stream replaces; and linen's own `name`.

    Returns:
      A module whose call returns what `topoep_jax.MoE` does: y, `MoEMetrics` and, with return_routing=True, `Routed`.
    """
    return bridge.to_linen(module.MoE, hidden, ffn, num_experts, top_k, metadata_fn=_partitioned, **options)


def _partitioned(variable: nnx.Variable) -> nn.Partitioned:
    # Flax's default box holds the mesh and places its value whenever it is asked where that belongs, which shapes
    # without values do not survive.
    return nn.Partitioned(variable.get_value(), names=variable.get_metadata()["out_sharding"])
