"""The plan of those who have nothing to plan, in operations that every backend has."""

import jax
import jax.numpy as jnp

from topoep_jax.plan.types import Plan, Status


def mains_only(omega: jax.Array, *, num_slots: int, cap_rows: int, block_rows: int) -> Plan:
    """Every expert on its main rank alone: what planner "none" answers, and any planner without slots.

    No custom call and no callback, so that a program with it can be exported and runs anywhere.

    Args:
      omega: int32 [R, E] demand, less than 2^31 in all; a negative entry marks demand that is bad.
      num_slots: N.
      cap_rows: as in `solve_plan`.
      block_rows: as in `solve_plan`.

    Returns:
      As of `solve_plan`, but the time, which is not predicted: zeros.
    """
    num_ranks, num_experts = omega.shape
    bad = (omega < 0).any()
    by_rank = jnp.where(bad, 0, omega).reshape(num_ranks, num_ranks, num_experts // num_ranks)
    rows = by_rank.sum(0, dtype=jnp.int32)
    aligned = (-(-rows // block_rows) * block_rows).sum(1, dtype=jnp.int32)
    met = jnp.where(aligned.max() <= cap_rows, Status.CAP_MET.value, 0)
    return Plan(
        slot_expert=jnp.full((num_ranks, num_slots), -1, jnp.int32),
        quota=jnp.pad(by_rank, ((0, 0), (0, 0), (0, num_slots))),
        rank_load=rows.sum(1, dtype=jnp.int32),
        predicted_ps=jnp.zeros(2, jnp.int32),
        status=(jnp.where(bad, Status.BAD_INPUT.value, met) | Status.EMPTY.value).astype(jnp.int32),
    )
