"""Scores any draft with the same ruler, also those that no layer can run: moved mains, more replicas than slots."""

import dataclasses

import numpy as np

from topoep_jax.plan.cost import moved_bytes, predict_ps
from topoep_jax.plan.finish import aligned_rows, finish
from topoep_jax.plan.problem import Draft, Problem
from topoep_jax.plan.types import Plan, Status


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What reports say of a plan. Instances without rows do not count and are not pulled.

    Attributes:
      imbalance: max / mean rank load; 1 where there is no load.
      inter_domain: share of the assignments that are executed in another domain than their source's.
      replica: share executed by instances that are not on the expert's main rank.
      num_replicas: instances that are not on the expert's main rank.
      objective_ps: the bottleneck objective, whatever the planner aimed at.
      eq8_ps: Eq. 8 of the paper.
      worst_nic_bytes: most bytes between domains that one rank sends or receives in a forward pass: a row leaves its
        source at dispatch and its executing rank at combine; pulls go as `cost.pulls` schedules them.
      max_aligned_rows: most rows on a rank, each instance rounded up to `block_rows`.
      plan: the draft as a plan in NumPy, with as many slots as the problem or as the most replicas on a rank; its time
        and status are for the problem's objective and cap.
    """

    imbalance: float
    inter_domain: float
    replica: float
    num_replicas: int
    objective_ps: int
    eq8_ps: int
    worst_nic_bytes: int
    max_aligned_rows: int
    plan: Plan

    @property
    def status(self) -> Status:
        """The status of the plan."""
        return Status(int(self.plan.status))

    @property
    def rank_load(self) -> np.ndarray:
        """int32 [R], rows executed by each rank."""
        return np.asarray(self.plan.rank_load)


def evaluate(draft: Draft, omega: np.ndarray, problem: Problem) -> Evaluation:
    """Scores a draft for demand omega (int [R, E]).

    A main that is held elsewhere counts as a replica there, pulled from the main rank: the price of moving it.
    """
    away = draft.quota.sum(axis=2).T > 0  # [R, E]
    away[problem.main_rank(), np.arange(problem.num_experts)] = False
    wide = dataclasses.replace(problem, num_slots=max(problem.num_slots, int(away.sum(axis=1).max())))
    plan = finish(draft, omega, wide)
    quota = np.asarray(plan.quota)
    load = quota.sum(axis=(0, 2), dtype=np.int64)
    total = int(load.sum())
    rows = quota.sum(axis=2, dtype=np.int64)
    return Evaluation(
        imbalance=int(load.max()) * load.size / total if total else 1.0,
        inter_domain=int((rows * problem.topology.crosses_domains()).sum()) / max(total, 1),
        replica=int(quota[:, :, problem.mains_per_rank :].sum(dtype=np.int64)) / max(total, 1),
        num_replicas=int((plan.slot_expert >= 0).sum()),
        objective_ps=predict_ps(plan, dataclasses.replace(problem, objective="bottleneck")),
        eq8_ps=predict_ps(plan, dataclasses.replace(problem, objective="eq8")),
        worst_nic_bytes=int(nic_bytes(plan, problem).max()),
        max_aligned_rows=int(aligned_rows(plan, problem).max()),
        plan=plan,
    )


def nic_bytes(plan: Plan, problem: Problem) -> np.ndarray:
    """int64 [2, R]: bytes between domains that each rank sends and receives in a forward pass."""
    crosses = problem.topology.crosses_domains()
    rows, copies = (moved * crosses for moved in moved_bytes(plan, problem))
    dispatch_and_combine = rows + rows.T
    return np.stack([(dispatch_and_combine + copies).sum(axis=axis) for axis in (1, 0)])
