"""Demand: how many assignments every rank has for every expert, all that a planner needs to know of the tokens."""

import jax
import jax.numpy as jnp
from jax import lax

from topoep_jax.routing import as_expert_idx


def count_demand(expert_idx: jax.Array, num_experts: int) -> jax.Array:
    """Histogram of the assignments of one rank.

    Args:
      expert_idx: int32 [T, K]; entries below 0 are padding and count nowhere.
      num_experts: E.

    Returns:
      int32 [E], one row of omega. In traced code, where nothing can raise, an entry >= E turns the whole row into -1,
      which every planner answers with BAD_INPUT.

    Raises:
      ValueError: an array that is not 2-D, num_experts below 1, or (outside traced code) an entry >= E.
      TypeError: expert_idx that is not int32.
    """
    if expert_idx.ndim != 2:
        raise ValueError(f"expert_idx has shape {expert_idx.shape}, but [tokens, top_k] is needed")
    if num_experts < 1:
        raise ValueError(f"num_experts={num_experts} must be at least 1")
    flat = as_expert_idx(expert_idx, num_experts).reshape(-1)
    # Padding and experts that do not exist share a column of their own, which is cut off.
    column = jnp.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    count = jnp.zeros(num_experts + 1, jnp.int32).at[column].add(1, mode="promise_in_bounds")[:num_experts]
    return jnp.where((flat >= num_experts).any(), -1, count)


@jax.named_scope("topoep_demand")
def gather_demand(expert_idx: jax.Array, num_experts: int, axis_name: str, bad: jax.Array | None = None) -> jax.Array:
    """Demand of all ranks; runs inside shard_map, pmap or vmap over `axis_name`.

    Args:
      expert_idx: int32 [T, K], this rank's assignments; entries below 0 are padding.
      num_experts: E.
      axis_name: the expert-parallel axis, of R ranks.
      bad: bool [], whether this rank's routing is unusable (`routing.has_bad_logits`). Its row becomes -1, so that
        every rank sees it and every planner answers BAD_INPUT.

    Returns:
      omega, int32 [R, E], equal on every rank of the axis, and typed as varying over it (as a plan must be).

    Raises:
      As `count_demand`.
    """
    row = count_demand(expert_idx, num_experts)
    if bad is not None:
        row = jnp.where(bad, -1, row)
    return lax.all_gather(row, axis_name)
