"""The copies that bring parameters to replicas, and what they cost; xla_ffi/plan/pulls.h is the same in C++.

A hot owner's NIC is the bottleneck of pulls: several domains want the same few experts. Modes:

- "direct": the main's rank sends the whole expert to every holder;
- "relayed": the first (lowest) holder of each other domain pulls across, and the domain's further holders copy from it;
- "striped": the owner spreads slices of the expert over the ranks of its own domain, and each of them sends its slice
  to the holders there and to the first holder of each other domain, so that every NIC of the domain works; further
  holders copy from the first as in "relayed";
- "best": the quickest of the three by `price`, the first of them on a tie.

Copies of one stage need only what earlier stages brought. The bytes of a rank are added over the stages: slices and
experts follow each other as in a pipeline, so a link is busy for the sum.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from topoep_jax.plan.links import busiest_direction, everything, moved_ps
from topoep_jax.plan.problem import CostModel
from topoep_jax.topology import Topology


class Copies(NamedTuple):
    """Copies of parts of experts, int64 [n] each, in order of stage, target, expert and slice."""

    source: np.ndarray
    """Rank that sends."""
    target: np.ndarray
    """Rank that receives."""
    expert: np.ndarray
    slice_index: np.ndarray
    """The part that is sent: bytes floor(W x slice_index / slices) up to floor(W x (slice_index + 1) / slices)."""
    slices: np.ndarray
    stage: np.ndarray

    def byte_range(self, expert_bytes: int) -> tuple[np.ndarray, np.ndarray]:
        """First byte and end of each copy, int64 [n]; the slices of an expert cover it exactly."""
        first = expert_bytes * self.slice_index // self.slices
        return first, expert_bytes * (self.slice_index + 1) // self.slices


def schedule(slot_expert: np.ndarray, mains_per_rank: int, topology: Topology, cost: CostModel) -> Copies:
    """The copies of a plan's replicas (`slot_expert` int [R, N], -1 if empty), as `cost.pulls` says."""
    if cost.pulls != "best":
        return _SCHEDULES[cost.pulls](slot_expert, mains_per_rank, topology)
    candidates = [build(slot_expert, mains_per_rank, topology) for build in _SCHEDULES.values()]
    return min(candidates, key=lambda copies: price(copies, topology, cost))  # the first of the smallest


def moved_bytes(copies: Copies, topology: Topology, cost: CostModel) -> np.ndarray:
    """Bytes from one rank to another over all stages, int64 [R, R]."""
    moved = np.zeros((topology.num_ranks, topology.num_ranks), np.int64)
    first, end = copies.byte_range(cost.expert_bytes)
    np.add.at(moved, (copies.source, copies.target), end - first)
    return moved


