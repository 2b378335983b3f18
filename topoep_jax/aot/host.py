"""Where a program hands data to the host, or might: what has to be zero for the device to run ahead of it."""

import dataclasses

from topoep_jax.aot.compiler import Program
from topoep_jax.aot.schedule import collectives, is_on_device_kernel

# What computes and moves data on the device. Whatever else shows up in a program has to be looked at before it is let
# in here, for it may hand data to the host.
OPCODES = """
    abs add all-gather all-gather-done all-gather-start all-reduce all-reduce-done all-reduce-start all-to-all
    and async-done async-start async-update bitcast bitcast-convert broadcast call call-done call-start clamp
    collective-permute collective-permute-done collective-permute-start compare concatenate conditional constant
    convert copy copy-done copy-start cosine custom-call divide dot dynamic-slice dynamic-update-slice
    exponential exponential-minus-one floor fusion fusion-done fusion-start gather get-tuple-element iota
    is-finite log log-plus-one logistic maximum minimum multiply negate not opt-barrier or pad parameter
    partition-id popcnt power ragged-all-to-all ragged-all-to-all-done ragged-all-to-all-start reduce
    reduce-scatter reduce-window remainder reshape reverse round-nearest-even rsqrt scatter select shift-left
    shift-right-arithmetic shift-right-logical sign sine slice sort sqrt subtract tanh transpose tuple while xor
"""
THUNKS = """
    AllGather AllGatherDone AllGatherStart AllReduce AllReduceDone AllReduceStart AllToAll AllToAllDone
    AllToAllStart AsyncDone AsyncStart CollectivePermute CommandBuffer Conditional Copy CubSort CustomCall
    CustomKernel DynamicSliceFusion Gemm Kernel Memset32BitValue Memzero PartitionId RaggedAllToAll
    RaggedAllToAllDone RaggedAllToAllStart ReduceScatter ReduceScatterDone ReduceScatterStart Sequential
    WaitForStreams While
"""


@dataclasses.dataclass(frozen=True)
class HostRead:
    """One place where the host reads from the device, and so waits for it.

    Attributes:
      what: instruction or thunk.
      reason: why it reads, in words.
      times: how often it runs; in a loop whose turns nobody knows, of one turn.
    """

    what: str
    reason: str
    times: int = 1


def host_reads(program: Program) -> list[HostRead]:
    """Every place where the host reads, and everything that is not known to stay on the device."""
    return [*_control(program), *_exchanges(program), *_unknown(program)]


def num_host_reads(reads: list[HostRead]) -> int:
    """How often the host reads in one run, at least."""
    return sum(read.times for read in reads)


def _control(program: Program) -> list[HostRead]:
    """Loops and branches that the host steers, and calls into Python."""
    in_graphs = {thunk.name for thunk in program.thunks if thunk.command_buffer}
    reads = []
    for run in program.module.scheduled():
        for instruction in program.module.computations[run.computation]:
            name = instruction.name
            if instruction.opcode == "while" and instruction.trip_count is None and name not in in_graphs:
                reads.append(HostRead(name, "loop whose number of turns the host reads, at each turn", run.times))
            elif instruction.opcode == "conditional" and name not in in_graphs:
                reads.append(HostRead(name, "branch outside of CUDA graphs, which the host reads", run.times))
            elif "callback" in (instruction.target or ""):
                reads.append(HostRead(name, f"call into Python ({instruction.target})", run.times))
    return reads


def _exchanges(program: Program) -> list[HostRead]:
    return [
        HostRead(
            collective.name,
            f"{collective.phase}: ragged_all_to_all without the device's kernel, its sizes go to the host",
            collective.times,
        )
        for collective in collectives(program)
        if collective.kind == "ragged-all-to-all" and not is_on_device_kernel(collective, program.options)
    ]


# Slices that follow a loop's turn: the host knows the turn, and asks the device only to check XLA's own arithmetic.
_CHECKED_SLICES = "xla_gpu_experimental_dynamic_slice_fusion_verify_offsets"


def _unknown(program: Program) -> list[HostRead]:
    opcodes = {instruction.opcode for instruction in program.module.instructions()}
    kinds = {thunk.kind.removeprefix("k") for thunk in program.thunks}
    known = set(THUNKS.split()) - ({"DynamicSliceFusion"} if program.options.get(_CHECKED_SLICES) == "true" else set())
    doubtful = sorted(opcodes.difference(OPCODES.split()) | kinds - known)
    return [HostRead(what, "not known to stay on the device") for what in doubtful]
