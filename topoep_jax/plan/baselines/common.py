"""What several baselines need: who is near whom, and how whole rows are split over instances and sources."""

import numpy as np

from topoep_jax.plan.problem import Draft, Problem


def split_evenly(total: np.ndarray, holds: np.ndarray) -> np.ndarray:
    """int64 [E, R]: `total` [E] rows over the ranks that hold each expert (`holds` [R, E]), remainder to the lower rank."""
    serves = holds.T
    count = serves.sum(axis=1, keepdims=True)
    base, remainder = np.divmod(total[:, None], np.maximum(count, 1))
    position = serves.cumsum(axis=1) - 1
    return np.where(serves, base + (position < remainder), 0)


def split_in_proportion(total: int, weight: np.ndarray) -> np.ndarray:
    """int64 [n]: `total` split like `weight` [n] by largest remainder, the lower index first; zero weights share nothing.

    Exact in Python integers, so that no product overflows. All weights zero needs `total` zero.
    """
    weights = [int(w) for w in weight]
    whole = sum(weights)
    if whole == 0:
        if total:
            raise ValueError(f"cannot split {total} rows over weights that are all zero; give one of them a weight")
        return np.zeros(len(weights), np.int64)
    share = [total * w // whole for w in weights]
    remainder = [total * w % whole for w in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-remainder[i], i))
    for i in by_remainder[: total - sum(share)]:
        share[i] += 1
    return np.array(share, np.int64)


def overlap(supply: np.ndarray, room: np.ndarray) -> np.ndarray:
    """int64 [..., n, m]: lays `supply` [..., m] and `room` [..., n] end to end and returns what each pair has in common.

    That is the north-west corner rule: low suppliers fill low rooms first; all of the smaller total is matched.
    """
    supply_end, room_end = supply.cumsum(axis=-1), room.cumsum(axis=-1)
    end = np.minimum(supply_end[..., None, :], room_end[..., :, None])
    start = np.maximum((supply_end - supply)[..., None, :], (room_end - room)[..., :, None])
    return np.maximum(end - start, 0)


def quota_local_first(rows: np.ndarray, omega: np.ndarray, problem: Problem) -> np.ndarray:
    """int64 [E, R, R]: which source feeds each instance, when instance (e, r) executes `rows[e, r]` rows.

    A source's rows stay on its own rank as far as there is room, then in its own domain, then go anywhere; within each
    step low sources fill low ranks first. `rows` [E, R] must sum to the demand of every expert.
    """
    supply, room = omega.T.astype(np.int64), rows.astype(np.int64)
    unequal = np.flatnonzero(supply.sum(axis=1) != room.sum(axis=1))
    if unequal.size:
        e = unequal[0]
        raise ValueError(
            f"expert {e} has {supply[e].sum()} rows, but its instances execute {room[e].sum()}; make them equal"
        )
    ranks = np.arange(problem.topology.num_ranks)
    quota = np.zeros((problem.num_experts, ranks.size, ranks.size), np.int64)
    own = np.minimum(supply, room)
    quota[:, ranks, ranks] = own
    supply, room = supply - own, room - own
    for domain in range(problem.topology.num_domains):
        near = np.array(problem.topology.ranks_of_domain(domain))
        taken = overlap(supply[:, near], room[:, near])
        quota[:, near[:, None], near] += taken
        supply[:, near] -= taken.sum(axis=1)
        room[:, near] -= taken.sum(axis=2)
    quota += overlap(supply, room)
    return quota


def draft_of_rows(holds: np.ndarray, rows: np.ndarray, omega: np.ndarray, problem: Problem) -> Draft:
    """The draft in which instance (e, r) executes `rows[e, r]` rows, fed by near sources first; idle replicas are dropped.

    Mains stay where `holds` has them even without rows.
    """
    is_main = problem.main_rank() == np.arange(problem.topology.num_ranks)[:, None]
    return Draft(holds & (is_main | (rows.T > 0)), quota_local_first(rows, omega, problem))
