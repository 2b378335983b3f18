"""Fills the slots of every domain on its own; xla_ffi/plan/topoep/fill.h is the same in C++."""

import numpy as np

from topoep_jax.plan.topoep.context import Context
from topoep_jax.plan.topoep.fill_case import VARIANTS, FillCase
from topoep_jax.plan.topoep.select import Selection


def fill(context: Context, selection: Selection, moves: int) -> tuple[np.ndarray, np.ndarray]:
    """Fills each domain in every variant and keeps the cheapest feasible one, the first of equals; variant 0 always is.

    Args:
      context: the problem.
      selection: the remote experts that each domain serves, and the rows that are left for its own.
      moves: most moves that level a domain after its slots were filled (`Effort.fill_moves`).

    Returns:
      The experts of the slots, int64 [R, N], `NOWHERE` if free, and the rows of all instances, int64 [R, J].
    """
    slot_expert = np.zeros((context.ranks, context.slots), np.int64)
    rows = np.zeros((context.ranks, context.instances), np.int64)
    for domain, ranks in enumerate(context.members):
        cases = [FillCase(context, selection, domain, variant) for variant in range(VARIANTS)]
        for case in cases:
            case.fill(moves)
        best = min((case for case in cases if not case.infeasible), key=FillCase.cost)
        slot_expert[ranks] = best.slot_expert
        rows[ranks] = np.concatenate([best.main_rows, best.slot_rows], axis=1)
    return slot_expert, rows
