"""The MoE block as a Flax linen module."""

from typing import Any

from flax import linen as nn
from flax.nnx import bridge

from topoep_jax import module


def MoE(hidden: int, ffn: int, num_experts: int, top_k: int, **options: Any) -> nn.Module:
    """`topoep_jax.MoE` as a linen module: `init(key, x)`, then `apply(variables, x, mask, replay)`.

    Args:
      hidden, ffn, num_experts, top_k: as for `topoep_jax.MoE`.
      **options: its keyword arguments but `rngs`, which linen's `params` stream replaces.

    Returns:
      A module whose call returns (y, `MoEMetrics`).
    """
    return bridge.to_linen(module.MoE, hidden, ffn, num_experts, top_k, **options)
