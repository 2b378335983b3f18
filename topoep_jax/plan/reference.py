"""Planners in NumPy, written to be read: the ground truth that the native planners equal bit for bit.

Ties always go to the smaller index. While it plans, a planner works on a dense `Draft`; `finish` turns any draft into a
`Plan`, so slots, loads, predicted time and status have one definition.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from topoep_jax.plan.cost import MAX_ROWS, OBJECTIVES, CostModel, split_picoseconds
from topoep_jax.plan.types import Plan, Status
from topoep_jax.topology import Topology


@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything a planner is told besides the demand; static under jit, and valid (`api.solve_plan` checks it).

    Attributes:
      topology: the domain of each rank.
      cost: sizes and rates.
      num_experts: E, a multiple of R.
      num_slots: N, replica slots per rank.
      cap_rows: bound on a rank's aligned rows, or None.
      block_rows: the rows of an active instance are rounded up to a multiple of this.
      objective: key of `cost.OBJECTIVES`.
    """

    topology: Topology
    cost: CostModel
    num_experts: int
    num_slots: int
    cap_rows: int | None
    block_rows: int
    objective: str

    @property
    def mains_per_rank(self) -> int:
        """E/R."""
        return self.num_experts // self.topology.num_ranks

    def main_rank(self) -> np.ndarray:
        """The rank that owns each expert, int [E]."""
        return np.arange(self.num_experts) // self.mains_per_rank


@dataclasses.dataclass
class Draft:
    """A plan under construction.

    Attributes:
      holds: bool [R, E], whether a rank has an instance of an expert, its mains included.
      quota: int64 [E, R, R], rows of expert e executed by rank r for source rank s, indexed [e, r, s].
    """

    holds: np.ndarray
    quota: np.ndarray


Planner = Callable[[np.ndarray, Problem], Draft]


def none(omega: np.ndarray, problem: Problem) -> Draft:
    """The empty plan: every expert runs on its main rank alone."""
    num_ranks = problem.topology.num_ranks
    experts = np.arange(problem.num_experts)
    main = problem.main_rank()
    holds = np.zeros((num_ranks, problem.num_experts), bool)
    holds[main, experts] = True
    quota = np.zeros((problem.num_experts, num_ranks, num_ranks), np.int64)
    quota[experts, main] = omega.T
    return Draft(holds, quota)


def topoep_paper(omega: np.ndarray, problem: Problem) -> Draft:
    """The paper's two-stage solver (its section 4.3), with every tie written down.

    Stage 1 gives each domain replicas of the remote experts it demands most, as long as a pull is cheaper than the
    tokens it saves. Demand is then split evenly over the instances in the source's domain, or over all instances.
    Stage 2 lets the busiest rank of each domain shed rows to its neighbours, half of the gap at a time.
    """
    used = np.zeros(problem.topology.num_ranks, np.int64)
    holds = none(omega, problem).holds
    for domain in range(problem.topology.num_domains):
        _place_remote_experts(domain, omega, problem, holds, used)
    draft = Draft(holds, _split_evenly(omega, problem, holds))
    load = draft.quota.sum(axis=2).T  # [R, E]
    for domain in range(problem.topology.num_domains):
        while _shed_half_gap(domain, problem, draft, load, used):
            pass
    return draft


PLANNERS: dict[str, Planner] = {"none": none, "topoep_paper": topoep_paper}


def solve(omega: np.ndarray, problem: Problem, planner: str) -> Plan:
    """Plans `omega` (int32 [R, E]); bad demand gives `BAD_INPUT`, since a compiled program cannot raise."""
    omega = np.asarray(omega).astype(np.int64)
    if (omega < 0).any() or omega.sum() > MAX_ROWS:
        return refuse(problem)
    return finish(PLANNERS[planner](omega, problem), omega, problem)


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


def finish(draft: Draft, omega: np.ndarray, problem: Problem) -> Plan:
    """Drops replicas without rows, fills slots in ascending expert id, and states load, predicted time and status."""
    slot_expert, quota = _fill_slots(draft, problem)
    empty_slots, empty_quota = _fill_slots(none(omega, problem), problem)
    objective = OBJECTIVES[problem.objective]
    predicted = objective(slot_expert, quota, problem.topology, problem.cost)
    status = Status(0)
    if meets_cap(quota, problem):
        status |= Status.CAP_MET
    if (slot_expert < 0).all():
        status |= Status.EMPTY
    empty_predicted = objective(empty_slots, empty_quota, problem.topology, problem.cost)
    if meets_cap(empty_quota, problem) and predicted > empty_predicted:
        status |= Status.OVER_EMPTY_COST
    return Plan(
        slot_expert=slot_expert.astype(np.int32),
        quota=quota.astype(np.int32),
        rank_load=quota.sum(axis=(0, 2)).astype(np.int32),
        predicted_ps=split_picoseconds(predicted),
        status=np.array(status, np.int32),
    )


