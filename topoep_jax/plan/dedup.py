"""Which rows cross a link when a token crosses to a domain once, however many of its experts run there.

After PlaceMoE's exact token replay: a sum over pairs of experts cannot tell how many tokens share a domain, so the
tokens themselves are followed.
"""

import numpy as np

from topoep_jax.topology import Topology


def matches_demand(expert_idx: np.ndarray, omega: np.ndarray) -> bool:
    """Whether the tokens (int [R, T, K], -1 for padding) hold each expert as often as `omega` (int [R, E]) says."""
    num_experts = omega.shape[1]
    if expert_idx.shape[0] != omega.shape[0] or (expert_idx < -1).any() or (expert_idx >= num_experts).any():
        return False
    counts = [np.bincount(chosen[chosen >= 0], minlength=num_experts) for chosen in expert_idx]
    return bool((np.stack(counts) == omega).all())


def executing_ranks(expert_idx: np.ndarray, slot_expert: np.ndarray, quota: np.ndarray) -> np.ndarray:
    """The rank that executes each assignment, int64 [R, T, K]; -1 for padding.

    A source's assignments to an expert are numbered in token order (by token, then by k); the instances of the expert,
    in ascending rank, take their quotas of them one after the other.

    Args:
      expert_idx: int [R, T, K], the experts of every token of every source rank; -1 for padding.
      slot_expert: int [R, N], the plan's replicas.
      quota: int [R, R, J], the plan's quotas; `expert_idx` must have the demand that they conserve.

    Raises:
      ValueError: a source's demand for an expert differs from its quotas.
    """
    num_ranks, _, instances = quota.shape
    mains = np.arange(num_ranks * (instances - slot_expert.shape[1])).reshape(num_ranks, -1)
    experts = np.concatenate([mains, slot_expert], axis=1)  # [R, J]
    rank, instance = np.nonzero(experts >= 0)
    by_expert = np.argsort(experts[rank, instance], kind="stable")  # within an expert, ranks still ascend
    rank, instance = rank[by_expert], instance[by_expert]
    expert = experts[rank, instance]

    result = np.full(expert_idx.shape, -1, np.int64)
    for source in range(num_ranks):
        chosen = expert_idx[source].ravel()
        valid = np.flatnonzero(chosen >= 0)
        in_order = valid[np.argsort(chosen[valid], kind="stable")]
        rows = quota[source, rank, instance]
        demand = np.bincount(chosen[valid], minlength=mains.size)
        served = np.bincount(expert, weights=rows, minlength=mains.size).astype(np.int64)
        if (demand != served).any():
            wrong = int(np.flatnonzero(demand != served)[0])
            raise ValueError(
                f"expert_idx[{source}] holds expert {wrong} {demand[wrong]} times, but its quotas sum to"
                f" {served[wrong]}: plan the histogram of expert_idx"
            )
        result[source].ravel()[in_order] = np.repeat(rank, rows)
    return result


def deduplicated_rows(
    expert_idx: np.ndarray, slot_expert: np.ndarray, quota: np.ndarray, topology: Topology
) -> np.ndarray:
    """Rows from one rank to another, int64 [R, R], when a token crosses to a domain once.

    For each token and each domain other than its source's where it executes: one row from the source to the lowest of
    the executing ranks there, and one row from that rank to each of the others. Inside the source's own domain: one row
    to each executing rank other than the source. Arguments and errors as in `executing_ranks`.
    """
    num_ranks = topology.num_ranks
    ranks = executing_ranks(expert_idx, slot_expert, quota)
    moved = np.zeros((num_ranks, num_ranks), np.int64)
    for source in range(num_ranks):
        token, k = np.nonzero(ranks[source] >= 0)
        runs = np.zeros((expert_idx.shape[1], num_ranks), bool)
        runs[token, ranks[source, token, k]] = True
        for domain in range(topology.num_domains):
            members = np.array(topology.ranks_of_domain(domain))
            here = runs[:, members]
            if source in members:
                moved[source, members] += here.sum(axis=0)
                moved[source, source] = 0
                continue
            here = here[here.any(axis=1)]
            first = here.argmax(axis=1)
            for position, rank in enumerate(members):
                entering = here[first == position]
                moved[source, rank] += len(entering)
                moved[rank, members] += entering.sum(axis=0)
                moved[rank, rank] = 0
    return moved
