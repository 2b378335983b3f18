"""A plan in the form that other frameworks' dispatchers take: maps over physical experts instead of quotas."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from topoep_jax.dispatch.api import send_order
from topoep_jax.dispatch.layout import instance_expert
from topoep_jax.plan.types import Plan


class Triple(NamedTuple):
    """Routing over the R x J instances ("physical experts"), numbered rank * J + instance."""

    physical_to_logical: jax.Array
    """int32 [R * J]: expert of each instance, -1 for an empty slot."""
    rerouted_idx: jax.Array
    """int32 [T, K]: instance that executes each assignment, -1 for padding."""
    rerouted_weight: jax.Array
    """f32 [T, K]: router weight of each assignment, unchanged by rerouting; 0 for padding."""


def as_triple(plan: Plan, expert_idx: jax.Array, weight: jax.Array, rank: jax.Array | int) -> Triple:
    """Says for every assignment of one rank which instance the plan sends it to.

    The rule is that of the layer: a rank's assignments to an expert, in token order, fill the expert's instances in
    ascending rank, as many each as the quota says.

    Args:
      plan: of the demand that `expert_idx` is a part of.
      expert_idx: int32 [T, K] this rank's routing; entries below 0 are padding.
      weight: f32 [T, K] router weights.
      rank: this rank's position on the expert-parallel axis.

    Returns:
      The maps. Assignments that the plan does not serve (padding, or all of them where it refused its demand) have
      instance -1 and weight 0.

    Raises:
      ValueError: arrays of other shapes or dtypes, a rank out of range.
    """
    slot_expert, quota = jnp.asarray(plan.slot_expert), jnp.asarray(plan.quota)
    num_ranks, num_slots = slot_expert.shape
    if expert_idx.ndim != 2 or not jnp.issubdtype(expert_idx.dtype, jnp.integer) or weight.shape != expert_idx.shape:
        raise ValueError(
            f"expert_idx ({expert_idx.dtype}{list(expert_idx.shape)}) must be int32 [T, K] and weight"
            f" ({weight.dtype}{list(weight.shape)}) of the same shape"
        )
    if not isinstance(rank, jax.core.Tracer) and not 0 <= int(rank) < num_ranks:
        raise ValueError(f"rank={rank} must be within 0..{num_ranks - 1}")
    num_instances = quota.shape[2]
    num_experts = num_ranks * (num_instances - num_slots)
    expert = instance_expert(slot_expert, num_experts).reshape(-1)
    # Instances in the order in which this rank's sorted assignments fill them: by expert, then by rank. An empty slot
    # gets no row, wherever it stands.
    filling = jnp.argsort(jnp.where(expert < 0, num_experts, expert), stable=True).astype(jnp.int32)
    end = jnp.cumsum(quota[rank].reshape(-1)[filling], dtype=jnp.int32)
    _, place = send_order(expert_idx, num_experts)
    instance = filling[jnp.minimum(jnp.searchsorted(end, place, side="right"), expert.size - 1)]
    rows = place.reshape(expert_idx.shape)
    valid = (expert_idx >= 0) & (expert_idx < num_experts) & (rows < end[-1])
    return Triple(
        physical_to_logical=expert,
        rerouted_idx=jnp.where(valid, instance.reshape(expert_idx.shape), -1),
        rerouted_weight=jnp.where(valid, weight, 0.0),
    )
