"""What the quotas of a plan add up to; xla_ffi/plan/topoep/measure.h is the same in C++."""

import dataclasses

import numpy as np

from topoep_jax.plan.topoep.context import Context
from topoep_jax.plan.topoep.state import State


@dataclasses.dataclass(frozen=True)
class Measure:
    """Rows of one plan, by instance, by rank, and on the busiest rank.

    Attributes:
      rows: int64 [R, J], of each instance.
      by_domain: int64 [R, J, M], the same by domain of the source.
      load: int64 [R], executed by each rank.
      inter_in: int64 [R], received from other domains.
      inter_out: int64 [R], sent to other domains.
      level: the largest `Context.level` of a rank's load.
      inter: the most that a rank receives from or sends to other domains.
      total_inter: all rows that leave their domain.
    """

    rows: np.ndarray
    by_domain: np.ndarray
    load: np.ndarray
    inter_in: np.ndarray
    inter_out: np.ndarray
    level: int
    inter: int
    total_inter: int

    @classmethod
    def of(cls, context: Context, state: State) -> "Measure":
        """Adds up the quotas."""
        rows = state.rows()
        by_domain = np.stack([state.quota[ranks].sum(axis=0) for ranks in context.members], axis=2)
        load = rows.sum(axis=1)
        inter = state.quota.sum(axis=2) * context.problem.topology.crosses_domains()  # [source, rank]
        inter_in, inter_out = inter.sum(axis=0), inter.sum(axis=1)
        return cls(
            rows=rows,
            by_domain=by_domain,
            load=load,
            inter_in=inter_in,
            inter_out=inter_out,
            level=max(context.level(rank, rows) for rank, rows in enumerate(load.tolist())),
            inter=int(max(inter_in.max(), inter_out.max())),
            total_inter=int(inter.sum()),
        )
