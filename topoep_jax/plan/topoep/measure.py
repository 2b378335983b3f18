"""What the quotas of a plan add up to; xla_ffi/plan/topoep/measure.h is the same in C++."""

import numpy as np

from topoep_jax.plan.topoep.context import Context
from topoep_jax.plan.topoep.state import State


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

    def __init__(self, context: Context, state: State) -> None:
        """Adds up the quotas."""
        self.rows = state.rows()
        self.by_domain = np.stack([state.quota[ranks].sum(axis=0) for ranks in context.members], axis=2)
        self.load = self.rows.sum(axis=1)
        inter = state.quota.sum(axis=2) * context.problem.topology.crosses_domains()  # [source, rank]
        self.inter_in, self.inter_out = inter.sum(axis=0), inter.sum(axis=1)
        self.level = max(context.level(rank, load) for rank, load in enumerate(self.load.tolist()))
        self.inter = int(max(self.inter_in.max(), self.inter_out.max()))
        self.total_inter = int(inter.sum())
