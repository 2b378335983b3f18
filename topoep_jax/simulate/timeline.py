"""What happened when, on which rank and stream, and what a rank's time was spent on."""

import collections
import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from topoep_jax.simulate.program import STREAMS, Links, Program, Stream, run

WAITING = "waiting"
"""Phase of the time in which neither stream of a rank does anything."""


class Event(NamedTuple):
    """One task on one rank; picoseconds since the step began."""

    rank: int
    stream: Stream
    name: str
    phase: str
    begin_ps: int
    end_ps: int
    sent_bytes: int
    received_bytes: int


class Share(NamedTuple):
    """A phase's part in the time of one rank; picoseconds."""

    busy_ps: int
    """In which it runs."""
    exposed_ps: int
    """Of these, those in which the rank computes nothing; all of them for computation."""


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A simulated step.

    Attributes:
      program: its tasks.
      links: what carried them.
      overlap: whether each rank had two streams.
      begin: int64 [tasks, R], when each rank begins each task.
      end: the same of its end.
    """

    program: Program
    links: Links
    overlap: bool
    begin: np.ndarray
    end: np.ndarray

    @classmethod
    def of(cls, program: Program, links: Links, *, overlap: bool = True) -> "Timeline":
        """Runs a program."""
        return cls(program, links, overlap, *run(program, links, overlap=overlap))

    @property
    def step_ps(self) -> int:
        """When the last rank is done."""
        return int(self.end.max(initial=0))

    def events(self) -> Iterator[Event]:
        """Everything that takes time, task by task."""
        nothing = np.zeros(self.program.num_ranks, np.int64)
        for task, begin, end in zip(self.program.tasks, self.begin, self.end, strict=True):
            sent = nothing if task.moved is None else task.moved.sum(axis=1)
            received = nothing if task.moved is None else task.moved.sum(axis=0)
            for rank in np.flatnonzero(end > begin).tolist():
                numbers = (int(array[rank]) for array in (begin, end, sent, received))
                yield Event(rank, task.stream, task.name, task.phase, *numbers)

    def busiest_rank(self) -> int:
        """The rank that computes and communicates longest, both together, the lowest of equals: it waits little."""
        return int((self.end - self.begin).sum(axis=0).argmax())

    def link_busy_ps(self) -> np.ndarray:
        """int64 [2, R], how long each rank's NIC and NVLink carry exchanges."""
        total = np.zeros((2, self.program.num_ranks), np.int64)
        times = collections.Counter(id(task.moved) for task in self.program.tasks)
        for moved in {id(task.moved): task.moved for task in self.program.tasks}.values():
            if moved is not None:
                total += times[id(moved)] * self.links.busy_ps(self.links.split(moved))
        return total

    def link_bytes(self) -> np.ndarray:
        """int64 [2, R], bytes on each rank's NIC and NVLink, of the busier direction of each exchange."""
        moved = [self.links.split(task.moved) for task in self.program.tasks if task.moved is not None]
        nothing = np.zeros((2, self.program.num_ranks), np.int64)
        return sum((np.maximum(both.sum(axis=1), both.sum(axis=2)) for both in moved), nothing)

    def breakdown(self, rank: int) -> dict[str, Share]:
        """What a rank's step was spent on, phase by phase in order of appearance; exposed parts sum to the step."""
        begin, end = self.begin[:, rank], self.end[:, rank]
        computing = [index for index, task in enumerate(self.program.tasks) if task.stream == STREAMS[0]]
        first, last = begin[computing], end[computing]  # ascending and disjoint: one stream
        done = np.concatenate([[0], np.cumsum(last - first)])

        def computed_until(moment: int) -> int:
            index = int(np.searchsorted(first, moment))
            return int(done[index] - max(last[index - 1] - moment, 0)) if index else 0

        shares: dict[str, Share] = {}
        for task, low, high in zip(self.program.tasks, begin.tolist(), end.tolist(), strict=True):
            hidden = 0 if task.stream == STREAMS[0] else computed_until(high) - computed_until(low)
            before = shares.get(task.phase, Share(0, 0))
            shares[task.phase] = Share(before.busy_ps + high - low, before.exposed_ps + high - low - hidden)
        waiting = self.step_ps - sum(share.exposed_ps for share in shares.values())
        return {**shares, WAITING: Share(waiting, waiting)}
