"""What several baselines need: how whole rows are split over instances and sources, exactly, low indices first."""

import numpy as np

from topoep_jax.plan.problem import Draft, Problem
from topoep_jax.plan.topoep.apportion import overlap


def split_evenly(total: np.ndarray, holds: np.ndarray) -> np.ndarray:
    """int64 [E, R]: `total` [E] rows over the ranks that hold each expert (`holds` bool [R, E]), low ranks first."""
    serves = holds.T
    count = serves.sum(axis=1, keepdims=True)
    base, remainder = np.divmod(total[:, None], np.maximum(count, 1))
    position = serves.cumsum(axis=1) - 1
    return np.where(serves, base + (position < remainder), 0)


def split_in_proportion(total: np.ndarray | int, weight: np.ndarray) -> np.ndarray:
    """int64 [..., n]: splits each `total` [...] like `weight` [..., n] by largest remainder, the lower index on a tie.

    Zero weights get nothing. Totals and sums of weights must stay below 2^31, so that products fit 64 bits.

    Raises:
      ValueError: there are rows to split, but every weight is zero.
    """
    total, weight = np.asarray(total, np.int64)[..., None], np.asarray(weight, np.int64)
    whole = weight.sum(axis=-1, keepdims=True)
    if ((whole == 0) & (total > 0)).any():
        raise ValueError(f"cannot split {total.max()} rows over weights that are all zero: give one of them a weight")
    share, remainder = np.divmod(total * weight, np.maximum(whole, 1))
    missing = total - share.sum(axis=-1, keepdims=True)
    place = np.argsort(np.argsort(-remainder, axis=-1, kind="stable"), axis=-1, kind="stable")
    split: np.ndarray = share + ((place < missing) & (whole > 0))
    return split


def quota_local_first(rows: np.ndarray, omega: np.ndarray, problem: Problem) -> np.ndarray:
    """int64 [E, R, R], as in `Draft`: who feeds each instance, when instance (e, r) executes `rows[e, r]` rows.

    A source's rows stay on its own rank as far as there is room, then in its own domain, then go anywhere; within each
    step low sources fill low ranks first. `omega` is [R, E].

    Raises:
      ValueError: the rows of an expert's instances do not sum to the demand for it.
    """
    supply, room = omega.T.astype(np.int64), rows.astype(np.int64)
    unequal = np.flatnonzero(supply.sum(axis=1) != room.sum(axis=1))
    if unequal.size:
        e = unequal[0]
        raise ValueError(
            f"expert {e} is demanded {supply[e].sum()} times, but its instances execute {room[e].sum()} rows: the sums"
            " must be equal"
        )
    ranks = np.arange(problem.topology.num_ranks)
    quota: np.ndarray = np.zeros((problem.num_experts, ranks.size, ranks.size), np.int64)
    own = np.minimum(supply, room)
    quota[:, ranks, ranks] = own
    supply, room = supply - own, room - own
    for domain in range(problem.topology.num_domains):
        near = np.array(problem.topology.ranks_of_domain(domain))
        taken = overlap(room[:, near], supply[:, near])
        quota[:, near[:, None], near] += taken
        supply[:, near] -= taken.sum(axis=1)
        room[:, near] -= taken.sum(axis=2)
    quota += overlap(room, supply)
    return quota


def draft_of_rows(rows: np.ndarray, omega: np.ndarray, problem: Problem) -> Draft:
    """The draft in which instance (e, r) executes `rows[e, r]` rows, near sources first; only these and mains exist."""
    return draft_of_quota(quota_local_first(rows, omega, problem), problem)


def quota_in_proportion(moved: np.ndarray, omega: np.ndarray, problem: Problem) -> np.ndarray:
    """int64 [E, R, R], as in `Draft`: every source gives its share of the `moved` [E, R] rows of each replica.

    Shares are rounded down; what is left over goes from low sources to low ranks. `moved` is zero at the main, which
    executes the rest. `omega` is [R, E].
    """
    supply = omega.T.astype(np.int64)
    whole = np.maximum(supply.sum(axis=1), 1)[:, None, None]
    quota: np.ndarray = moved[:, :, None] * supply[:, None, :] // whole
    quota += overlap(moved - quota.sum(axis=2), supply - quota.sum(axis=1))
    quota[np.arange(problem.num_experts), problem.main_rank()] += supply - quota.sum(axis=1)
    return quota


def draft_of_quota(quota: np.ndarray, problem: Problem) -> Draft:
    """The draft whose replicas are the instances that execute rows; mains stay where they are."""
    is_main = problem.main_rank() == np.arange(problem.topology.num_ranks)[:, None]
    return Draft(is_main | (quota.sum(axis=2).T > 0), quota)


def spilled_rows(load: np.ndarray, num_ranks: int, capacity: float) -> np.ndarray:
    """[E], in the dtype of `capacity`: rows that do not fit each expert's home rank, lighter experts served first."""
    local = load.reshape(num_ranks, -1)
    order = np.argsort(local, axis=1, kind="stable")
    above = np.maximum(np.take_along_axis(local, order, axis=1).cumsum(axis=1) - capacity, 0)
    spilled = np.zeros_like(above)
    np.put_along_axis(spilled, order, np.diff(above, axis=1, prepend=0), axis=1)
    return spilled.ravel()
