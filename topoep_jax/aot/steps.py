"""The program as a tree of steps in its own order: kernels, collectives, calls, and the loops around them."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from topoep_jax.aot.compiler import Program
from topoep_jax.aot.hlo import Instruction, Run
from topoep_jax.aot.kernels import Kernel, is_kernel, read_kernel
from topoep_jax.aot.schedule import PHASE, Collective, collectives, is_done, starter

_BACKWARD = "transpose("
"""In the scopes of what JAX derived."""
_CALLS = {"topoep_plan": "plan", "topoep_pull": "pull", "topoep_push": "push"}
"""FFI calls with prices of their own, by target."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
      what: "kernel", a collective that is "started" or runs "at once", a "call" of ours, something on a stream of its
        own ("aside"), the "end" of what was started, a "loop", or a "branch".
      name: of the instruction; of an "end", of what it ends.
      backward: whether it belongs to a backward pass.
      phase: of a call, "plan", "pull", "repull" or "push".
      kernel: of a kernel.
      collective: of a collective.
      in_graph: whether a CUDA graph launches it.
      replica_bytes: of one replica, in a call.
      inner: steps of one turn, of each branch, or of what runs aside.
      turns: of a loop; 1 where nobody knows.
    """

    what: Literal["kernel", "started", "at once", "call", "aside", "end", "loop", "branch"]
    name: str
    backward: bool = False
    phase: str = ""
    kernel: Kernel | None = None
    collective: Collective | None = None
    in_graph: bool = False
    replica_bytes: int = 0
    inner: tuple[tuple["Step", ...], ...] = ()
    turns: int = 1


def read_steps(program: Program) -> tuple[Step, ...]:
    """All steps of a program, those of loops inside of them."""
    return tuple(_Reader(program).steps(Run(program.module.entry, 1, 1), "", inside_graph=False))


def kernels(steps: tuple[Step, ...], times: int = 1) -> Iterator[tuple[Step, int]]:
    """Every kernel of the steps, and how often it is launched; of branches, those of the first that has any."""
    for step in steps:
        if step.kernel is not None:
            yield step, times
        for inner in step.inner:
            found = list(kernels(inner, times * step.turns))
            yield from found
            if found and step.what == "branch":
                break


class _Reader:
    def __init__(self, program: Program) -> None:
        self._module = program.module
        self._collectives = {collective.name: collective for collective in collectives(program)}
        self._in_graphs = {thunk.name for thunk in program.thunks if thunk.command_buffer}

    def steps(self, run: Run, phase: str, *, inside_graph: bool) -> Iterator[Step]:
        """Of one computation; `phase` is that of the loop around it."""
        instructions = self._module.computations[run.computation]
        by_name = {instruction.name: instruction for instruction in instructions}
        started: set[str] = set()
        for instruction in instructions:
            name, backward = instruction.name, _BACKWARD in instruction.op_name
            in_graph = inside_graph or name in self._in_graphs
            if is_done(instruction):
                begun = starter(instruction, by_name)
                if begun in started:
                    yield Step("end", begun, backward)
            elif collective := self._collectives.get(name):
                if collective.asynchronous:
                    started.add(name)
                yield Step("started" if collective.asynchronous else "at once", name, backward, collective=collective)
            elif call := _CALLS.get(instruction.target or ""):
                own = instruction.attribute(PHASE) or call
                yield Step("call", name, backward, own, replica_bytes=_replica_bytes(instruction), in_graph=in_graph)
            elif instruction.opcode in ("while", "conditional", "call", "call-start", "async-start"):
                started.add(name)
                yield self._around(instruction, run, backward, inside_graph=in_graph)
            elif is_kernel(instruction):
                kernel = read_kernel(self._module, run, instruction, phase)
                yield Step("kernel", name, backward, kernel=kernel, in_graph=in_graph)

    def _around(self, instruction: Instruction, run: Run, backward: bool, *, inside_graph: bool) -> Step:
        """What runs computations: those of a loop's turn are one sequence."""
        opcode = instruction.opcode
        turns = (instruction.trip_count or 1) if opcode == "while" else 1
        phase = instruction.attribute(PHASE) or ""
        parts = [
            tuple(self.steps(Run(called, run.times * turns, turns), phase, inside_graph=inside_graph))
            for called in instruction.calls
        ]
        if opcode in ("while", "call"):
            return Step("loop", instruction.name, backward, inner=(sum(parts, ()),), turns=turns)
        what: Literal["branch", "aside"] = "branch" if opcode == "conditional" else "aside"
        return Step(what, instruction.name, backward, inner=tuple(parts))


def _replica_bytes(instruction: Instruction) -> int:
    result = instruction.shape[0]
    return result.num_bytes // (result.dims or (1,))[0]
