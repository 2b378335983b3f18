"""What a compiled program needs and does, as JSON and as text."""

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

from topoep_jax.aot.compiler import Program
from topoep_jax.aot.forecast import SKEWS, buffer_ps, collective_ps, gemm_ps, planned_work
from topoep_jax.aot.hlo import Instruction
from topoep_jax.aot.host import HostRead, host_reads, num_host_reads
from topoep_jax.aot.layer import LayerProgram
from topoep_jax.aot.schedule import Collective, collectives
from topoep_jax.cli.output import plural, table
from topoep_jax.plan.hardware import Hardware
from topoep_jax.simulate.work import Work

_MIB = 2**20
_US = 1_000_000  # Picoseconds.
_MOST_BUFFERS = 8
_NO_KERNEL = """
    bitcast call conditional constant get-tuple-element opt-barrier parameter partition-id tuple while
"""
_REPLICA_PHASES = ("pull", "repull", "push")


@dataclasses.dataclass(frozen=True)
class Report:
    """A compiled program, read.

    Attributes:
      program: the program.
      hardware: rates that times are predicted from.
      num_domains: nodes that it spans.
      layer: what it is made of; None for a program of the user's.
      works: of its layer's plans, by skew; empty without a layer.
      worst_case: the layer in the design to compare with, or None.
      collectives: of the program.
      reads: by the host.
    """

    program: Program
    hardware: Hardware
    num_domains: int
    layer: LayerProgram | None
    works: dict[float, Work]
    worst_case: LayerProgram | None
    collectives: list[Collective]
    reads: list[HostRead]

    @classmethod
    def of(
        cls,
        program: Program,
        hardware: Hardware,
        num_domains: int,
        layer: LayerProgram | None = None,
        worst_case: LayerProgram | None = None,
    ) -> "Report":
        """Reads a program; plans two microbatches for a layer."""
        works = {skew: planned_work(layer.config, layer.tokens, skew) for skew in SKEWS} if layer else {}
        reads = host_reads(program)
        return cls(program, hardware, num_domains, layer, works, worst_case, collectives(program), reads)

    @property
    def flops_ratio(self) -> float | None:
        """Rows that the expert GEMMs compute over rows that there are, of the worse skew; None without a layer.

        From the grid of the kernels, which skip blocks that hold no row. `ragged_dot` computes every row for every
        instance.
        """
        if self.layer is None:
            return None
        config = self.layer.config
        if config.gemm == "ragged_dot":
            assignments = self.layer.tokens * config.top_k
            return config.num_instances * sum(config.window_rows(assignments)) / assignments
        return max(work.flops_ratio for work in self.works.values())

    def collective_us(self, collective: Collective) -> float:
        """Predicted time of one run, for the plan of the last of `SKEWS`."""
        if not self.works:
            return buffer_ps(collective, self.program.num_devices, self.num_domains, self.hardware) / _US
        return collective_ps(collective, self.works[SKEWS[-1]]) / _US

    def gemm_us(self, collective: Collective) -> float | None:
        """Predicted time of the expert GEMMs over one run; None where there is no layer to plan for."""
        if not self.works:
            return None
        pieces = collective.turns if collective.phase == "push" else 1
        return sum(gemm_ps(gemm, self.works[SKEWS[-1]], pieces) for gemm in collective.gemms) / _US

    def json(self) -> dict[str, Any]:
        """Bytes are those of one device; times are predicted, in microseconds."""
        memory = self.program.memory
        found: dict[str, Any] = {
            "temp_bytes": memory.temp,
            "argument_bytes": memory.arguments,
            "output_bytes": memory.outputs,
            "flops_ratio": self.flops_ratio,
            "collectives": [
                {
                    "kind": collective.kind,
                    "phase": collective.phase,
                    "bytes": collective.num_bytes,
                    "overlapped": collective.overlapped,
                    "times": collective.times,
                    "predicted_us": self.collective_us(collective),
                    "predicted_gemm_us": self.gemm_us(collective),
                }
                for collective in self.collectives
            ],
            "custom_calls": custom_calls(self.program),
            "host_reads": num_host_reads(self.reads),
            "host_read_reasons": [f"{read.what}: {read.reason}" for read in self.reads],
            "layer_bytes": self.layer and self.layer.layer_bytes,
        }
        if self.layer and self.worst_case:
            found["worst_case_layer_bytes"] = self.worst_case.layer_bytes
            found["worst_case_ratio"] = self.worst_case.layer_bytes / self.layer.layer_bytes
        return found

    def text(self) -> Iterator[str]:
        """What the command prints, piece by piece."""
        yield self._memory()
        if (ratio := self.flops_ratio) is not None:
            yield f"\nFLOPs of the expert GEMMs: {ratio:.3f} x ideal (from the grid, worse of skews {SKEWS})\n"
        yield self._collectives()
        yield self._launches()
        yield self._host_reads()

    def _memory(self) -> str:
        memory = self.program.memory
        sizes = {"temporaries": memory.temp, "arguments": memory.arguments, "results": memory.outputs}
        if memory.aliases:
            sizes["of these in the arguments' memory"] = memory.aliases
        if self.layer is not None:
            sizes["layer: temporaries and results without parameter gradients"] = self.layer.layer_bytes
        if self.worst_case is not None:
            sizes["the same of the design with worst-case rows"] = self.worst_case.layer_bytes
        text = table(["memory of one GPU", "MiB"], [[name, _mib(size)] for name, size in sizes.items()])
        if self.layer is not None and self.worst_case is not None:
            text += f"worst-case rows need {self.worst_case.layer_bytes / self.layer.layer_bytes:.1f} x the memory\n"
        largest = [
            [buffer.instruction, buffer.shape.partition("{")[0], buffer.role, _mib(buffer.num_bytes)]
            for buffer in self.program.buffers[:_MOST_BUFFERS]
        ]
        return f"{text}\n{table(['largest buffers', 'shape', 'role', 'MiB'], largest, left=3)}"

    def _collectives(self) -> str:
        rows = []
        for collective in self.collectives:
            under = self.gemm_us(collective)
            rows.append(
                [
                    collective.phase,
                    collective.kind + ("" if collective.asynchronous else " (sync)"),
                    _gemms(collective),
                    str(collective.times),
                    _mib(collective.num_bytes),
                    f"{self.collective_us(collective) / 1e3:.3f}",
                    "-" if under is None or not collective.gemms else f"{under / 1e3:.3f}",
                ]
            )
        head = ["collective", "kind", "under", "times", "MiB at most", "predicted ms", "GEMM ms"]
        return f"\n{table(head, rows, left=3)}"

    def _launches(self) -> str:
        module = self.program.module
        runs = list(module.scheduled())
        kernels = {run.computation: sum(map(_is_kernel, module.computations[run.computation])) for run in runs}
        lines = [
            f"launches of one run: {sum(c.times for c in self.collectives)} collectives and"
            f" {sum(run.times * kernels[run.computation] for run in runs):,} kernels and copies"
            f" (in {plural(sum(t.kind == 'kCommandBuffer' for t in self.program.thunks), 'CUDA graph')} and between)",
            "calls: " + (", ".join(f"{n} x {name}" for name, n in custom_calls(self.program).items()) or "none"),
        ]
        for run in runs:
            for loop in module.computations[run.computation]:
                if loop.opcode == "while":
                    turns = (
                        "a number of turns that nobody knows" if loop.trip_count is None else f"{loop.trip_count} turns"
                    )
                    lines.append(f"loop of {turns} of {kernels[loop.body]} kernels, run {run.times} x: {loop.name}")
        if fixed := [c for c in self.collectives if c.phase in _REPLICA_PHASES]:
            names = ", ".join(f"{c.times} x {c.phase}" for c in fixed)
            lines.append(
                f"with an empty plan all of these launches stay; {names} then carry nothing, and no block of a slot is"
                " computed"
            )
        return "\n" + "\n".join(lines) + "\n"

    def _host_reads(self) -> str:
        if not self.reads:
            return "host reads: 0\n"
        reads = "".join(f"  {read.times} x {read.what}: {read.reason}\n" for read in self.reads)
        return f"host reads: {num_host_reads(self.reads)}\n{reads}"


def custom_calls(program: Program) -> dict[str, int]:
    """How often the program's text has each target of a custom call; Pallas kernels go by their own names."""
    counts = collections.Counter(
        instruction.kernel or instruction.target or ""
        for instruction in program.module.instructions()
        if instruction.opcode == "custom-call"
    )
    return dict(sorted(counts.items()))


def _is_kernel(instruction: Instruction) -> bool:
    opcode = instruction.opcode
    return opcode not in _NO_KERNEL.split() and not opcode.endswith(("-start", "-done"))


def _gemms(collective: Collective) -> str:
    counts = collections.Counter(gemm.kind for gemm in collective.gemms)
    return ", ".join(f"{n} {kind}" for kind, n in counts.items()) or "nothing"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.1f}" if num_bytes < 100 * _MIB else f"{num_bytes / _MIB:,.0f}"
