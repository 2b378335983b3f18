"""Random legal plans: any placement, any split. Harder on the layer than what a planner would choose."""

import dataclasses

import numpy as np

from topoep_jax.plan.problem import CostModel, Problem
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


PLAN_KINDS = ("any", "slots_hot", "one_rank", "no_replica", "balanced", "brim")
"""Of `many_plans`: any loads; nothing on mains; all rows on one rank; no slot in use; equal loads; a load that fills
the cap to the last block, or exceeds it by one."""


def many_plans(rng, config, num_assignments, count):
    """(omega [P, R, E], slot_expert [P, R, N], quota [P, R, R, J]): the kinds of PLAN_KINDS in turn; int32."""
    num_ranks, num_slots, num_instances = config.num_ranks, config.num_slots, config.num_instances
    mains = np.arange(config.num_experts).reshape(num_ranks, -1)
    foreign = np.stack([np.setdiff1d(mains, mains[rank]) for rank in range(num_ranks)])
    drawn = rng.random((count, *foreign.shape)).argsort(2)[:, :, :num_slots]
    slot_expert = np.take_along_axis(np.broadcast_to(foreign, (count, *foreign.shape)), drawn, 2).astype(np.int32)
    kind = np.asarray(PLAN_KINDS)[np.arange(count) % len(PLAN_KINDS)]
    slot_expert[kind == "no_replica"] = -1

    share = rng.gamma(np.exp(rng.uniform(-3, 3, (count, 1, 1))), size=(count, num_ranks, num_instances)) + 1e-9
    share[kind == "slots_hot", :, : config.num_mains] = 0
    share[kind == "no_replica", :, config.num_mains :] = 0
    share[kind == "one_rank"] *= np.eye(num_ranks)[rng.integers(num_ranks, size=(kind == "one_rank").sum())][:, :, None]
    share[kind == "balanced"] /= share[kind == "balanced"].sum(2, keepdims=True)
    share = share.reshape(count, 1, -1)
    # All tokens, or some of them, or next to none.
    used = rng.binomial(num_assignments, rng.choice([1.0, 0.7, 0.05], (count, 1)), (count, num_ranks))
    quota = rng.multinomial(used, share / share.sum(2, keepdims=True))
    quota = quota.reshape(count, num_ranks, num_ranks, num_instances).astype(np.int32)
    for i in np.flatnonzero(kind == "brim"):
        quota[i] = _brim_quota(rng, config, num_assignments, extra_blocks=int(rng.integers(2)))

    held = np.concatenate([np.broadcast_to(mains, (count, *mains.shape)), slot_expert], 2).reshape(count, -1)
    omega = np.zeros((count, num_ranks, config.num_experts), np.int32)
    by_instance = quota.reshape(count, num_ranks, -1)
    plan, source, instance = np.nonzero(by_instance)
    np.add.at(omega, (plan, source, held[plan, instance]), by_instance[plan, source, instance])
    return omega, slot_expert, quota


def _brim_quota(rng, config, num_assignments, extra_blocks):
    """int32 [R, R, J]: one rank holds exactly the cap in aligned rows, or a block more; the others hold nothing."""
    num_ranks, num_instances, block = config.num_ranks, config.num_instances, config.block_rows
    blocks = config.cap_rows(num_assignments) // block + extra_blocks
    share = rng.dirichlet(np.full(num_instances, 0.5))
    if rng.random() < 0.5:
        share[: config.num_mains] = 0
    blocks = rng.multinomial(blocks, share / share.sum())
    rows = np.where(blocks > 0, blocks * block - rng.integers(block, size=num_instances), 0)
    quota = np.zeros((num_ranks, num_ranks, num_instances), np.int32)
    rank = rng.integers(num_ranks)
    for source, part in enumerate(
        np.array_split(rng.permutation(np.repeat(np.arange(num_instances), rows)), num_ranks)
    ):
        quota[source, rank] = np.bincount(part, minlength=num_instances)
    assert quota.sum((1, 2)).max() <= num_assignments
    return quota


@dataclasses.dataclass(frozen=True)
class PricedPlan:
    """Demand, a plan for it and its price: `omega` [R, E], `slot_expert` [R, N] and `quota` [R, R, J]."""

    topology: Topology
    mains_per_rank: int
    omega: np.ndarray
    slot_expert: np.ndarray
    quota: np.ndarray
    cost: CostModel

    @property
    def num_experts(self) -> int:
        return self.topology.num_ranks * self.mains_per_rank

    def problem(self, objective: str) -> Problem:
        return Problem(self.topology, self.cost, self.num_experts, self.slot_expert.shape[1], None, 1, objective)

    def with_cost(self, **terms) -> "PricedPlan":
        return dataclasses.replace(self, cost=dataclasses.replace(self.cost, **terms))


def random_priced_plan(rng) -> PricedPlan:
    """Up to 8 ranks in any domains, skewed demand, and any sizes and rates."""
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
    return PricedPlan(Topology(tuple(number[d] for d in domains)), mains, omega, slot_expert, quota, cost)
