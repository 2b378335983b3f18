"""One plan under construction; xla_ffi/plan/topoep/state.h is the same in C++."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from topoep_jax.plan.finish import fill_slots
from topoep_jax.plan.problem import Draft
from topoep_jax.plan.topoep.apportion import apportion
from topoep_jax.plan.topoep.context import NOWHERE, Context
from topoep_jax.plan.types import Plan, unpriced


class Taker(NamedTuple):
    """A free slot that takes over rows of an instance."""

    rows: int
    rank: int
    slot: int


@dataclasses.dataclass
class State:
    """One plan under construction; its slots are in no order and may be free anywhere, until `finish` sorts them.

    The instances of a rank are its P mains, then its N slots.

    Attributes:
      slot_expert: int64 [R, N], `NOWHERE` where a slot is free.
      quota: int64 [R, R, J], rows by [source, rank, instance].
    """

    slot_expert: np.ndarray
    quota: np.ndarray

    @classmethod
    def empty(cls, context: Context) -> "State":
        """The plan without replicas: every expert runs on its main rank alone."""
        quota = np.zeros((context.ranks, context.ranks, context.instances), np.int64)
        quota[..., : context.mains] = context.omega.reshape(context.ranks, context.ranks, context.mains)
        return cls(np.full((context.ranks, context.slots), NOWHERE, np.int64), quota)

    @classmethod
    def of(cls, context: Context, draft: Draft) -> "State":
        """The plan of a draft that moves no main; slots in ascending order, those without rows left out."""
        plan = fill_slots(draft, context.problem)
        return cls(np.asarray(plan.slot_expert, np.int64), np.asarray(plan.quota, np.int64))

    def plan(self) -> Plan:
        """The plan as it is, unpriced."""
        return unpriced(self.slot_expert, self.quota)

    def copy(self) -> "State":
        """A plan of its own."""
        return State(self.slot_expert.copy(), self.quota.copy())

    @property
    def mains(self) -> int:
        """P."""
        return self.quota.shape[2] - self.slot_expert.shape[1]

    def rows(self) -> np.ndarray:
        """int64 [R, J], rows of each instance."""
        return self.quota.sum(axis=0)

    def experts(self) -> np.ndarray:
        """int64 [R, J], expert of each instance, `NOWHERE` for a free slot."""
        own = np.arange(self.slot_expert.shape[0] * self.mains).reshape(-1, self.mains)
        return np.concatenate([own, self.slot_expert], axis=1)

    def instance_of(self, rank: int, expert: int) -> int:
        """The instance of an expert on a rank, or `NOWHERE`."""
        if expert // self.mains == rank:
            return expert % self.mains
        held = self.slot_expert[rank].tolist()
        return self.mains + held.index(expert) if expert in held else NOWHERE

    def free_slots(self, rank: int) -> list[int]:
        """The free slots of a rank, ascending."""
        return [slot for slot, expert in enumerate(self.slot_expert[rank].tolist()) if expert == NOWHERE]

    def drop_idle(self) -> None:
        """Frees the slots without rows: they would be pulled for nothing."""
        self.slot_expert[self.rows()[:, self.mains :] == 0] = NOWHERE

    def hand_out(self, rank: int, instance: int, takers: Sequence[Taker]) -> None:
        """Gives rows of an instance to free slots, and its sources to all alike.

        What its sources give (by rank) is apportioned to the takers in their order, and last to what stays.
        """
        given = self.quota[:, rank, instance]
        taken = [taker.rows for taker in takers]
        parts = apportion(given, np.array([*taken, given.sum() - sum(taken)]))
        expert = self.experts()[rank, instance]
        self.quota[:, rank, instance] = parts[:, -1]
        for taker, part in zip(takers, parts.T, strict=False):
            self.slot_expert[taker.rank, taker.slot] = expert
            self.quota[:, taker.rank, self.mains + taker.slot] = part
