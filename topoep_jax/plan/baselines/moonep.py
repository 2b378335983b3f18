"""MoonEP: exact balance, whatever it costs in replica slots.

Source: `tests/planning_reference.py` of github.com/Ascend/MoonEP at 33327eb, a copy of MoonshotAI/MoonEP.

Steps:
  1. Capacity is the mean load. As long as a rank has more: the fullest home rank gives to the emptiest rank all that
     this one lacks (and may itself fall below the mean, to be filled later). So a rank receives from at most one home
     rank.
  2. For each home rank: the receiver that is owed most takes from the expert with most rows left at home, until all
     debts are paid.
  3. A source's rows follow the global order of an expert's rows (source after source), cut into one interval per
     destination in ascending rank.

Departures:
  - The source needs equally many rows of every source; here ranks r < total mod R have one row of capacity more, so
    any demand works, balanced to the row.
  - A rank may need up to E/R replica slots, the source's own bound, whatever `num_slots` says: such a draft can be
    scored, but not be run with fewer slots.
  - De-duplication on the wire and buffer layout are not the planner's business here.
"""

import numpy as np

from topoep_jax.plan.baselines.common import draft_of_quota
from topoep_jax.plan.problem import Draft, Problem
from topoep_jax.plan.topoep.apportion import overlap


def moonep(omega: np.ndarray, problem: Problem) -> Draft:
    """Gives every rank the mean load, exactly."""
    rows = allocate(omega.sum(axis=0), problem.topology.num_ranks)
    return draft_of_quota(overlap(rows, omega.T), problem)


def allocate(load: np.ndarray, num_ranks: int) -> np.ndarray:
    """int64 [E, R], rows of each expert on each rank; `load` [E] is rows per expert, mains are contiguous blocks."""
    mains = load.size // num_ranks
    owed = _debts(load.reshape(num_ranks, mains).sum(axis=1))
    rows = np.zeros((load.size, num_ranks), np.int64)
    for home in range(num_ranks):
        block = slice(home * mains, (home + 1) * mains)
        left = load[block].copy()
        while owed[home].any():
            rank, local = owed[home].argmax(), left.argmax()
            taken = min(owed[home, rank], left[local])
            rows[block][local, rank] += taken
            left[local] -= taken
            owed[home, rank] -= taken
        rows[block, home] = left
    return rows


def _debts(home_load: np.ndarray) -> np.ndarray:
    """int64 [R, R]: rows that each home rank gives to each rank; `home_load` is [R]."""
    num_ranks = home_load.size
    mean, extra = divmod(int(home_load.sum()), num_ranks)
    surplus = home_load - mean - (np.arange(num_ranks) < extra)
    owed = np.zeros((num_ranks, num_ranks), np.int64)
    while surplus.max() > 0:
        home, rank = surplus.argmax(), surplus.argmin()
        owed[home, rank] = -surplus[rank]
        surplus[home] += surplus[rank]
        surplus[rank] = 0
    return owed
