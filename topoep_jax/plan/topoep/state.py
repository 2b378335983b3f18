"""Many plans of one problem at once, with their slots in the order in which they were filled."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from topoep_jax.plan.problem import Draft, fill_slots
from topoep_jax.plan.topoep.apportion import apportion
from topoep_jax.plan.topoep.facts import NOWHERE, Facts


@dataclasses.dataclass
class Plans:
    """C plans under construction.

    Attributes:
      slot_expert: int64 [C, R, N], `NOWHERE` where a slot is free.
      quota: int64 [C, R, R, J], rows by [plan, source, rank, instance].
    """

    slot_expert: np.ndarray
    quota: np.ndarray

    @classmethod
    def empty(cls, facts: Facts, count: int) -> "Plans":
        """`count` times the empty plan."""
        num_ranks, mains, slots = facts.num_ranks, facts.problem.mains_per_rank, facts.problem.num_slots
        quota = np.zeros((count, num_ranks, num_ranks, mains + slots), np.int64)
        quota[..., :mains] = facts.omega.reshape(num_ranks, num_ranks, mains)
        return cls(np.full((count, num_ranks, slots), NOWHERE, np.int64), quota)

    @classmethod
    def of(cls, facts: Facts, draft: Draft) -> "Plans":
        """One plan from a draft that moves no main; slots in ascending order, those without rows left out."""
        plan = fill_slots(draft, facts.problem)
        return cls(np.asarray(plan.slot_expert, np.int64)[None], np.asarray(plan.quota, np.int64)[None])

    @classmethod
    def joined(cls, parts: Sequence["Plans"]) -> "Plans":
        """The plans of all `parts`, one after the other."""
        return cls(np.concatenate([p.slot_expert for p in parts]), np.concatenate([p.quota for p in parts]))

    def __len__(self) -> int:
        return len(self.slot_expert)

    def at(self, index: np.ndarray) -> "Plans":
        """A copy of the plans at `index`."""
        return Plans(self.slot_expert[index], self.quota[index])

    def put(self, index: np.ndarray, plans: "Plans") -> None:
        """Replaces the plans at `index`."""
        self.slot_expert[index] = plans.slot_expert
        self.quota[index] = plans.quota

    def rows(self) -> np.ndarray:
        """int64 [C, R, J], rows of each instance."""
        return self.quota.sum(axis=1)

    def experts(self) -> np.ndarray:
        """int64 [C, R, J], expert of each instance, mains first."""
        count, num_ranks, _ = self.slot_expert.shape
        mains = self.quota.shape[3] - self.slot_expert.shape[2]
        own = np.arange(num_ranks * mains).reshape(num_ranks, mains)
        return np.concatenate([np.broadcast_to(own, (count, num_ranks, mains)), self.slot_expert], axis=2)

    def instance_of(self, num_experts: int) -> np.ndarray:
        """int64 [C, R, E], which instance of a rank holds an expert, or `NOWHERE`."""
        experts = self.experts()
        result = np.full((*experts.shape[:2], num_experts), NOWHERE, np.int64)
        plan, rank, instance = np.nonzero(experts >= 0)
        result[plan, rank, experts[plan, rank, instance]] = instance
        return result

    def free_idle_slots(self) -> None:
        """Frees the slots without rows: they would be pulled for nothing."""
        mains = self.quota.shape[3] - self.slot_expert.shape[2]
        self.slot_expert[self.rows()[..., mains:] == 0] = NOWHERE

    def hand_out(
        self,
        plan: np.ndarray,
        rank: np.ndarray,
        instance: np.ndarray,
        rows: np.ndarray,
        to: np.ndarray,
        to_instance: np.ndarray,
    ) -> None:
        """Moves rows of n instances into free slots, apportioned over the sources; what is left stays.

        Args:
          plan: int64 [n].
          rank: int64 [n].
          instance: int64 [n], each (plan, rank, instance) at most once.
          rows: int64 [n, takers], 0 for none; of an instance, no more than it has.
          to: int64 [n, takers], ranks.
          to_instance: int64 [n, takers], their slots.
        """
        most = int((rows > 0).sum(axis=1).max(initial=0))
        some = np.argsort(rows == 0, axis=1, kind="stable")[:, :most]  # takers that take, in their order
        rows, to, to_instance = (np.take_along_axis(a, some, axis=1) for a in (rows, to, to_instance))
        quota = self.quota.transpose(0, 2, 3, 1)  # [C, R, J, source], a view
        given = quota[plan, rank, instance]
        stays = given.sum(axis=1) - rows.sum(axis=1)
        parts = apportion(given, np.concatenate([rows, stays[:, None]], axis=1))
        expert = self.experts()[plan, rank, instance]
        quota[plan, rank, instance] = parts[..., -1]
        n, taker = np.nonzero(rows)
        at = (plan[n], to[n, taker], to_instance[n, taker])
        quota[at] = parts[n, :, taker]
        mains = self.quota.shape[3] - self.slot_expert.shape[2]
        self.slot_expert[at[0], at[1], at[2] - mains] = expert[n]

    def draft(self, index: int, facts: Facts) -> Draft:
        """One of the plans as a draft."""
        experts = self.experts()[index]
        draft = Draft(
            np.zeros((facts.num_ranks, facts.num_experts), bool),
            np.zeros((facts.num_experts, facts.num_ranks, facts.num_ranks), np.int64),
        )
        rank, instance = np.nonzero(experts >= 0)
        expert = experts[rank, instance]
        draft.holds[rank, expert] = True
        draft.quota[expert, rank] = self.quota[index][:, rank, instance].T
        return draft
