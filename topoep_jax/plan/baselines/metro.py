"""METRO: balances how many experts a rank activates, not how many rows it executes.

Source: arXiv 2512.09277 ("Efficient MoE Serving in the Memory-Bound Regime: Balance Activated Experts, Not Tokens"),
its Algorithm 1; no public code.

Steps:
  1. Replicas are where EPLB puts them; here the copies of `eplb_fixed_main`, since mains stay.
  2. Expert after expert (those with rows): all its rows go to that one of its ranks with the fewest activated experts
     (low rank on ties). Splitting an expert's rows never lowers the largest count (its Lemma 1).

Departures:
  - The source runs experts in parallel under locks, in any order; here they come in ascending order.
  - It is made for decoding with few tokens; in training every expert has rows, so this trades balance of rows away.
    It is here as the other end of the scale.
"""

import numpy as np

from topoep_jax.plan.baselines.common import draft_of_rows
from topoep_jax.plan.baselines.eplb_fixed_main import copied
from topoep_jax.plan.problem import Draft, Problem


def metro(omega: np.ndarray, problem: Problem) -> Draft:
    """Each expert runs on one of its ranks, such that few experts are active on any rank."""
    load = omega.sum(axis=0)
    rows = np.zeros((problem.num_experts, problem.topology.num_ranks), np.int64)
    experts = np.arange(problem.num_experts)
    rows[experts, activate(load, copied(omega, problem))] = load
    return draft_of_rows(rows, omega, problem)


def activate(load: np.ndarray, holds: np.ndarray) -> np.ndarray:
    """int64 [E]: the rank that runs each expert, one of those that hold it (`holds` bool [R, E]); `load` is [E]."""
    active = np.zeros(holds.shape[0], np.int64)
    chosen = np.zeros(load.size, np.int64)
    for expert, rows in enumerate(load):
        ranks = np.flatnonzero(holds[:, expert])
        chosen[expert] = ranks[active[ranks].argmin()]
        active[chosen[expert]] += rows > 0
    return chosen
