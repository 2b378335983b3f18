"""UltraEP's quota planner: in each domain, overloaded ranks export rows until none exceeds the lowest feasible load.

Source: `quota_placement_solve_kernel` in `csrc/kernels/placement.cu` of github.com/Dots-Infra/UltraEP at 94cab09, with
the defaults of its Python package: balance threshold 1, eps 1 %, 1024 rows per replica, a main keeps at least one row.

Steps, for each domain alone (rows of its own experts from all sources):
  1. A probe at load T visits ranks above T by falling load (then rank), and the experts of each by falling load (then
     expert). It exports min(excess of the rank, room of the target, rows left on the main) to the rank with the largest
     room that has a free slot and no copy (low rank first), again and again, while this is at least a floor of rows.
     The probe fails if a rank keeps some excess.
  2. Fast tries at T = 1.01 x ceil(mean) and twice 1 % of the largest load higher; here the floor is the excess divided
     by the number of possible targets, rounded up.
  3. If they fail, exact probes with a floor of 1024 rows: ceil(mean), then four values at a time between it and the
     largest load, keeping the part below the first that succeeds, down to one value. (The source first searches for the
     lowest T at which total excess fits total room; that is ceil(mean) itself.)
  4. An instance first takes the rows of its own rank up to its quota. What is left of each source is divided over the
     room left in the instances by largest remainder, low rank first.

Departures:
  - T and its steps are computed in integers; the source rounds in float32.
  - Rounding in step 4 is done source by source, as in the source, so loads may differ from the quotas by a few rows.
    The source then shuffles which tokens go where; a draft only counts rows.
  - The limits of the kernel (512 experts, 512 replicas and 72 ranks per domain) do not apply.
"""

from collections.abc import Callable

import numpy as np

from topoep_jax.plan.baselines.common import split_in_proportion
from topoep_jax.plan.problem import Draft, Problem, none

MIN_ROWS = 1024

Exports = list[tuple[int, int, int]]
"""(expert, target rank, rows)"""


def ultraep(omega: np.ndarray, problem: Problem) -> Draft:
    """Exports rows inside each domain; replicas stay in their main's domain."""
    draft = none(omega, problem)
    instance_rows = draft.quota.sum(axis=2)
    for expert, target, rows in export_rows(omega, problem):
        draft.holds[target, expert] = True
        instance_rows[expert, target] += rows
        instance_rows[expert, problem.main_rank()[expert]] -= rows
    ranks = np.arange(problem.topology.num_ranks)
    for expert in np.flatnonzero(draft.holds.sum(axis=0) > 1).tolist():
        own = np.minimum(omega[:, expert], instance_rows[expert])
        sent = split_in_proportion(omega[:, expert] - own, instance_rows[expert] - own)  # [source, rank]
        draft.quota[expert] = sent.T
        draft.quota[expert, ranks, ranks] += own
    return draft


def export_rows(omega: np.ndarray, problem: Problem) -> Exports:
    """Steps 1 to 3 for all domains; `omega` is [R, E]."""
    load = omega.sum(axis=0).tolist()
    return [export for d in range(problem.topology.num_domains) for export in _solve_domain(load, problem, d)]


def _solve_domain(load: list[int], problem: Problem, domain: int) -> Exports:
    """Steps 1 to 3 for one domain; `load` is rows per expert."""
    ranks, mains = problem.topology.ranks_of_domain(domain), problem.mains_per_rank
    experts = {r: sorted(range(r * mains, (r + 1) * mains), key=lambda e: (-load[e], e)) for r in ranks}
    rank_load = {r: sum(load[e] for e in experts[r]) for r in ranks}
    if problem.num_slots == 0 or len(ranks) == 1:
        return []

    def probe(threshold: int, floor: int | None) -> Exports | None:
        return _export(load, experts, rank_load, problem.num_slots, threshold, floor)

    low = -(-sum(rank_load.values()) // len(ranks))
    high = max(rank_load.values())
    threshold = -(-low * 101 // 100)
    for _ in range(3):
        exports = probe(threshold, None)
        if exports is not None:
            return exports
        threshold = min(high, threshold + max(1, -(-high // 100)))
    exports = probe(low, MIN_ROWS)
    if exports is not None:
        return exports
    return probe(_lowest_feasible(min(low + 1, high), high, probe), MIN_ROWS) or []


def _lowest_feasible(low: int, high: int, probe: Callable[[int, int | None], Exports | None]) -> int:
    """The end of the four-way search; `high` is feasible, and feasibility need not be monotone in between."""
    while low < high:
        gap = high - low
        points = list(range(low, high)) if gap <= 4 else [low + gap * (i + 1) // 5 for i in range(4)]
        first = next((i for i, point in enumerate(points) if probe(point, MIN_ROWS) is not None), None)
        if gap <= 4:
            return high if first is None else points[first]
        if first is None:
            low = points[-1] + 1
        else:
            high = points[first]
            low = points[first - 1] + 1 if first else low
    return low


def _export(
    load: list[int],
    experts: dict[int, list[int]],
    rank_load: dict[int, int],
    num_slots: int,
    threshold: int,
    floor: int | None,
) -> Exports | None:
    """One probe (step 1); None if it fails. `floor` None is that of the fast tries."""
    room = {r: max(threshold - rows, 0) for r, rows in rank_load.items()}
    if sum(rank_load.values()) > threshold * len(rank_load):
        return None
    free = dict.fromkeys(rank_load, num_slots)
    exports: Exports = []
    for rank in sorted(rank_load, key=lambda r: (-rank_load[r], r)):
        excess = max(rank_load[rank] - threshold, 0)
        for expert in experts[rank]:
            left = max(load[expert] - 1, 0)
            targets = {r for r in rank_load if r != rank and free[r] and room[r]}
            while excess and left and targets:
                least = floor if floor is not None else -(-excess // len(targets))
                target = min(targets, key=lambda r: (-room[r], r))
                rows = min(excess, room[target], left)
                if rows < least:
                    break
                exports.append((expert, target, rows))
                targets.discard(target)
                room[target] -= rows
                free[target] -= 1
                excess -= rows
                left -= rows
        if excess:
            return None
    return exports
