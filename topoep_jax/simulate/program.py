"""A step as tasks of two streams, and when each rank begins and ends each of them.

Times are integer picoseconds. A task begins on a rank when the rank's stream has finished the task before it and what
the task needs is there; so every time is a maximum of sums, and none can fall when a task takes longer.

How ranks wait for each other is the model of contention. A rank has two links, its NIC and its NVLink port, each as
fast in as out. An exchange takes the NIC's bytes first, then NVLink's, as `plan.links` prices them. On each link, a
rank begins when all ranks that it exchanges with have come, and its link is busy for the larger of what it sends and
what it receives. It goes on when its own link and those of these ranks are done: a busy link serves all its partners at
once, and so holds each of them up to the end.
"""

import dataclasses
from collections.abc import Iterable
from typing import Literal

import numpy as np

from topoep_jax.plan.links import link_ps
from topoep_jax.topology import Topology

Stream = Literal["compute", "communication"]
STREAMS: tuple[Stream, ...] = ("compute", "communication")
LINKS = ("NIC", "NVLink")


@dataclasses.dataclass(frozen=True)
class Task:
    """One thing that every rank does.

    Attributes:
      name: what a timeline calls it.
      phase: what a breakdown counts it as.
      stream: where it runs.
      after: tasks that it needs, by their number.
      ps: int64 [R], the time each rank takes; of an exchange, its fixed part.
      moved: int64 [R, R] bytes from rank to rank of an exchange, else None.
      together: whether all ranks wait for each other first.
    """

    name: str
    phase: str
    stream: Stream
    after: tuple[int, ...]
    ps: np.ndarray
    moved: np.ndarray | None = None
    together: bool = False


class Program:
    """Tasks in the order in which every rank starts them."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.tasks: list[Task] = []

    def compute(self, name: str, phase: str, ps: np.ndarray | int, after: Iterable[int] = ()) -> int:
        """Work of each rank by itself; `ps` is int64 [R], or one time for all. Returns the task's number."""
        return self._add(Task(name, phase, "compute", tuple(after), self._each(ps)))

    def exchange(
        self, name: str, phase: str, moved: np.ndarray, fixed_ps: np.ndarray | int, after: Iterable[int] = ()
    ) -> int:
        """Bytes int64 [R, R] from rank to rank, after a fixed time; what stays on a rank is not moved."""
        away = moved * ~np.eye(self.num_ranks, dtype=bool)
        return self._add(Task(name, phase, "communication", tuple(after), self._each(fixed_ps), away))

    def together(self, name: str, phase: str, ps: int, after: Iterable[int] = ()) -> int:
        """A collective in which all ranks wait for the last, and then take one time."""
        return self._add(Task(name, phase, "communication", tuple(after), self._each(ps), together=True))

    def repeat(self, tasks: range, after: int) -> int:
        """Adds tasks again; what they needed from before them is now `after`. Returns how far their numbers moved."""
        moved = len(self.tasks) - tasks.start
        for task in self.tasks[tasks.start : tasks.stop]:
            needs = tuple(need + moved if need >= tasks.start else after for need in task.after)
            self._add(dataclasses.replace(task, after=needs))
        return moved

    def _each(self, ps: np.ndarray | int) -> np.ndarray:
        return np.broadcast_to(np.asarray(ps, np.int64), (self.num_ranks,))

    def _add(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1


@dataclasses.dataclass(frozen=True)
class Links:
    """The two links of every rank.

    Attributes:
      topology: domain of each rank; between domains the NIC carries, inside one NVLink.
      nic_fs_per_byte: femtoseconds per byte and direction.
      nvlink_fs_per_byte: the same.
      hot_permille: how much of a link's excess over the mean link counts; 1000 is all of it.
    """

    topology: Topology
    nic_fs_per_byte: int
    nvlink_fs_per_byte: int
    hot_permille: int = 1000

    def split(self, moved: np.ndarray) -> np.ndarray:
        """int64 [2, R, R]: bytes of the NICs, and of NVLink."""
        crosses = self.topology.crosses_domains()
        return np.stack([moved * crosses, moved * ~crosses])

    def busy_ps(self, carried: np.ndarray) -> np.ndarray:
        """int64 [2, R]: time that each link of each rank needs for bytes int64 [2, R, R]."""
        most = np.maximum(carried.sum(axis=1), carried.sum(axis=2))
        busy = np.stack([link_ps(most[0], self.nic_fs_per_byte), link_ps(most[1], self.nvlink_fs_per_byte)])
        mean = busy.sum(axis=1, keepdims=True) // busy.shape[1]
        return (mean * (1000 - self.hot_permille) + busy * self.hot_permille) // 1000


def run(program: Program, links: Links, *, overlap: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """When each rank begins and ends each task, int64 [tasks, R] twice.

    Args:
      program: the tasks.
      links: what carries exchanges.
      overlap: whether computation and communication have a stream each; else they share one.
    """
    free = np.zeros((2, program.num_ranks), np.int64)
    begin = np.zeros((len(program.tasks), program.num_ranks), np.int64)
    end = np.zeros_like(begin)
    carried: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by identity of what is moved: layers come again
    for index, task in enumerate(program.tasks):
        stream = STREAMS.index(task.stream) if overlap else 0
        ready = free[stream].copy()
        for other in task.after:
            np.maximum(ready, end[other], out=ready)
        if task.moved is not None:
            if id(task.moved) not in carried:
                carried[id(task.moved)] = _carried(task.moved, links)
            begin[index], end[index] = _exchange(ready, task.ps, *carried[id(task.moved)])
        else:
            begin[index] = ready.max() if task.together else ready
            end[index] = begin[index] + task.ps
        free[stream] = end[index]
    return begin, end


def _carried(moved: np.ndarray, links: Links) -> tuple[np.ndarray, np.ndarray]:
    """How long each link is busy, int64 [2, R], and whether ranks wait for each other there, bool [2, R, R]."""
    carried = links.split(moved)
    partners = (carried > 0) | (carried.transpose(0, 2, 1) > 0) | np.eye(len(moved), dtype=bool)
    return links.busy_ps(carried), partners


def _exchange(
    ready: np.ndarray, fixed: np.ndarray, busy_ps: np.ndarray, partners: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    now, come = ready + fixed, []
    for busy, with_whom in zip(busy_ps, partners, strict=True):
        come.append(_latest_partner(now, with_whom))
        now = _latest_partner(come[-1] + busy, with_whom)
    uses_nic = partners[0].sum(axis=1) > 1
    return np.where(uses_nic, come[0], come[1]) - fixed, now


def _latest_partner(times: np.ndarray, with_whom: np.ndarray) -> np.ndarray:
    return np.where(with_whom, times[None, :], 0).max(axis=1)
