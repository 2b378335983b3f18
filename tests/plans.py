"""Random legal plans: any placement, any split. Harder on the layer than what a planner would choose."""

import numpy as np


def random_demand(rng, num_ranks, num_experts, assignments_per_rank):
    """int32 [R, E]: the same number of assignments from each rank, some experts unpopular, some without any."""
    popularity = rng.dirichlet(np.full(num_experts, 0.3))
    return rng.multinomial(assignments_per_rank, popularity, size=num_ranks).astype(np.int32)


def random_plan(rng, omega, num_slots):
    """(slot_expert [R, N], quota [R, R, J]) that conserves `omega`; slots are filled at random, some stay empty."""
    num_ranks, num_experts = omega.shape
    mains = num_experts // num_ranks
    slot_expert = np.full((num_ranks, num_slots), -1, np.int32)
    wanted = np.flatnonzero(omega.sum(0))
    for rank in range(num_ranks):
        foreign = wanted[wanted // mains != rank]
        count = min(rng.integers(num_slots + 1), len(foreign))
        slot_expert[rank, :count] = np.sort(rng.choice(foreign, count, replace=False))
    quota = np.zeros((num_ranks, num_ranks, mains + num_slots), np.int32)
    for expert in wanted:
        holders = [(expert // mains, expert % mains)]
        holders += [(rank, mains + slot) for rank, slot in np.argwhere(slot_expert == expert)]
        for source in range(num_ranks):
            parts = rng.multinomial(omega[source, expert], rng.dirichlet(np.ones(len(holders))))
            for (rank, instance), part in zip(holders, parts, strict=True):
                quota[source, rank, instance] = part
    return slot_expert, quota
