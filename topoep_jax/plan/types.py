"""What a planner returns: a pytree of int32 arrays, equal on every rank, from which the whole layer is laid out."""

import enum
from typing import NamedTuple

import jax
import numpy as np


class Status(enum.IntFlag):
    """Bits of `Plan.status`.

    Attributes:
      CAP_MET: No rank executes more than `cap_rows` aligned rows. Set whenever no cap was asked.
      EMPTY: No slot is filled: no parameter and no gradient moves.
      OVER_EMPTY_COST: The predicted time is above that of the empty plan. Only the paper's planner and the
        baselines may do so.
      BAD_INPUT: Demand was negative (a NaN among a rank's logits makes it so), or summed to 2^31 or more: nothing is
        planned, no slot and no quota. Look at the router.
    """

    CAP_MET = 1
    EMPTY = 2
    OVER_EMPTY_COST = 4
    BAD_INPUT = 8


class Plan(NamedTuple):
    """Temporary replicas and the rerouting of every assignment, for one layer and one microbatch.

    R ranks, E experts, N slots per rank, J = E/R + N instances per rank: mains first, then slots.

    Attributes:
      slot_expert: int32 [R, N]: the expert held by each replica slot; ascending on each rank, empty slots -1 and last.
      quota: int32 [R, R, J]: assignments from source rank s that instance j of rank r executes, indexed [s, r, j].
      rank_load: int32 [R]: assignments executed by each rank, the sum of `quota` over s and j.
      predicted_ps: int32 [2]: predicted time in picoseconds, high and low 32-bit word;
        `topoep_jax.plan.picoseconds` joins them.
      status: int32 []: bits of `Status`.
    """

    slot_expert: jax.Array | np.ndarray
    quota: jax.Array | np.ndarray
    rank_load: jax.Array | np.ndarray
    predicted_ps: jax.Array | np.ndarray
    status: jax.Array | np.ndarray


def unpriced(slot_expert: np.ndarray, quota: np.ndarray) -> Plan:
    """The plan of `slot_expert` int [R, N] and `quota` int [R, R, J] in NumPy, with no predicted time and no status."""
    quota = quota.astype(np.int32)
    load = quota.sum(axis=(0, 2), dtype=np.int32)
    return Plan(slot_expert.astype(np.int32), quota, load, np.zeros(2, np.int32), np.zeros((), np.int32))