def replicas(slot_expert: np.ndarray, mains_per_rank: int) -> np.ndarray:
    """Replicas (`slot_expert` int [R, N], -1 if empty) from main rank to holding rank, int64 [R, R]."""
    counts = np.zeros((len(slot_expert),) * 2, np.int64)
    holder, slot = np.nonzero(slot_expert >= 0)
    np.add.at(counts, (slot_expert[holder, slot] // mains_per_rank, holder), 1)
    return counts


def price(copies: Copies, topology: Topology, cost: CostModel) -> int:
    """Picoseconds by the bottleneck rule: for each class of link, the busiest rank, in or out."""
    moved = moved_bytes(copies, topology, cost)
    return moved_ps(moved, topology, cost.inter_fs_per_byte, cost.intra_fs_per_byte, busiest_direction)


def eq8(copies: Copies, topology: Topology, cost: CostModel) -> int:
    """Picoseconds by Eq. 8 of the paper: the bytes of all ranks together."""
    moved = moved_bytes(copies, topology, cost)
    return moved_ps(moved, topology, cost.inter_fs_per_byte, cost.intra_fs_per_byte, everything)


def check(copies: Copies, slot_expert: np.ndarray, mains_per_rank: int, expert_bytes: int) -> None:
    """Executes the copies in order of stage: every holder must end with every byte of its replicas, received once.

    Raises:
      ValueError: a copy reads bytes that its source does not have yet, a rank receives a byte twice (or of its own
        main), or a holder lacks bytes.
    """
    owned = np.repeat(np.arange(slot_expert.shape[0]), mains_per_rank).tolist()
    has: dict[tuple[int, int], list[tuple[int, int]]] = {(r, e): [(0, expert_bytes)] for e, r in enumerate(owned)}
    first, end = copies.byte_range(expert_bytes)
    for stage in np.unique(copies.stage):
        arrived: list[tuple[tuple[int, int], tuple[int, int]]] = []
        for i in np.flatnonzero(copies.stage == stage):
            source, target, expert = (int(field[i]) for field in (copies.source, copies.target, copies.expert))
            part = (int(first[i]), int(end[i]))
            if not any(low <= part[0] and part[1] <= high for low, high in has.get((source, expert), [])):
                raise ValueError(
                    f"stage {stage}: rank {source} sends bytes {part} of expert {expert} to rank {target}, but it has"
                    f" {has.get((source, expert), [])}"
                )
            arrived.append(((target, expert), part))
        for key, part in arrived:
            if any(low < part[1] and part[0] < high for low, high in has.get(key, [])):
                raise ValueError(f"stage {stage}: rank {key[0]} receives bytes {part} of expert {key[1]} twice")
            has[key] = _merged([*has.get(key, []), part])
    for rank, slot in np.argwhere(slot_expert >= 0):
        expert = int(slot_expert[rank, slot])
        if has.get((rank, expert)) != [(0, expert_bytes)]:
            raise ValueError(
                f"rank {rank} holds expert {expert}, but of its {expert_bytes} bytes it has only"
                f" {has.get((rank, expert), [])}"
            )


def _merged(parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Disjoint parts, with neighbours joined."""
    result: list[tuple[int, int]] = []
    for low, high in sorted(parts):
        if result and result[-1][1] == low:
            result[-1] = (result[-1][0], high)
        else:
            result.append((low, high))
    return result


Row = tuple[int, int, int, int, int, int]
"""stage, target, expert, slice index, slices, source."""


def _direct(slot_expert: np.ndarray, mains_per_rank: int, topology: Topology) -> Copies:
    target, slot = np.nonzero(slot_expert >= 0)
    expert = slot_expert[target, slot].astype(np.int64)
    whole = np.zeros_like(expert)
    return Copies(expert // mains_per_rank, target, expert, whole, whole + 1, whole)


def _relayed(slot_expert: np.ndarray, mains_per_rank: int, topology: Topology) -> Copies:
    return _in_order(_relay(slot_expert, mains_per_rank, topology))


def _relay(slot_expert: np.ndarray, mains_per_rank: int, topology: Topology) -> Iterator[Row]:
    for owner, expert, intra, inter in _replicated(slot_expert, mains_per_rank, topology):
        for rank in intra:
            yield 0, rank, expert, 0, 1, owner
        for first, *others in inter:
            yield 0, first, expert, 0, 1, owner
            for rank in others:
                yield 1, rank, expert, 0, 1, first


def _striped(slot_expert: np.ndarray, mains_per_rank: int, topology: Topology) -> Copies:
    return _in_order(_stripe(slot_expert, mains_per_rank, topology))


def _stripe(slot_expert: np.ndarray, mains_per_rank: int, topology: Topology) -> Iterator[Row]:
    for owner, expert, intra, inter in _replicated(slot_expert, mains_per_rank, topology):
        senders = topology.ranks_of_domain(topology.domain_of_rank[owner])
        for index, sender in enumerate(senders):
            if sender != owner:
                yield 0, sender, expert, index, len(senders), owner
            for rank in [*intra, *(first for first, *_ in inter)]:
                if rank != sender:
                    yield int(sender != owner), rank, expert, index, len(senders), sender
        for first, *others in inter:
            for rank in others:
                yield 2, rank, expert, 0, 1, first


def _replicated(
    slot_expert: np.ndarray, mains_per_rank: int, topology: Topology
) -> Iterator[tuple[int, int, list[int], list[list[int]]]]:
    """Owner, expert, its holders in the owner's domain, and those of each other domain that has some; all ascending."""
    domain = topology.domain_of_rank
    for expert in np.unique(slot_expert[slot_expert >= 0]).tolist():
        owner = expert // mains_per_rank
        intra: list[int] = []
        inter: dict[int, list[int]] = {}
        for rank in np.nonzero(slot_expert == expert)[0].tolist():
            if domain[rank] == domain[owner]:
                intra.append(rank)
            else:
                inter.setdefault(domain[rank], []).append(rank)
        yield owner, expert, intra, list(inter.values())


def _in_order(rows: Iterator[Row]) -> Copies:
    stage, target, expert, slice_index, slices, source = np.array(sorted(rows), np.int64).reshape(-1, 6).T
    return Copies(source, target, expert, slice_index, slices, stage)


_SCHEDULES = {"direct": _direct, "relayed": _relayed, "striped": _striped}