def aligned_rows(quota: np.ndarray, block_rows: int) -> np.ndarray:
    """int64 [R]: rows of each rank with every instance rounded up to `block_rows`; `quota` is [R, R, J]."""
    rows = quota.sum(axis=0, dtype=np.int64)
    return (-(-rows // block_rows) * block_rows).sum(axis=1)


def meets_cap(quota: np.ndarray, problem: Problem) -> bool:
    """Whether no rank exceeds `cap_rows` aligned rows; always true without a cap."""
    return problem.cap_rows is None or int(aligned_rows(quota, problem.block_rows).max()) <= problem.cap_rows


def _place_remote_experts(
    domain: int, omega: np.ndarray, problem: Problem, holds: np.ndarray, used: np.ndarray
) -> None:
    """Stage 1: the most demanded remote experts go to the ranks of `domain` with the fewest slots in use."""
    cost = problem.cost
    ranks = list(problem.topology.ranks_of_domain(domain))
    demand = omega[ranks].sum(axis=0)
    local = np.isin(problem.main_rank(), ranks)
    for expert in np.argsort(-demand, kind="stable"):
        if 2 * int(demand[expert]) * cost.token_bytes <= cost.expert_bytes:
            return
        if local[expert]:
            continue
        free = [r for r in ranks if used[r] < problem.num_slots]
        if not free:
            return
        rank = min(free, key=lambda r: (used[r], r))
        holds[rank, expert] = True
        used[rank] += 1


def _split_evenly(omega: np.ndarray, problem: Problem, holds: np.ndarray) -> np.ndarray:
    """Quotas [E, R, R]: each source's rows over the instances in its domain if there are any, else over all instances.

    The remainder goes to instances that start at a different place for each source, so that it does not pile up.
    """
    num_ranks = problem.topology.num_ranks
    same_domain = ~problem.topology.crosses_domains()
    source = np.arange(num_ranks)[:, None]
    quota = np.zeros((problem.num_experts, num_ranks, num_ranks), np.int64)
    for expert in range(problem.num_experts):
        nearby = holds[:, expert] & same_domain  # [source, rank]
        serves = np.where(nearby.any(axis=1, keepdims=True), nearby, holds[:, expert])
        count = serves.sum(axis=1, keepdims=True)
        position = serves.cumsum(axis=1) - 1
        base, remainder = np.divmod(omega[:, expert, None], count)
        share = base + ((position - source) % count < remainder)
        quota[expert] = np.where(serves, share, 0).T
    return quota


def _shed_half_gap(domain: int, problem: Problem, draft: Draft, load: np.ndarray, used: np.ndarray) -> bool:
    """Stage 2, one move: the busiest rank of `domain` gives rows of one expert to a neighbour; False if it cannot.

    `load` [R, E] is the rows of each expert on each rank. Preferred are large moves, then light targets, then targets
    that already hold the expert, then pulls over NVLink, then low rank and expert.
    """
    ranks = np.array(problem.topology.ranks_of_domain(domain))
    rank_load = load[ranks].sum(axis=1)
    busiest = ranks[np.argmax(rank_load)]
    half = (rank_load.max() - rank_load) // 2
    amount = np.minimum(load[busiest], half[:, None])  # [target, expert]
    feasible = draft.holds[ranks] | (used[ranks] < problem.num_slots)[:, None]
    target, expert = np.nonzero(feasible & (amount > 0))
    if target.size == 0:
        return False
    main_is_near = np.isin(problem.main_rank()[expert], ranks)
    pull = np.where(draft.holds[ranks[target], expert], 0, np.where(main_is_near, 1, 2))
    best = _first_smallest(-amount[target, expert], rank_load[target], pull)
    _move(ranks[target[best]], busiest, expert[best], amount[target[best], expert[best]], draft, load, used)
    return True


def _first_smallest(*keys: np.ndarray) -> int:
    """Index of the lexicographically smallest tuple of keys, the lowest index on a tie."""
    remaining = np.arange(keys[0].size)
    for key in keys:
        remaining = remaining[key[remaining] == key[remaining].min()]
    return int(remaining[0])


def _move(
    target: int, busiest: int, expert: int, amount: int, draft: Draft, load: np.ndarray, used: np.ndarray
) -> None:
    """Hands `amount` rows of `expert` from `busiest` to `target`, taken from its sources in ascending order."""
    if not draft.holds[target, expert]:
        draft.holds[target, expert] = True
        used[target] += 1
    available = draft.quota[expert, busiest]
    before = available.cumsum() - available
    taken = np.clip(amount - before, 0, available)
    draft.quota[expert, busiest] -= taken
    draft.quota[expert, target] += taken
    load[busiest, expert] -= amount
    load[target, expert] += amount


def _fill_slots(draft: Draft, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """`slot_expert` [R, N] and `quota` [R, R, J] of a draft."""
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
    return slot_expert, quota
