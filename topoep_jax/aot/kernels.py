"""What a step of the compiled program is: its category, the bytes it moves, the grid of its tiles."""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Literal

from topoep_jax.aot.hlo import Array, Instruction, Module, Run

Category = Literal[
    "products of rows",
    "weight gradients of mains",
    "weight gradients of slots",
    "other products",
    "fills",
    "gathers and sums",
    "activations",
    "pack, accumulate, store",
    "layout and plan",
    "router and sorts",
    "counting in loops",
    "other kernels",
]
"""Of kernels. What the clock waits for is no kernel: the planner and exchanges have categories of their own."""

_NO_KERNEL = {"bitcast", "call", "conditional", "constant", "get-tuple-element", "opt-barrier", "parameter"}
_NO_KERNEL |= {"partition-id", "tuple", "while"}
_SLICES = ("dynamic-slice", "slice")
_SMALL = 64 * 1024
"""Bytes: kernels that write less do arithmetic on tables, whatever scope they come from."""
_LARGE = 4 * 2**20
"""Bytes: kernels that write as much move rows."""
_COUNTERS = 1024
"""Bytes: what a loop's own arithmetic writes."""
_PARAMETER = re.compile(r"parameter\((\d+)\)")
_GRID = re.compile(r"grid_([xyz]) = (\d+)")
_SCOPES: tuple[tuple[str, Category], ...] = (
    (r"topoep_swiglu", "activations"),
    (r"topoep_(pack|accumulate|store|push|pull|repull)", "pack, accumulate, store"),
    (r"topoep_by_assignment", "gathers and sums"),
    (r"topoep_(layout|demand|plan|weights)", "layout and plan"),
)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch.

    Attributes:
      instruction: that it comes from.
      operands: its arrays, in order.
      category: what it does in a layer.
      num_bytes: read and written, without what lies in slices that nobody takes.
      grid: programs of a Pallas kernel; 0 where the compiler chooses.
      terms: of each sum of a product, 0 of everything else.
      sorts: whether it sorts.
    """

    instruction: Instruction
    operands: tuple[Array, ...]
    category: Category
    num_bytes: int
    grid: int
    terms: int
    sorts: bool

    @property
    def name(self) -> str:
        """The kernel's, or the compiler's."""
        return self.instruction.kernel or self.instruction.name


def is_kernel(instruction: Instruction) -> bool:
    """Whether a step launches a kernel or a copy; collectives and what starts and ends elsewhere are none."""
    opcode = instruction.opcode
    return opcode not in _NO_KERNEL and not opcode.endswith(("-start", "-done", "-update"))


def read_kernel(module: Module, run: Run, instruction: Instruction, phase: str) -> Kernel:
    """What a launch does.

    Args:
      module: the program.
      run: the computation that the instruction stands in.
      instruction: for which `is_kernel`.
      phase: of the loop around it, "" outside of loops.
    """
    inner = list(module.inside(instruction))
    terms = _terms(module, run.computation, instruction)
    grid = math.prod(int(size) for _, size in _GRID.findall(instruction.attributes)) if instruction.kernel else 0
    sorts = any(other.opcode == "sort" or (other.target or "").startswith("__cub$") for other in inner)
    num_bytes = sum(_read_bytes(module, run, instruction)) + _written_bytes(module, instruction)
    shapes = {other.name: other.shape for other in module.computations[run.computation]}
    operands = tuple(array for name in instruction.operands for array in shapes.get(name, ()))
    return Kernel(
        instruction, operands, _category(module, instruction, phase, terms, sorts), num_bytes, grid, terms, sorts
    )


def _category(module: Module, instruction: Instruction, phase: str, terms: int, sorts: bool) -> Category:
    scope = f"{instruction.op_name} {instruction.kernel or ''}"
    written = sum(array.num_bytes for array in instruction.shape)
    expert_gemm = re.search(r"\btopoep_(gmm|wgrad)\b", scope) if instruction.kernel or terms else None
    if expert_gemm and expert_gemm[1] == "gmm":
        return "products of rows"
    if expert_gemm:
        return "weight gradients of mains" if "topoep_push" in scope else "weight gradients of slots"
    if sorts or ("topoep_route" in scope and (terms or written < _LARGE)):
        return "router and sorts"
    if terms:
        return "other products"
    if phase == "push" and written <= _COUNTERS:
        return "counting in loops"
    if written >= _SMALL and _is_fill(module, instruction):
        return "fills"
    if written < _SMALL:
        return "layout and plan"
    for pattern, category in _SCOPES:
        if re.search(pattern, scope):
            return category
    if instruction.opcode == "copy" or written < _LARGE:
        return "other kernels"
    return "gathers and sums"


def _is_fill(module: Module, instruction: Instruction) -> bool:
    """Whether it reads nothing but a few numbers."""
    if instruction.opcode not in ("fusion", "broadcast"):
        return False
    names = {"broadcast", "constant", "parameter", "bitcast", "convert", "tuple", "reshape"}
    body = [inner for called in instruction.calls for inner in module.computations.get(called, ())]
    parameters = [inner for inner in body if inner.opcode == "parameter"]
    return {inner.opcode for inner in body} <= names and all(
        math.prod(array.dims) == 1 for parameter in parameters for array in parameter.shape
    )


def _read_bytes(module: Module, run: Run, instruction: Instruction) -> Iterator[int]:
    """Bytes that an instruction reads of each operand."""
    shapes = {other.name: other.shape for other in module.computations[run.computation]}
    sizes = [sum(array.num_bytes for array in shapes.get(name, ())) for name in instruction.operands]
    if instruction.opcode != "fusion":
        yield from sizes
        return
    body = module.computations[instruction.calls[0]]
    for parameter in body:
        if found := _PARAMETER.search(parameter.text) if parameter.opcode == "parameter" else None:
            yield min(sizes[int(found[1])], _taken(body, parameter.name))


def _taken(body: list[Instruction], name: str) -> int:
    """Bytes of a value that the steps of a fusion take; what is updated in place is not read."""
    taken = 0
    whole = 2**62
    for user in (other for other in body if name in other.operands):
        if user.opcode in _SLICES or (user.opcode == "gather" and user.operands[0] == name):
            taken += sum(array.num_bytes for array in user.shape)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
            continue
        elif user.opcode == "bitcast":
            taken += _taken(body, user.name)
        else:
            return whole
    return taken


def _written_bytes(module: Module, instruction: Instruction) -> int:
    """Bytes of the result, but of an update in place those of the update."""
    if instruction.opcode != "fusion":
        return sum(array.num_bytes for array in instruction.shape)
    body = {other.name: other for other in module.computations[instruction.calls[0]]}
    root = module.computations[instruction.calls[0]][-1]
    parts = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    written = 0
    for part in parts:
        while part.opcode == "bitcast" and part.operands[0] in body:
            part = body[part.operands[0]]
        update = body.get(part.operands[1]) if part.opcode == "dynamic-update-slice" else part
        written += sum(array.num_bytes for array in (update or part).shape)
    return written


def _terms(module: Module, computation: str, instruction: Instruction) -> int:
    """Terms of each sum of the product that an instruction is or holds; 0 where there is none."""
    if instruction.opcode == "dot":
        shapes = {other.name: other.shape for other in module.computations[computation]}
        first = shapes.get(instruction.operands[0], ())
        return math.prod(first[0].dims[dim] for dim in instruction.contracted) if first else 0
    inner = ((called, other) for called in instruction.calls for other in module.computations.get(called, ()))
    return max((_terms(module, called, other) for called, other in inner), default=0)


def is_float(array: Array) -> bool:
    """Whether it holds floating-point numbers."""
    return array.dtype.startswith(("bf", "f"))
