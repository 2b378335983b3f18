"""FasterMoE's shadowing: the hottest experts are copied to every rank, and their rows never leave their source.

Source: `global_policy` in `fmoe/fastermoe/shadow_policy.py` of github.com/laekov/fastmoe at ee3c561 (FasterMoE,
PPoPP'22, doi 10.1145/3503221.3508418).

Steps:
  1. Sort experts by total load. The latency of a layer is that of its hottest expert outside the shadows: compute
     forward and backward, plus four transfers of its rows, all through one link.
  2. Hottest first, shadow an expert while the latency of the next one, plus one broadcast for every shadow so far, is
     below the best latency so far. Stop at the first that is not; never shadow the last.

Departures:
  - The source prices a two-matrix float32 expert from environment variables; here row and pull times come from the cost
    model (`row_ps` is forward and backward; links between domains if there are several domains, else inside).
  - The source sums the gathered counts over the wrong axis: totals per source rank instead of per expert. Here it is
    the total per expert that its paper means.
  - The source has no limit on shadows; a shadow takes a slot on every rank but its main, so at most N are kept.
"""

import numpy as np

from topoep_jax.plan.problem import Draft, Problem, none


def fastermoe(omega: np.ndarray, problem: Problem) -> Draft:
    """Shadows at most N experts; their rows are executed by the rank they come from."""
    cost = problem.cost
    fs_per_byte = cost.inter_fs_per_byte if problem.topology.num_domains > 1 else cost.intra_fs_per_byte
    row_fs = 1000 * cost.row_ps + 4 * cost.token_bytes * fs_per_byte
    shadowed = shadows(omega.sum(axis=0).tolist(), row_fs, cost.expert_bytes * fs_per_byte)
    draft = none(omega, problem)
    ranks = np.arange(problem.topology.num_ranks)
    for expert in shadowed[: problem.num_slots]:
        draft.holds[:, expert] |= omega[:, expert] > 0
        draft.quota[expert] = 0
        draft.quota[expert, ranks, ranks] = omega[:, expert]
    return draft


def shadows(load: list[int], row_time: int, pull_time: int) -> list[int]:
    """The experts worth a shadow, hottest first, without a limit; times in one unit, `pull_time` for one broadcast."""
    order = sorted(range(len(load)), key=lambda e: (-load[e], e))
    best = row_time * load[order[0]]
    for i, following in enumerate(order[1:]):
        latency = row_time * load[following] + (i + 1) * pull_time
        if latency >= best:
            return order[:i]
        best = latency
    return order[:-1]
