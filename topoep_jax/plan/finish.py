"""The last step of every planner: slots in order, loads, status; xla_ffi/plan/finish.h is the same in C++."""

import dataclasses

import numpy as np

from topoep_jax.plan.cost import predict_ps, split_picoseconds
from topoep_jax.plan.problem import MAX_ROWS, Draft, Problem, none
from topoep_jax.plan.types import Plan, Status, unpriced


@dataclasses.dataclass(frozen=True)
class Worth:
    """What a plan is worth.

    Attributes:
      cost: picoseconds under the problem's objective.
      aligned: the most aligned rows of a rank.
      has_replicas: whether any slot is filled.
    """

    cost: int
    aligned: int
    has_replicas: bool

    def meets_cap(self, problem: Problem) -> bool:
        """Whether no rank exceeds `cap_rows` aligned rows; always true without a cap."""
        return problem.cap_rows is None or self.aligned <= problem.cap_rows


def worth_of(plan: Plan, problem: Problem) -> Worth:
    """Scores a plan; its own time and status are not read."""
    return Worth(
        cost=predict_ps(plan, problem),
        aligned=int(aligned_rows(plan, problem).max()),
        has_replicas=bool((np.asarray(plan.slot_expert) >= 0).any()),
    )


def aligned_rows(plan: Plan, problem: Problem) -> np.ndarray:
    """int64 [R]: rows of each rank, every instance rounded up to a multiple of `block_rows`."""
    rows = np.asarray(plan.quota).sum(axis=0, dtype=np.int64)
    return (-(-rows // problem.block_rows) * problem.block_rows).sum(axis=1)


def meets_cap(plan: Plan, problem: Problem) -> bool:
    """Whether no rank exceeds `cap_rows` aligned rows; always true without a cap."""
    return problem.cap_rows is None or int(aligned_rows(plan, problem).max()) <= problem.cap_rows


def finish(draft: Draft, omega: np.ndarray, problem: Problem) -> Plan:
    """Drops replicas without rows, fills slots in ascending expert id, and states load, predicted time and status."""
    plan = fill_slots(draft, problem)
    worth, empty = worth_of(plan, problem), worth_of(fill_slots(none(omega, problem), problem), problem)
    status = Status(0)
    if worth.meets_cap(problem):
        status |= Status.CAP_MET
    if not worth.has_replicas:
        status |= Status.EMPTY
    if empty.meets_cap(problem) and worth.cost > empty.cost:
        status |= Status.OVER_EMPTY_COST
    return plan._replace(predicted_ps=split_picoseconds(worth.cost), status=np.array(status, np.int32))


def is_bad(omega: np.ndarray) -> bool:
    """Whether demand is negative, or 2^31 or more in all."""
    return bool((omega < 0).any()) or int(omega.sum(dtype=np.int64)) > MAX_ROWS


def refuse(problem: Problem) -> Plan:
    """The answer to bad demand: no replica and no quota."""
    num_ranks, num_slots = problem.topology.num_ranks, problem.num_slots
    return Plan(
        slot_expert=np.full((num_ranks, num_slots), -1, np.int32),
        quota=np.zeros((num_ranks, num_ranks, problem.mains_per_rank + num_slots), np.int32),
        rank_load=np.zeros(num_ranks, np.int32),
        predicted_ps=np.zeros(2, np.int32),
        status=np.array(Status.BAD_INPUT | Status.EMPTY, np.int32),
    )


def fill_slots(draft: Draft, problem: Problem) -> Plan:
    """The slots, ascending, and quotas of a draft, unpriced; replicas without rows are left out."""
    num_ranks, mains = problem.topology.num_ranks, problem.mains_per_rank
    slot_expert = np.full((num_ranks, problem.num_slots), -1, np.int64)
    quota = np.zeros((num_ranks, num_ranks, mains + problem.num_slots), np.int64)
    main_rank = problem.main_rank()
    rows = draft.quota.sum(axis=2)  # [E, R]
    for rank in range(num_ranks):
        own = np.flatnonzero(main_rank == rank)
        replicas = np.flatnonzero(draft.holds[rank] & (main_rank != rank) & (rows[:, rank] > 0))
        slot_expert[rank, : replicas.size] = replicas
        served = np.concatenate([own, replicas])
        quota[:, rank, : served.size] = draft.quota[served, rank].T
    return unpriced(slot_expert, quota)


def draft_of(plan: Plan, problem: Problem) -> Draft:
    """The draft of a plan, so that plans of every implementation are scored and finished alike."""
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
