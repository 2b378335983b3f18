"""Random legal plans: any placement, any split. Harder on the layer than what a planner would choose."""

import dataclasses

import numpy as np

from topoep_jax.plan.cost import CostModel
from topoep_jax.topology import Topology


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


@dataclasses.dataclass(frozen=True)
class PricedPlan:
    """Tokens, a plan for them and its price: `expert_idx` [R, T, K], `slot_expert` [R, N] and `quota` [R, R, J]."""

    topology: Topology
    mains_per_rank: int
    expert_idx: np.ndarray
    slot_expert: np.ndarray
    quota: np.ndarray
    cost: CostModel

    @property
    def num_experts(self) -> int:
        return self.topology.num_ranks * self.mains_per_rank

    def with_cost(self, **terms) -> "PricedPlan":
        return dataclasses.replace(self, cost=dataclasses.replace(self.cost, **terms))


def random_priced_plan(rng) -> PricedPlan:
    """Up to 8 ranks in any domains, skewed tokens with padding, and any sizes and rates."""
    num_ranks = int(rng.integers(1, 9))
    domains = rng.integers(0, rng.integers(1, num_ranks + 1), num_ranks).tolist()
    number = {domain: i for i, domain in enumerate(dict.fromkeys(domains))}
    mains = int(rng.integers(1, 5))
    num_experts = num_ranks * mains

    popularity = np.exp(rng.normal(0, 2, num_experts))
    shape = (num_ranks, int(rng.integers(1, 30)), int(rng.integers(1, 5)))
    expert_idx = rng.choice(num_experts, shape, p=popularity / popularity.sum()).astype(np.int32)
    expert_idx[rng.random(shape) < 0.1] = -1
    omega = np.stack([np.bincount(chosen[chosen >= 0], minlength=num_experts) for chosen in expert_idx])

    slot_expert, quota = random_plan(rng, omega, int(rng.integers(0, min(4, num_experts - mains) + 1)))
    cost = CostModel(
        expert_bytes=int(rng.integers(1, 1000)),
        token_bytes=int(rng.integers(1, 20)),
        row_ps=int(rng.integers(0, 200)),
        inter_fs_per_byte=int(rng.integers(0, 30_000)),
        intra_fs_per_byte=int(rng.integers(0, 6_000)),
    )
    return PricedPlan(Topology(tuple(number[d] for d in domains)), mains, expert_idx, slot_expert, quota, cost)
