"""FlexMoE's placement of virtual experts: expand the most loaded, shrink the least loaded, migrate; while it pays.

Source: FlexMoE (SIGMOD'23, arXiv 2304.03946). No code was published; this follows the published description of its
scheduler and policy maker, not a program.

Steps, repeated while the modelled time drops:
  1. Expand and Shrink: of the experts on the slowest rank, that of largest load per instance gets one more instance, on
     the rank where the modelled time is least: in a free slot, or in place of a replica of the expert (of all) of
     smallest load per instance.
  2. If that does not pay, Migrate: a replica on the slowest rank moves to a free slot elsewhere, or changes places with
     another replica; again the exchange of least modelled time.
  Modelled time is the largest over ranks of compute plus the rank's traffic of each link class (the busier direction of
  rows and pulls). The instances of an expert execute equal shares, fed by near sources first.

Departures:
  - Mains stay, and every slot starts empty, since a plan is made anew for each microbatch; the source starts from the
    placement of the step before, where every slot is full.
  - The source waits until max/mean load exceeds a threshold; here it always runs, which can only favour it.
  - The source expands the expert of largest load per instance of all; here of those on the slowest rank. With few
    experts per rank they are mostly the same; with several, no change of another rank could lower the largest time.
  - The source prices the all-reduce of replica gradients; here a replica costs what `CostModel` says, its pull.
  - At most 4 changes per slot, lest tiny gains go on and on.
"""

import numpy as np

from topoep_jax.plan.baselines.common import draft_of_rows, split_evenly
from topoep_jax.plan.problem import Draft, Problem

Change = tuple[int, np.ndarray]
"""An expert and the ranks that hold it afterwards, bool [R]."""


def flexmoe(omega: np.ndarray, problem: Problem) -> Draft:
    """Adds, removes and moves replicas on all ranks, wherever the modelled time drops most."""
    placement = _Placement(omega.T.astype(np.int64), problem)
    for _ in range(4 * problem.num_slots * problem.topology.num_ranks):
        if not (placement.accept_best(_expansions(placement)) or placement.accept_best(_migrations(placement))):
            break
    return draft_of_rows(split_evenly(omega.sum(axis=0), placement.holds), omega, problem)


class _Placement:
    """Who holds what, and what every rank computes, sends and receives because of it.

    `counts` are int64 [9, R] per expert: rows executed; then inside domains rows sent, rows received, pulls sent, pulls
    received; then the same four between domains.
    """

    def __init__(self, demand: np.ndarray, problem: Problem) -> None:
        self.demand = demand
        self.problem = problem
        self.main = problem.main_rank()
        self.is_main = self.main == np.arange(problem.topology.num_ranks)[:, None]
        self.holds: np.ndarray = self.is_main.copy()
        self.counts = self._count(np.arange(problem.num_experts), self.holds.T)
        self.total = self.counts.sum(axis=0)

    @property
    def replicas(self) -> np.ndarray:
        """bool [R, E]."""
        replicas: np.ndarray = self.holds & ~self.is_main
        return replicas

    @property
    def has_free_slot(self) -> np.ndarray:
        """bool [R]."""
        free: np.ndarray = self.replicas.sum(axis=1) < self.problem.num_slots
        return free

    @property
    def slowest(self) -> int:
        """The rank of largest modelled time."""
        return int(self.rank_ps(self.total).argmax())

    def load_per_instance(self) -> np.ndarray:
        """float64 [E]; equal fractions give equal floats, and no others do while loads fit int32."""
        load: np.ndarray = self.demand.sum(axis=1) / self.holds.sum(axis=0)
        return load

    def rank_ps(self, counts: np.ndarray) -> np.ndarray:
        """int64 [..., R]: modelled time of each rank; `counts` is [..., 9, R]."""
        cost = self.problem.cost
        time: np.ndarray = cost.row_ps * counts[..., 0, :]
        for at, fs_per_byte in ((1, cost.intra_fs_per_byte), (5, cost.inter_fs_per_byte)):
            rows = 2 * cost.token_bytes * counts[..., at : at + 2, :] * fs_per_byte // 1000
            pulls = cost.expert_bytes * counts[..., at + 2 : at + 4, :] * fs_per_byte // 1000
            time = time + (rows + pulls).max(axis=-2)
        return time

    def accept_best(self, candidates: list[list[Change]]) -> bool:
        """Makes the first candidate of least time, if that is less than the time now."""
        if not candidates:
            return False
        experts = np.array([expert for changes in candidates for expert, _ in changes])
        hosts = np.array([held for changes in candidates for _, held in changes])
        candidate = np.repeat(np.arange(len(candidates)), [len(changes) for changes in candidates])
        counts = self._count(experts, hosts)
        totals = np.repeat(self.total[None], len(candidates), axis=0)
        np.add.at(totals, candidate, counts - self.counts[experts])
        time = self.rank_ps(totals).max(axis=1)
        best = int(time.argmin())
        if time[best] >= self.rank_ps(self.total).max():
            return False
        for i in np.flatnonzero(candidate == best):
            self.holds[:, experts[i]] = hosts[i]
            self.counts[experts[i]] = counts[i]
        self.total = totals[best]
        return True

    def _count(self, experts: np.ndarray, hosts: np.ndarray) -> np.ndarray:
        """int64 [C, 9, R]: what expert `experts[c]` costs each rank when the ranks `hosts[c]` hold it."""
        topology, main = self.problem.topology, self.main[experts]
        domain = np.array(topology.domain_of_rank)
        rows = split_evenly(self.demand[experts].sum(axis=1), hosts.T)
        supply, room = self.demand[experts] - rows, rows - self.demand[experts]
        supply, room = np.maximum(supply, 0), np.maximum(room, 0)
        near_out, near_in = np.zeros_like(rows), np.zeros_like(rows)
        for d in range(topology.num_domains):
            near = domain == d
            met = np.minimum(supply[:, near].sum(axis=1), room[:, near].sum(axis=1))
            near_out[:, near] = _first(supply[:, near], met)
            near_in[:, near] = _first(room[:, near], met)
        is_main = np.arange(topology.num_ranks) == main[:, None]
        is_near = domain == domain[main][:, None]
        pulled = hosts & (rows > 0) & ~is_main
        pulls = {}
        for name, received in (("near", pulled & is_near), ("far", pulled & ~is_near)):
            pulls[name] = [is_main * received.sum(axis=1, keepdims=True), received]
        far = [supply - near_out, room - near_in]
        return np.stack([rows, near_out, near_in, *pulls["near"], *far, *pulls["far"]], axis=1)


