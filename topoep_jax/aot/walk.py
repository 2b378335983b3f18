"""A program's steps on one clock: when each begins, and what the clock waits for.

Kernels follow each other. A collective that is started ends at the later of its start and the end of the collective
before, plus its time; what needs it waits. What runs on a stream of its own, such as the planner, begins where it is
started. Nothing that runs at once slows the other down.
"""

import copy
import dataclasses
from typing import NamedTuple, Protocol

from topoep_jax.aot.schedule import Collective
from topoep_jax.aot.steps import Step


class Price(Protocol):
    """What steps take, in picoseconds."""

    def step(self, step: Step) -> int:
        """A kernel or a call."""

    def collective(self, collective: Collective) -> int:
        """One run of a collective."""


class Span(NamedTuple):
    """What took time; picoseconds since the program began."""

    what: str
    """"kernel", "exchange", "wait" (of the clock, for an exchange or for what runs aside), "aside" or "loop"."""
    label: str
    category: str
    """Of a kernel; of a wait and an exchange the phase."""
    begin: int
    end: int
    times: int
    """How often it comes: the turns of a loop after the first are all as the second."""

    @property
    def total_ps(self) -> int:
        """Of all its times."""
        return (self.end - self.begin) * self.times


@dataclasses.dataclass
class Walk:
    """A program on the clock.

    Attributes:
      now: picoseconds.
      spans: what took time, in order.
      forward_ps: when the first step of a backward pass began; None without one.
    """

    now: int = 0
    spans: list[Span] = dataclasses.field(default_factory=list)
    forward_ps: int | None = None
    _wire: int = 0
    _flying: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, steps: tuple[Step, ...], price: Price) -> "Walk":
        """Walks a program."""
        walk = cls()
        walk._go(steps, price, 1)
        return walk

    def _go(self, steps: tuple[Step, ...], price: Price, times: int) -> None:
        for step in steps:
            if step.backward and self.forward_ps is None and step.what != "end":
                self.forward_ps = self.now
            match step.what:
                case "started" | "at once":
                    self._exchange(step, price, times)
                case "end":
                    self._wait(*self._flying.pop(step.name, (0, "")), times)
                case "loop":
                    self._loop(step, price, times)
                case "branch":
                    self._branch(step, price, times)
                case "aside":
                    self._aside(step, price, times)
                case "call":
                    begin = self.now
                    self._span("exchange", step.phase, step.phase, begin + price.step(step), times)
                    self._wait(begin + price.step(step), step.phase, times)
                case "kernel":
                    assert step.kernel is not None
                    end = self.now + price.step(step)
                    self._span("kernel", step.kernel.name, step.kernel.category, end, times)
                    self.now = end

    def _span(self, what: str, label: str, category: str, end: int, times: int, begin: int | None = None) -> None:
        self.spans.append(Span(what, label, category, self.now if begin is None else begin, end, times))

    def _exchange(self, step: Step, price: Price, times: int) -> None:
        assert step.collective is not None
        phase, begin = step.collective.phase, max(self.now, self._wire)
        self._wire = begin + price.collective(step.collective)
        self._span("exchange", phase, phase, self._wire, times, begin)
        if step.what == "at once":
            self._wait(self._wire, phase, times)
        else:
            self._flying[step.name] = self._wire, phase

    def _wait(self, end: int, phase: str, times: int) -> None:
        if end > self.now:
            self._span("wait", phase, phase, end, times)
            self.now = end

    def _loop(self, step: Step, price: Price, times: int) -> None:
        """The first turn may wait for what came before; all others are as the second."""
        begin, turns = self.now, step.turns
        self._go(step.inner[0], price, times)
        if turns > 1:
            second = self.now
            self._go(step.inner[0], price, times * (turns - 1))
            rest = (turns - 2) * (self.now - second)
            self.now, self._wire = self.now + rest, self._wire + rest
        if turns > 1:
            self._span("loop", f"{turns} x {step.name}", "loop", self.now, times, begin)

    def _branch(self, step: Step, price: Price, times: int) -> None:
        """The dearest branch counts."""
        taken = [copy.copy(self) for _ in step.inner]
        for walk, inner in zip(taken, step.inner, strict=True):
            walk.spans, walk._flying = list(self.spans), dict(self._flying)
            walk._go(inner, price, times)
        vars(self).update(vars(max(taken, key=lambda walk: walk.now)))

    def _aside(self, step: Step, price: Price, times: int) -> None:
        other = Walk(self.now)
        for inner in step.inner:
            other._go(inner, price, times)
        phase = next((span.label for span in other.spans if span.what == "exchange"), "aside")
        if other.now > self.now:
            self._span("aside", phase, phase, other.now, times)
        self._flying[step.name] = other.now, phase
