"""Compiles a program for GPUs on a machine without one, and reads what the compiler made of it.

Tests take the fixture `aot` of conftest.py, which skips (or, with --require-cuda, fails) where a package is missing:

    def test_a_layer(aot):
        mesh = aot.mesh(4, 8)
        x = aot.struct((256, 64), jnp.bfloat16, mesh, P("ep"))
        program = aot.compile(jax.shard_map(layer, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")), x)
        assert program.targets() == ["topoep_plan"]

A CUDA plugin at JAX's version and ptxas do the work; the handlers are the real ones, of libtopoep_cuda.so.
"""

import dataclasses
import importlib.metadata
import importlib.util
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TARGET_CONFIG = Path(__file__).with_name("h200.txtpb")

# What computes and moves data on the device. Whatever else shows up in a program has to be looked at before it is let
# in here, for it may hand data to the host.
OPCODES = """
    abs add all-gather all-gather-done all-gather-start all-reduce all-reduce-done all-reduce-start all-to-all and
    async-done async-start bitcast bitcast-convert broadcast call clamp compare concatenate constant convert copy
    copy-done copy-start cosine custom-call divide dot dynamic-slice dynamic-update-slice exponential
    exponential-minus-one floor fusion gather get-tuple-element iota is-finite log log-plus-one logistic maximum
    minimum multiply negate not opt-barrier or pad parameter partition-id popcnt power ragged-all-to-all reduce
    reduce-scatter reduce-window remainder reshape reverse round-nearest-even rsqrt scatter select shift-left
    shift-right-arithmetic shift-right-logical sign sine slice sort sqrt subtract tanh transpose tuple xor
"""
THUNKS = """
    AllGather AllGatherDone AllGatherStart AllReduce AllReduceDone AllReduceStart AllToAll AllToAllDone
    AllToAllStart AsyncDone AsyncStart CommandBuffer Copy CubSort CustomCall CustomKernel Gemm Kernel
    Memset32BitValue Memzero RaggedAllToAll RaggedAllToAllDone RaggedAllToAllStart ReduceScatter ReduceScatterDone
    ReduceScatterStart Sequential WaitForStreams
"""

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (?:\(.*?\)|\S+) ([\w-]+)\(")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_THUNK = re.compile(r"^( *)(\d+): (\w+)")
_METADATA = re.compile(r"profile_annotation: \"([^\"]*)\"\n(?:\s+thunk_id: (\d+)\n)?\s+\}\n\s+thunk_kind: \"(\w+)\"")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of the optimized program."""

    name: str
    opcode: str
    target: str | None
    """Of a custom call."""
    text: str


@dataclasses.dataclass(frozen=True)
class Thunk:
    """One step of the executable."""

    kind: str
    name: str
    """Of the HLO instruction it came from; empty where XLA does not say."""
    command_buffer: bool
    """Whether it is part of a CUDA graph."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program: text of the optimized HLO, memory statistics of a device (bytes), thunks in order."""

    text: str
    memory: Any
    thunks: list[Thunk]

    def instructions(self) -> Iterator[Instruction]:
        """Of all computations, each in its schedule's order."""
        yield from map(_instruction, filter(_INSTRUCTION.match, self.text.splitlines()))

    def entry(self) -> list[Instruction]:
        """Of the entry computation, in the order of the schedule."""
        body = re.split(r"^ENTRY ", self.text, flags=re.MULTILINE)[1].partition("\n}")[0]
        return [_instruction(line) for line in body.splitlines() if _INSTRUCTION.match(line)]

    def opcodes(self) -> set[str]:
        """Of all computations."""
        return {instruction.opcode for instruction in self.instructions()}

    def doubtful(self) -> set[str]:
        """Opcodes and kinds of thunks that are not known to stay on the device."""
        kinds = {thunk.kind.removeprefix("k") for thunk in self.thunks}
        return self.opcodes().difference(OPCODES.split()) | kinds.difference(THUNKS.split())

    def targets(self) -> list[str]:
        """Targets of the entry computation's custom calls, in order."""
        return [instruction.target for instruction in self.entry() if instruction.target is not None]

    def thunks_of(self, target: str) -> list[Thunk]:
        """Thunks of the custom calls with this target."""
        names = {instruction.name for instruction in self.instructions() if instruction.target == target}
        return [thunk for thunk in self.thunks if thunk.name in names]


class Compiler:
    """Ahead-of-time compilation for H200 GPUs with the handlers of the CUDA library registered.

    Raises:
      ImportError: if a package is missing; the message names it.
    """

    def __init__(self) -> None:
        plugins = [name for name in ("xla_cuda13", "xla_cuda12") if _has("jax_plugins", name)]
        if not plugins:
            raise ImportError(f"no CUDA plugin of JAX: install jax-cuda13-plugin=={jax.__version__}")
        package = f"jax-{plugins[0].removeprefix('xla_')}-plugin"
        if importlib.metadata.version(package) != jax.__version__:
            raise ImportError(f"{package} is {importlib.metadata.version(package)} and jax {jax.__version__}")
        from topoep_jax import _cuda

        self.library = _cuda.load()
        self._config = TARGET_CONFIG.read_text()

    def mesh(self, hosts: int, gpus: int, axis: str = "ep") -> Mesh:
        """One slice of `hosts` hosts with `gpus` GPUs each, on one axis, host by host."""
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=self._config, topology=f"1x{hosts}x{gpus}"
        )
        return Mesh(np.array(topology.devices), (axis,))

    def struct(
        self, shape: tuple[int, ...], dtype: Any, mesh: Mesh, spec: PartitionSpec | None = None
    ) -> jax.ShapeDtypeStruct:
        """An argument of `compile`: shape and dtype of the whole array, replicated where `spec` is left out."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec or PartitionSpec()))

    def compile(self, function: Callable, *args: Any, options: dict[str, Any] | None = None) -> Program:
        """Compiles `function` (jitted, or not yet) for arguments that are pytrees of `struct`; options are XLA's."""
        jitted = function if hasattr(function, "lower") else jax.jit(function)
        with tempfile.TemporaryDirectory() as folder:
            compiled = jitted.lower(*args).compile({"xla_dump_to": folder, **(options or {})})
            return Program(compiled.as_text(), compiled.memory_analysis(), _thunks(Path(folder)))