def _first(amounts: np.ndarray, total: np.ndarray) -> np.ndarray:
    """What is taken of `amounts` [C, n] when low indices give first, `total` [C] in all."""
    before = amounts.cumsum(axis=1) - amounts
    taken: np.ndarray = np.clip(total[:, None] - before, 0, amounts)
    return taken


def _expansions(placement: _Placement) -> list[list[Change]]:
    """One more instance of the most loaded expert of the slowest rank, on every rank that can take it."""
    load = placement.load_per_instance()
    can_grow = placement.holds[placement.slowest] & ~placement.holds.all(axis=0)
    if not can_grow.any():
        return []
    hot = int(np.where(can_grow, load, -1).argmax())
    can_shrink = np.array(placement.replicas.any(axis=0))
    can_shrink[hot] = False
    cold = int(np.where(can_shrink, load, np.inf).argmin()) if can_shrink.any() else None
    candidates = []
    for rank in np.flatnonzero(~placement.holds[:, hot]).tolist():
        added = (hot, _with(placement.holds[:, hot], rank, True))
        if placement.has_free_slot[rank]:
            candidates.append([added])
        elif cold is not None and placement.replicas[rank, cold]:
            candidates.append([added, (cold, _with(placement.holds[:, cold], rank, False))])
    return candidates


def _migrations(placement: _Placement) -> list[list[Change]]:
    """The replicas of the slowest rank, each moved to every free slot or exchanged with every other replica."""
    holds, replicas, slowest = placement.holds, placement.replicas, placement.slowest
    candidates = []
    for expert in np.flatnonzero(replicas[slowest]).tolist():
        for rank in np.flatnonzero(~holds[:, expert]).tolist():
            moved = (expert, _with(_with(holds[:, expert], slowest, False), rank, True))
            if placement.has_free_slot[rank]:
                candidates.append([moved])
            for other in np.flatnonzero(replicas[rank] & ~holds[slowest]).tolist():
                back = (other, _with(_with(holds[:, other], rank, False), slowest, True))
                candidates.append([moved, back])
    return candidates


def _with(held: np.ndarray, rank: int, value: bool) -> np.ndarray:
    changed = held.copy()
    changed[rank] = value
    return changed
