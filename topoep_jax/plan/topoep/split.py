"""From the rows of instances to quotas; xla_ffi/plan/topoep/split.h is the same in C++."""

import numpy as np

from topoep_jax.plan.topoep.apportion import apportion
from topoep_jax.plan.topoep.context import NOWHERE, Context
from topoep_jax.plan.topoep.select import Selection
from topoep_jax.plan.topoep.state import State


def split(context: Context, selection: Selection, slot_expert: np.ndarray, rows: np.ndarray) -> State:
    """Gives the rows of filled domains their sources.

    A source's rows go to its own domain if that serves the expert, else to the expert's home. Among the instances
    there, each first executes the rows of its own rank, and what is left of the sources (by rank) is apportioned to
    what is left of the instances (by rank).

    Args:
      context: the problem.
      selection: what each domain executes.
      slot_expert: int64 [R, N], from `fill`.
      rows: int64 [R, J], rows of each instance, from `fill`.
    """
    state = State(slot_expert, np.zeros((context.ranks, context.ranks, context.instances), np.int64))
    domain_of = context.domain_of[:, None]
    executes = np.where(selection.served[context.domain_of], domain_of, context.home)  # [R, E], the domain that does
    holders: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (rank, instance) of each (domain, expert)
    for rank, experts in enumerate(state.experts().tolist()):
        for instance, expert in enumerate(experts):
            if expert != NOWHERE:
                holders.setdefault((int(context.domain_of[rank]), expert), []).append((rank, instance))
    for (domain, expert), instances in holders.items():
        at = tuple(np.array(instances).T)  # ranks, instances
        given = np.where(executes[:, expert] == domain, context.omega[:, expert], 0)
        own = np.minimum(given[at[0]], rows[at])
        given[at[0]] -= own
        parts = apportion(given, rows[at] - own)
        parts[at[0], np.arange(own.size)] += own
        state.quota[:, *at] = parts
    return state
