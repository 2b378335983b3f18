"""What each copy of an expert does: demand, traffic kept at home, load taken over, and the time without it."""

import dataclasses

import numpy as np

from topoep_jax.plan.cost import terms_ps
from topoep_jax.plan.evaluate import Evaluation
from topoep_jax.plan.problem import Problem
from topoep_jax.plan.types import Plan, unpriced


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
      crosses: whether the parameters cross domains.
      owner_load: load of the owner without copies and with them, in units of the mean load.
      grown_ps: by how much each term of the predicted time grows if this copy alone is removed and its rows go back to
        the owner; the sum is below 0 if the plan is faster without the copy.
    """

    expert: int
    owner: int
    holder: int
    demand: int
    rows: int
    saved_bytes: int
    crosses: bool
    owner_load: tuple[float, float]
    grown_ps: dict[str, int]

    @property
    def without_ps(self) -> int:
        """Predicted time without this copy, less the plan's."""
        return sum(self.grown_ps.values())

    @property
    def reason(self) -> str:
        """The term that grows most without the copy."""
        if self.without_ps <= 0:
            return "better without" if self.without_ps < 0 else "no effect"
        return max(self.grown_ps, key=lambda cause: self.grown_ps[cause])


def copies_of(plan: Evaluation, before: Evaluation, omega: np.ndarray, problem: Problem) -> dict[int, list[Copy]]:
    """The copies in each domain, most wanted experts first; `before` is the plan without copies."""
    topology, cost = problem.topology, problem.cost
    domain = np.array(topology.domain_of_rank)
    main_rank = problem.main_rank()
    slot_expert, quota = np.asarray(plan.plan.slot_expert), np.asarray(plan.plan.quota)
    terms = terms_ps(plan.plan, problem)
    mean_load = max(before.rank_load.mean(), 1)
    copies: dict[int, list[Copy]] = {d: [] for d in range(topology.num_domains)}
    for holder, slot in np.argwhere(slot_expert >= 0).tolist():
        expert = int(slot_expert[holder, slot])
        owner = int(main_rank[expert])
        rows = quota[:, holder, problem.mains_per_rank + slot].astype(np.int64)
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
                crosses=crosses,
                owner_load=(before.rank_load[owner] / mean_load, plan.rank_load[owner] / mean_load),
                grown_ps=_grown_ps(plan.plan, holder, slot, problem, terms),
            )
        )
    return {d: sorted(group, key=lambda c: (-c.demand, c.expert, c.holder)) for d, group in copies.items()}


def _grown_ps(plan: Plan, holder: int, slot: int, problem: Problem, terms: dict[str, int]) -> dict[str, int]:
    """Picoseconds by which each of the plan's `terms` grows without the copy in one slot."""
    mains = problem.mains_per_rank
    slot_expert, quota = np.array(plan.slot_expert), np.array(plan.quota)
    owner, main = divmod(int(slot_expert[holder, slot]), mains)
    slot_expert[holder, slot] = -1
    quota[:, owner, main] += quota[:, holder, mains + slot]
    quota[:, holder, mains + slot] = 0
    return {cause: ps - terms[cause] for cause, ps in terms_ps(unpriced(slot_expert, quota), problem).items()}
