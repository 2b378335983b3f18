"""From rows of instances to quotas: which source's rows each instance executes."""

import numpy as np

from topoep_jax.plan.topoep.apportion import apportion
from topoep_jax.plan.topoep.facts import NOWHERE, Facts
from topoep_jax.plan.topoep.select import Pairs
from topoep_jax.plan.topoep.state import Plans


def split(facts: Facts, pairs: Pairs, chosen: np.ndarray, slot_expert: np.ndarray, rows: np.ndarray) -> Plans:
    """Gives the rows [C, R, J] of filled domains sources: a domain's own for what it serves, else all that are left.

    A rank first executes its own rows, the others are apportioned.
    """
    count, num_ranks, num_experts = len(chosen), facts.num_ranks, facts.num_experts
    plans = Plans(slot_expert, np.zeros((count, num_ranks, *rows.shape[1:]), np.int64))
    served = np.zeros((count, facts.num_domains, num_experts), bool)
    which, pair = np.nonzero(chosen)
    served[which, pairs.domain[pair], pairs.expert[pair]] = True

    # A group is an expert in a domain that executes it: at home, or where it is served.
    plan, expert = (a.ravel() for a in np.indices((count, num_experts)))
    plan, expert = np.concatenate([plan, which]), np.concatenate([expert, pairs.expert[pair]])
    domain = np.concatenate([facts.home[expert[: count * num_experts]], pairs.domain[pair]])
    at_home = facts.home[expert] == domain
    elsewhere = ~served[plan[:, None], facts.domain, expert[:, None]]
    sources = np.where(at_home[:, None], elsewhere, facts.domain == domain[:, None])
    given = np.where(sources, facts.omega.T[expert], 0)  # [groups, R]

    member = facts.members[domain]  # [groups, G]
    instance = plans.instance_of(num_experts)[plan[:, None], member, expert[:, None]]
    exists = (member != NOWHERE) & (instance != NOWHERE)
    taken = np.where(exists, rows[plan[:, None], member, instance], 0)

    quota = plans.quota.transpose(0, 2, 3, 1)  # [C, R, J, source], a view
    alone = (taken > 0).sum(axis=1) == 1
    group, position = np.nonzero((taken > 0) & alone[:, None])
    quota[plan[group], member[group, position], instance[group, position]] = given[group]
    shared = np.flatnonzero((taken > 0).sum(axis=1) > 1)
    parts = _own_first(given[shared], taken[shared], member[shared])
    group, position = np.nonzero(taken[shared] > 0)
    at = shared[group]
    quota[plan[at], member[at, position], instance[at, position]] = parts[group, :, position]
    return plans


def _own_first(given: np.ndarray, taken: np.ndarray, member: np.ndarray) -> np.ndarray:
    """int64 [groups, R, G]: `given` [groups, R] over the instances `taken` [groups, G] at ranks `member`."""
    own = np.where(taken > 0, np.minimum(np.take_along_axis(given, member, axis=1), taken), 0)
    group, position = np.nonzero(own)
    given = given.copy()
    given[group, member[group, position]] -= own[group, position]
    parts = apportion(given, taken - own)
    parts[group, member[group, position], position] += own[group, position]
    return parts
