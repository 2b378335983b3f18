"""Lets busy ranks spill over to ranks with room: by interval overlap, in one step, however many ranks there are."""

import dataclasses

import numpy as np

from topoep_jax.plan.topoep.apportion import common_length
from topoep_jax.plan.topoep.facts import NOWHERE, Facts, share
from topoep_jax.plan.topoep.state import Plans


@dataclasses.dataclass
class Intervals:
    """Things of C plans laid end to end, each scope on a line of its own.

    Attributes:
      index: int64 [C, n], what lies there, in order.
      scope: int64 [C, n], its line.
      start: int64 [C, n].
      end: int64 [C, n].
    """

    index: np.ndarray
    scope: np.ndarray
    start: np.ndarray
    end: np.ndarray

    @classmethod
    def of(cls, length: np.ndarray, scope: np.ndarray, *order: np.ndarray) -> "Intervals":
        """Lays things of `length` (int64 [C, n]) on the lines `scope` (int64 [n]).

        They lie by `order` (each int64 [C, n], the first is decisive), then longest first, then by index.
        """
        scope = np.broadcast_to(scope, length.shape)
        index = np.lexsort((-length, *reversed(order), scope), axis=1)
        length, scope = np.take_along_axis(length, index, axis=1), np.take_along_axis(scope, index, axis=1)
        end = length.cumsum(axis=1)
        lines = np.zeros((len(length), int(scope.max(initial=0)) + 1), np.int64)
        np.add.at(lines, (np.arange(len(length))[:, None], scope), length)
        before = lines.cumsum(axis=1) - lines
        end = end - np.take_along_axis(before, scope, axis=1)
        return cls(index, scope, end - length, end)

    def without_empty(self) -> "Intervals":
        """Leaves out what has no length, as far as the plans allow."""
        order = np.argsort(self.start == self.end, axis=1, kind="stable")
        order = order[:, : int((self.start < self.end).sum(axis=1).max(initial=0))]
        return Intervals(
            *(np.take_along_axis(a, order, axis=1) for a in (self.index, self.scope, self.start, self.end))
        )


def spread(facts: Facts, plans: Plans, permille: np.ndarray) -> None:
    """Ranks above the fair load by more than `permille` (int64 [C]) spill over: anywhere, in their domain, anywhere."""
    target = share((facts.fair * (1000 + permille) // 1000)[:, None], facts.speed)
    anywhere = np.zeros_like(facts.domain)
    for scope in (anywhere, facts.domain, anywhere):
        _spill_over(facts, plans, target, scope)
        plans.free_idle_slots()


def _spill_over(facts: Facts, plans: Plans, target: np.ndarray, scope: np.ndarray) -> None:
    """One pass: what is above `target` (int64 [C, R]) moves to ranks below it that share the scope (int64 [R])."""
    instances, mains = plans.quota.shape[3], facts.problem.mains_per_rank
    rows = plans.rows()
    load = rows.sum(axis=2)
    free = plans.slot_expert == NOWHERE
    spare = np.where(free.any(axis=2), np.maximum(target - load, 0), 0)
    spill = _spill(rows, target)
    excess = np.broadcast_to(-spill.sum(axis=2, keepdims=True), spill.shape)
    giver = np.broadcast_to(np.arange(facts.num_ranks)[:, None], spill.shape)
    spill, excess, giver = (a.reshape(len(plans), -1) for a in (spill, excess, giver))
    items = Intervals.of(spill, scope.repeat(instances), excess, giver).without_empty()
    receivers = Intervals.of(spare, scope).without_empty()
    if items.index.size == 0 or receivers.index.size == 0:
        return
    each = np.arange(len(plans))[:, None]
    rank, instance = np.divmod(items.index, instances)
    expert = plans.experts()[each, rank, instance]  # [C, items]
    receiver = receivers.index  # [C, receivers]

    offer = common_length(items.start, items.end, receivers.start, receivers.end)  # [C, items, receivers]
    holds = plans.instance_of(facts.num_experts)[each[..., None], receiver[:, None], expert[..., None]] != NOWHERE
    domain = facts.domain[receiver][:, None]
    legal = (facts.home[expert][..., None] == domain) | facts.pays[domain, expert[..., None]]
    same_scope = items.scope[..., None] == receivers.scope[:, None]
    offer[~(same_scope & legal & ~holds)] = 0

    accepted = np.zeros_like(offer)
    slot_of = np.zeros_like(offer)
    free_slots = np.argsort(~free, axis=2, kind="stable")
    num_free = free.sum(axis=2)
    for n in range(int(num_free.max(initial=0))):
        best = offer.argmax(axis=1)  # [C, receivers]
        amount = np.take_along_axis(offer, best[:, None], axis=1)[:, 0]
        plan, position = np.nonzero((amount > 0) & (np.take_along_axis(num_free, receiver, axis=1) > n))
        if plan.size == 0:
            break
        item = best[plan, position]
        accepted[plan, item, position] = amount[plan, position]
        slot_of[plan, item, position] = free_slots[plan, receiver[plan, position], n]
        same_expert = expert[plan] == expert[plan, item][:, None]
        offer[plan, :, position] = np.where(same_expert, 0, offer[plan, :, position])

    plan, item = np.nonzero(accepted.any(axis=2))
    at = (plan, rank[plan, item], instance[plan, item])
    plans.hand_out(*at, accepted[plan, item], receiver[plan], mains + slot_of[plan, item])


def _spill(rows: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Rows of each instance above its rank's target, int64 [C, R, J]: a rank keeps its smallest instances whole."""
    order = np.argsort(rows, axis=2, kind="stable")
    ordered = np.take_along_axis(rows, order, axis=2)
    end = ordered.cumsum(axis=2)
    above = np.maximum(end - target[..., None], 0) - np.maximum(end - ordered - target[..., None], 0)
    result = np.zeros_like(rows)
    np.put_along_axis(result, order, above, axis=2)
    return result
