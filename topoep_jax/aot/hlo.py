"""Reads the text of an optimized HLO program: computations, their instructions in the order of the schedule."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)

_STEPS = ("while", "conditional", "call", "call-start")
"""What runs computations step by step; call-start does so on another stream."""
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = ")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{[^}]*?(?:S\((\d+)\))?\})?")
_OPERAND = re.compile(r"%([\w.-]+)")
_CALLED = re.compile(r"\b(?:calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_BITS = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a shape.

    Attributes:
      dtype: as HLO writes it, "bf16" for instance.
      dims: its dimensions.
      space: memory space; 0 is ordinary device memory.
    """

    dtype: str
    dims: tuple[int, ...]
    space: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        bits = _BITS.search(self.dtype)
        return math.prod(self.dims) * (int(bits[0]) if bits else 8) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a program."""

    name: str
    opcode: str
    shape: tuple[Array, ...]
    """The arrays of its result, those of nested tuples in order."""
    operands: tuple[str, ...]
    """Names."""
    text: str
    """The whole line."""
    attributes: str
    """What follows the operands."""

    @functools.cached_property
    def calls(self) -> tuple[str, ...]:
        """Computations that it runs: bodies, conditions, branches, fusions."""
        head = self.attributes.partition(" metadata={")[0].partition(" backend_config=")[0]
        branches = _BRANCHES.search(head)
        return (*_CALLED.findall(head), *(_OPERAND.findall(branches[1]) if branches else ()))

    @property
    def target(self) -> str | None:
        """The target of a custom call."""
        return self._find(r'custom_call_target="([^"]*)"') if self.opcode == "custom-call" else None

    @property
    def op_name(self) -> str:
        """Path of JAX scopes and primitives; empty where the compiler did not keep it."""
        return self._find(r'metadata=\{[^}]*?op_name="([^"]*)"') or ""

    @property
    def kernel(self) -> str | None:
        """Name that a Pallas kernel was given."""
        return self._find(r'[,{] *name = "([^"]*)", num_') if self.opcode == "custom-call" else None

    @property
    def contracted(self) -> tuple[int, ...]:
        """Dimensions of the first operand that a dot sums over."""
        found = self._find(r"\blhs_contracting_dims=\{([\d,]*)\}") if self.opcode == "dot" else None
        return tuple(map(int, filter(None, (found or "").split(","))))

    @property
    def body(self) -> str:
        """The computation that a while loop repeats."""
        return self._find(r"\bbody=%?([\w.-]+)") or ""

    @property
    def trip_count(self) -> int | None:
        """Turns of a while loop, where the compiler knows them."""
        found = self._find(r'"known_trip_count":\{"n":"(\d+)"\}')
        return int(found) if found else None

    def attribute(self, name: str) -> str | None:
        """A frontend attribute, which `jax.experimental.xla_metadata.set_xla_metadata` sets."""
        return self._find(rf'frontend_attributes=\{{[^}}]*?\b{name}="([^"]*)"')

    def _find(self, pattern: str) -> str | None:
        match = re.search(pattern, self.attributes)
        return match and match[1]


class Run(NamedTuple):
    """A computation that the program runs step by step."""

    computation: str
    times: int
    """How often in all; a loop whose turns nobody knows counts as one turn."""
    turns: int
    """Of the innermost loop that it belongs to; 1 outside of loops."""


class Module:
    """A program's computations by name; fusions and reducers are computations too.

    Args:
      text: of the optimized program, as `compiled.as_text()` prints it.

    Raises:
      ValueError: it holds no entry computation.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current: list[Instruction] = []
        for line in text.splitlines():
            if match := _COMPUTATION.match(line):
                current = self.computations.setdefault(match[2], [])
                self.entry = match[2] if match[1] else self.entry
            elif _NAME.match(line):
                current.append(_instruction(line))
        if not self.entry:
            raise ValueError("this is no HLO program: it has no ENTRY computation")

    def instructions(self) -> Iterator[Instruction]:
        """The instructions of all computations."""
        for instructions in self.computations.values():
            yield from instructions

    def scheduled(self) -> Iterator[Run]:
        """Computations that the program runs step by step.

        The entry, then bodies and branches, callers first; fusions are one step each, so theirs are left out. Every
        branch of a conditional counts as taken.
        """
        waiting = [Run(self.entry, 1, 1)]
        while waiting:
            run = waiting.pop(0)
            yield run
            for instruction in self.computations[run.computation]:
                if instruction.opcode in _STEPS or self._is_async_work(instruction):
                    turns = (instruction.trip_count or 1) if instruction.opcode == "while" else 1
                    waiting += [Run(called, run.times * turns, turns) for called in instruction.calls]

    def _is_async_work(self, instruction: Instruction) -> bool:
        """Whether it starts steps of a stream of their own; a collective in a wrapper is one step."""
        return instruction.opcode == "async-start" and not any(
            inner.opcode in COLLECTIVES for called in instruction.calls for inner in self.computations[called]
        )

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instruction itself and all that it runs, at any depth."""
        yield instruction
        for called in instruction.calls:
            for inner in self.computations.get(called, ()):
                yield from self.inside(inner)


def _instruction(line: str) -> Instruction:
    match = _NAME.match(line)
    assert match is not None, line
    rest = line[match.end() :]
    shape = rest[: _closing(rest) + 1] if rest.startswith("(") else rest.partition(" ")[0]
    opcode, _, after = rest[len(shape) :].strip().partition("(")
    end = _closing("(" + after)
    arrays = tuple(
        Array(dtype, tuple(map(int, filter(None, dims.split(",")))), int(space or 0))
        for dtype, dims, space in _ARRAY.findall(shape)
    )
    return Instruction(match[2], opcode, arrays, tuple(_OPERAND.findall(after[:end])), line.strip(), after[end:])


def _closing(text: str) -> int:
    """Position of the parenthesis that closes the one at the start."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return position
    return len(text)