def _has(*parts: str) -> bool:
    try:
        return importlib.util.find_spec(".".join(parts)) is not None
    except ModuleNotFoundError:
        return False


def _instruction(line: str) -> Instruction:
    match = _INSTRUCTION.match(line)
    assert match is not None, line
    target = _TARGET.search(line) if match[2] == "custom-call" else None
    return Instruction(match[1], match[2], target and target[1], line.strip())


def _thunks(folder: Path) -> list[Thunk]:
    """From the last list of thunks that the compiler dumped, named by its metadata."""
    listings = {path.name.rpartition(".thunk_")[2]: path for path in folder.glob("*.thunk_*.txt")}
    listing = listings.get("sequence_after_thunk_passes.txt", listings["sequence.txt"])
    # Thunks that the passes add have no number, and sequences share number 0.
    names = {
        (int(number or 0), kind): name
        for name, number, kind in _METADATA.findall(listings["metadata.txt"].read_text())
        if kind != "kCommandBuffer"
    }
    thunks, parents = [], []
    for indent, number, kind in map(re.Match.groups, filter(None, map(_THUNK.match, listing.read_text().splitlines()))):
        parents = [(depth, parent) for depth, parent in parents if depth < len(indent)]
        inside = any(parent == "kCommandBuffer" for _, parent in parents)
        thunks.append(Thunk(kind, names.get((int(number), kind), ""), inside))
        parents.append((len(indent), kind))
    return thunks
