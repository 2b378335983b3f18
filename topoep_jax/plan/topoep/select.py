"""Which remote experts each domain serves itself; xla_ffi/plan/topoep/select.h is the same in C++."""

import dataclasses

import numpy as np

from topoep_jax.plan.topoep.context import Context
from topoep_jax.plan.topoep.effort import SIXTEENTHS, Candidate, served_experts


@dataclasses.dataclass(frozen=True)
class Selection:
    """What each domain executes: its own experts, for all who do not serve them themselves, and remote ones for itself.

    Attributes:
      selected: for each domain the remote experts that it serves, most rows first.
      served: bool [M, E], the same.
      home_rows: int64 [E], rows that stay with the main's domain.
      domain_rows: int64 [M], rows that each domain executes.
    """

    selected: tuple[tuple[int, ...], ...]
    served: np.ndarray
    home_rows: np.ndarray
    domain_rows: np.ndarray


def select(context: Context, candidate: Candidate) -> Selection:
    """Each domain takes the first K_d (`served_experts`) of its pairs that their main rank lets go.

    A main rank lets its best pairs go, at most `own` of them, and each only while the rows that it would still receive
    from other domains, were all better pairs taken, are above floor(`inbound` x mean / 16), or `inbound` is 0.
    """
    target = -1 if candidate.inbound == 0 else context.mean_inbound * candidate.inbound // SIXTEENTHS
    left = context.inbound[context.main_rank] - context.before  # [M, E], rows that the main rank still receives
    let_go = (context.place < candidate.own) & (left > target)
    most = served_experts(context.problem.topology, context.slots, candidate.sixteenths)
    selected = tuple(
        tuple(expert for expert in ranked if let_go[domain, expert])[: most[domain]]
        for domain, ranked in enumerate(context.ranked)
    )
    served = np.zeros(context.demand.shape, bool)
    for domain, experts in enumerate(selected):
        served[domain, list(experts)] = True
    rows = context.demand * served
    home_rows = context.total - rows.sum(axis=0)
    domain_rows = rows.sum(axis=1)
    np.add.at(domain_rows, context.home, home_rows)
    return Selection(selected, served, home_rows, domain_rows)
