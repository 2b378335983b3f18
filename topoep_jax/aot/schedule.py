"""What a compiled program does in which order: collectives and the expert GEMMs over each, loops, host reads."""

import dataclasses
import re
from collections.abc import Iterator

from topoep_jax.aot.compiler import Program
from topoep_jax.aot.hlo import COLLECTIVES, Array, Instruction, Module, Run

PHASE = "topoep_phase"
"""Frontend attribute that names a collective's part in the layer. Scopes do not survive on a ragged_all_to_all."""
_GEMM = re.compile(r"\btopoep_(gmm|wgrad)\b")
_LIBRARY_GEMM = re.compile(r"gemm|matmul|cublas", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Gemm:
    """One expert GEMM.

    Attributes:
      kind: "gmm" or "wgrad".
      name: of the instruction.
      operands: its arrays, in order.
      result: its array.
      turns: of the loops between the collective and it, 1 where there is none.
    """

    kind: str
    name: str
    operands: tuple[Array, ...]
    result: Array
    turns: int


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the program.

    Attributes:
      name: of the instruction that starts it.
      kind: one of `COLLECTIVES`.
      phase: its part in the layer, or words of where it comes from.
      computation: that it stands in.
      num_bytes: the most that a rank sends (its operand) or receives (its result), whichever is less.
      operands: what it sends, in order.
      result: what it yields.
      asynchronous: whether it starts and ends in two steps.
      gemms: the expert GEMMs that run between its start and its end.
      times: how often it runs.
      turns: of the innermost loop that it runs in.
    """

    name: str
    kind: str
    phase: str
    computation: str
    num_bytes: int
    operands: tuple[Array, ...]
    result: tuple[Array, ...]
    asynchronous: bool
    gemms: tuple[Gemm, ...]
    times: int
    turns: int

    @property
    def overlapped(self) -> bool:
        """Whether it is in flight while an expert GEMM runs."""
        return self.asynchronous and bool(self.gemms)


def collectives(program: Program) -> list[Collective]:
    """All collectives, computation by computation (callers first), each in the order of the schedule."""
    return [found for run in program.module.scheduled() for found in _collectives(program.module, run)]


def _collectives(module: Module, run: Run) -> Iterator[Collective]:
    computation = run.computation
    instructions = module.computations[computation]
    by_name = {instruction.name: instruction for instruction in instructions}
    ends = {starter(other, by_name): i for i, other in enumerate(instructions) if is_done(other)}
    for i, instruction in enumerate(instructions):
        kind = _kind(module, instruction)
        if kind is None or is_done(instruction):
            continue
        end = ends.get(instruction.name, i)
        asynchronous = end > i and '"is_sync":true' not in instruction.attributes
        result = instructions[end].shape
        operands = tuple(array for name in instruction.operands for array in by_name[name].shape)
        between = tuple(g for other in instructions[i + 1 : end] for g in expert_gemms(module, other, computation))
        yield Collective(
            instruction.name,
            kind,
            _phase(instruction, operands, result),
            computation,
            _payload(kind, operands, result),
            operands,
            result,
            asynchronous,
            between if asynchronous else (),
            run.times,
            run.turns,
        )


def expert_gemms(module: Module, instruction: Instruction, computation: str, turns: int = 1) -> Iterator[Gemm]:
    """The expert GEMMs that an instruction is or runs: kernels, dots, library calls, under the scopes of `experts`."""
    if kind := _gemm_kind(instruction):
        shapes = {other.name: other.shape for other in module.computations[computation]}
        operands = tuple(array for name in instruction.operands for array in shapes.get(name, ()))
        yield Gemm(kind, instruction.name, operands, instruction.shape[0], turns)
        return
    turns *= (instruction.trip_count or 1) if instruction.opcode == "while" else 1
    for called in instruction.calls:
        for inner in module.computations.get(called, ()):
            yield from expert_gemms(module, inner, called, turns)


def is_on_device_kernel(collective: Collective, options: dict[str, str]) -> bool:
    """Whether XLA may run a ragged_all_to_all as one launch on the device: by its options and its operands' memory."""
    return (
        options.get("xla_gpu_experimental_ragged_all_to_all_use_device_kernel") == "true"
        and options.get("xla_gpu_unsupported_use_ragged_all_to_all_one_shot_kernel") == "false"
        and all(array.space == SYMMETRIC_MEMORY for array in (*collective.operands[:2], *collective.result))
    )


SYMMETRIC_MEMORY = 7
"""XLA's number of the memory space of NCCL's symmetric buffers."""


def _gemm_kind(instruction: Instruction) -> str | None:
    if instruction.opcode == "custom-call":
        target = instruction.target or ""
        if instruction.kernel is None and not _LIBRARY_GEMM.search(target):
            return None
    elif instruction.opcode != "dot":
        return None
    match = _GEMM.search(instruction.kernel or "") or _GEMM.search(instruction.op_name)
    return match and match[1]


def _kind(module: Module, instruction: Instruction) -> str | None:
    opcode = instruction.opcode.removesuffix("-start").removesuffix("-done")
    if opcode in COLLECTIVES:
        return opcode
    if instruction.opcode == "async-start":
        wrapped = (inner.opcode for called in instruction.calls for inner in module.computations.get(called, ()))
        return next((opcode for opcode in wrapped if opcode in COLLECTIVES), None)
    return None


def is_done(instruction: Instruction) -> bool:
    """Whether it ends what another instruction started."""
    return instruction.opcode.endswith("-done")


def starter(done: Instruction, by_name: dict[str, Instruction]) -> str:
    """Name of the start that a done belongs to: async-update may stand between."""
    name = done.operands[0]
    while name in by_name and by_name[name].opcode == "async-update":
        name = by_name[name].operands[0]
    return name


def _payload(kind: str, operands: tuple[Array, ...], result: tuple[Array, ...]) -> int:
    received = sum(array.num_bytes for array in result)
    if kind != "ragged-all-to-all" or not operands:
        return received
    return min(received, operands[0].num_bytes)


def _phase(instruction: Instruction, operands: tuple[Array, ...], result: tuple[Array, ...]) -> str:
    named = instruction.attribute(PHASE)
    if named:
        return named
    scope = instruction.op_name.rpartition("/")[2]
    if scope and scope != "optimization_barrier":
        return scope
    return f"{operands[0] if operands else '?'} to {result[0]}"
