"""Scores any draft with the same ruler, also those that no layer can run: moved mains, more replicas than slots."""

import dataclasses

import numpy as np

from topoep_jax.plan import pulls
from topoep_jax.plan.cost import OBJECTIVES, rank_compute_ps, row_traffic
from topoep_jax.plan.links import busiest_direction, everything, link_ps
from topoep_jax.plan.problem import Draft, Problem, aligned_rows
from topoep_jax.plan.reference import finish
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
      status: as in `Plan.status`, for the problem's cap and objective.
      slot_expert: int32 [R, n], the replicas of each rank ascending, then -1; n is N or the most replicas on a rank.
      quota: int32 [R, R, E/R + n], rows by [source, rank, instance].
    """

    imbalance: float
    inter_domain: float
    replica: float
    num_replicas: int
    objective_ps: int
    eq8_ps: int
    worst_nic_bytes: int
    max_aligned_rows: int
    status: Status
    slot_expert: np.ndarray
    quota: np.ndarray

    @property
    def rank_load(self) -> np.ndarray:
        """int64 [R], rows executed by each rank."""
        return self.quota.sum(axis=(0, 2), dtype=np.int64)


def evaluate(draft: Draft, omega: np.ndarray, problem: Problem) -> Evaluation:
    """Scores a draft for demand omega (int [R, E]).

    A main that is held elsewhere counts as a replica there, pulled from the main rank: the price of moving it.
    """
    away = draft.quota.sum(axis=2).T > 0  # [R, E]
    away[problem.main_rank(), np.arange(problem.num_experts)] = False
    num_slots = max(problem.num_slots, int(away.sum(axis=1).max()))
    plan = finish(draft, omega, dataclasses.replace(problem, num_slots=num_slots))
    slot_expert, quota = np.asarray(plan.slot_expert), np.asarray(plan.quota)
    load = quota.sum(axis=(0, 2), dtype=np.int64)
    total = int(load.sum())
    rows = quota.sum(axis=2, dtype=np.int64)
    priced = {name: cost(slot_expert, quota, problem.topology, problem.cost) for name, cost in OBJECTIVES.items()}
    return Evaluation(
        imbalance=int(load.max()) * load.size / total if total else 1.0,
        inter_domain=int((rows * problem.topology.crosses_domains()).sum()) / max(total, 1),
        replica=int(quota[:, :, problem.mains_per_rank :].sum(dtype=np.int64)) / max(total, 1),
        num_replicas=int((slot_expert >= 0).sum()),
        objective_ps=priced["bottleneck"],
        eq8_ps=priced["eq8"],
        worst_nic_bytes=int(nic_bytes(slot_expert, quota, problem).max()),
        max_aligned_rows=int(aligned_rows(quota, problem.block_rows).max()),
        status=Status(int(plan.status)),
        slot_expert=slot_expert,
        quota=quota,
    )


def nic_bytes(slot_expert: np.ndarray, quota: np.ndarray, problem: Problem) -> np.ndarray:
    """int64 [2, R]: bytes between domains that each rank sends and receives in a forward pass."""
    crosses = problem.topology.crosses_domains()
    rows, copies = (moved * crosses for moved in _moved_bytes(slot_expert, quota, problem))
    dispatch_and_combine = rows + rows.T
    return np.stack([(dispatch_and_combine + copies).sum(axis=axis) for axis in (1, 0)])


def terms_ps(slot_expert: np.ndarray, quota: np.ndarray, problem: Problem) -> dict[str, int]:
    """The predicted picoseconds of `problem.objective` by cause; they sum to it."""
    cost, crosses = problem.cost, problem.topology.crosses_domains()
    reduce = {"bottleneck": busiest_direction, "eq8": everything}[problem.objective]
    rows, copies = _moved_bytes(slot_expert, quota, problem)
    away = ~np.eye(problem.topology.num_ranks, dtype=bool)
    terms = {"expert compute": int(rank_compute_ps(quota.sum(axis=0, dtype=np.int64), cost).max())}
    for what, moved in (("rows", 2 * rows), ("pulls", copies)):
        terms[f"{what} between domains"] = link_ps(reduce(moved * crosses), cost.inter_fs_per_byte)
        terms[f"{what} inside a domain"] = link_ps(reduce(moved * (away & ~crosses)), cost.intra_fs_per_byte)
    return terms


def _moved_bytes(slot_expert: np.ndarray, quota: np.ndarray, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """int64 [R, R] twice: bytes of rows from source to executing rank at dispatch, and of pulled parameters."""
    topology, cost = problem.topology, problem.cost
    copies = pulls.schedule(slot_expert, problem.mains_per_rank, topology, cost)
    rows = cost.token_bytes * row_traffic(quota)
    return rows, pulls.moved_bytes(copies, topology, cost)


def draft_of(plan: Plan, problem: Problem) -> Draft:
    """The draft of a finished plan, so that plans of every implementation are scored alike."""
    slot_expert, quota = np.asarray(plan.slot_expert), np.asarray(plan.quota)
    num_ranks, mains = problem.topology.num_ranks, problem.mains_per_rank
    held = np.concatenate([np.arange(problem.num_experts).reshape(num_ranks, mains), slot_expert], axis=1)
    rank, instance = np.nonzero(held >= 0)
    expert = held[rank, instance]
    draft = Draft(
        holds=np.zeros((num_ranks, problem.num_experts), bool),
        quota=np.zeros((problem.num_experts, num_ranks, num_ranks), np.int64),
    )
    draft.holds[rank, expert] = True
    draft.quota[expert, rank] = quota[:, rank, instance].T
    return draft
