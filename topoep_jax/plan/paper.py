"""The paper's two-stage planner (section 4.3); xla_ffi/plan/paper.h is the same in C++.

Every tie is written down: the lower index wins.
"""

import numpy as np

from topoep_jax.plan.problem import Draft, Problem, none


def paper_plan(omega: np.ndarray, problem: Problem) -> Draft:
    """The plan of the paper's two-stage solver (arXiv 2609.35481, section 4.3), for demand omega (int64 [R, E]).

    Stage 1 gives each domain replicas of the remote experts it demands most, as long as a pull is cheaper than the
    tokens it saves. Demand is then split evenly over the instances in the source's domain, or over all instances.
    Stage 2 lets the busiest rank of each domain shed rows to its neighbours, half of the gap at a time.
    """
    return draft_and_moves(omega, problem)[0]


def draft_and_moves(omega: np.ndarray, problem: Problem) -> tuple[Draft, int]:
    """The same, and how many moves of stage 2 follow one another: the most that a domain makes."""
    used = np.zeros(problem.topology.num_ranks, np.int64)
    holds = none(omega, problem).holds
    for domain in range(problem.topology.num_domains):
        place_remote_experts(domain, omega, problem, holds, used)
    draft = Draft(holds, split_evenly(omega, problem, holds))
    load = draft.quota.sum(axis=2).T  # [R, E]
    moves = [shed_half_gaps(domain, problem, draft, load, used) for domain in range(problem.topology.num_domains)]
    return draft, max(moves)


def place_remote_experts(domain: int, omega: np.ndarray, problem: Problem, holds: np.ndarray, used: np.ndarray) -> None:
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


def split_evenly(omega: np.ndarray, problem: Problem, holds: np.ndarray) -> np.ndarray:
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


def shed_half_gaps(domain: int, problem: Problem, draft: Draft, load: np.ndarray, used: np.ndarray) -> int:
    """Stage 2 in one domain, move by move; says how many moves it made.

    `load` (int64 [R, E]) is the rows of each expert on each rank, and `used` (int64 [R]) the slots in use; both follow
    the draft. A replica that loses all its rows keeps its slot.
    """
    moves = 0
    while _shed_half_gap(domain, problem, draft, load, used):
        moves += 1
    return moves


def _shed_half_gap(domain: int, problem: Problem, draft: Draft, load: np.ndarray, used: np.ndarray) -> bool:
    """The busiest rank of `domain` gives rows of one expert to a neighbour; False if it cannot.

    At most half of the gap moves. Preferred are large moves, then light targets, then targets that already hold the
    expert, then pulls inside the domain, then low rank and expert.
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
    main_is_here = np.isin(problem.main_rank()[expert], ranks)
    pull = np.where(draft.holds[ranks[target], expert], 0, np.where(main_is_here, 1, 2))
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
