"""Why each copy of an expert is where it is: demand, traffic kept at home against the pull, and load taken over."""

import dataclasses

import numpy as np

from topoep_jax.plan.evaluate import Evaluation
from topoep_jax.plan.problem import Problem


@dataclasses.dataclass(frozen=True)
class Copy:
    """One instance of an expert away from its main rank.

    Attributes:
      expert: which.
      owner: the main rank, from which it comes.
      holder: the rank that executes it.
      demand: rows that the holder's domain has for the expert.
      rows: rows the copy executes, which the owner executes without copies.
      saved_bytes: bytes between domains that the copy avoids, dispatch and combine (negative: it causes them).
      pulled_bytes: parameters.
      crosses: whether the parameters cross domains.
      owner_load: load of the owner without copies, with them, and with all but this one, in units of the mean load.
      busiest_load: load of the busiest rank with all copies.
    """

    expert: int
    owner: int
    holder: int
    demand: int
    rows: int
    saved_bytes: int
    pulled_bytes: int
    crosses: bool
    owner_load: tuple[float, float, float]
    busiest_load: float

    @property
    def reason(self) -> str:
        """What the plan would lose if only this copy were missing."""
        reasons = ["traffic"] if self.crosses and self.saved_bytes > self.pulled_bytes else []
        reasons += ["load"] if self.owner_load[2] > self.busiest_load else []
        return " + ".join(reasons) or "neither"


def copies_of(plan: Evaluation, before: Evaluation, omega: np.ndarray, problem: Problem) -> dict[int, list[Copy]]:
    """The copies in each domain, most wanted experts first; `before` is the plan without copies."""
    topology, cost = problem.topology, problem.cost
    domain = np.array(topology.domain_of_rank)
    main_rank = problem.main_rank()
    mean_load = max(before.rank_load.mean(), 1)
    copies: dict[int, list[Copy]] = {d: [] for d in range(topology.num_domains)}
    for holder, slot in np.argwhere(plan.slot_expert >= 0).tolist():
        expert = int(plan.slot_expert[holder, slot])
        owner = int(main_rank[expert])
        rows = plan.quota[:, holder, problem.mains_per_rank + slot].astype(np.int64)
        at_home, at_owner = rows[domain == domain[holder]].sum(), rows[domain == domain[owner]].sum()
        crosses = bool(domain[owner] != domain[holder])
        copies[int(domain[holder])].append(
            Copy(
                expert=expert,
                owner=owner,
                holder=holder,
                demand=int(omega[domain == domain[holder], expert].sum()),
                rows=int(rows.sum()),
                # Rows of third domains cross in any case.
                saved_bytes=2 * cost.token_bytes * int(at_home - at_owner) if crosses else 0,
                pulled_bytes=cost.expert_bytes,
                crosses=crosses,
                owner_load=(
                    before.rank_load[owner] / mean_load,
                    plan.rank_load[owner] / mean_load,
                    (plan.rank_load[owner] + rows.sum()) / mean_load,
                ),
                busiest_load=plan.imbalance,
            )
        )
    return {d: sorted(group, key=lambda c: (-c.demand, c.expert, c.holder)) for d, group in copies.items()}
