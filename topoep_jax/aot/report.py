"""What a compiled program needs and does, as JSON and as text."""

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from topoep_jax.aot import forecast_text
from topoep_jax.aot.compiler import Program
from topoep_jax.aot.forecast import MS, SKEWS, Forecast, planned_work
from topoep_jax.aot.host import HostRead, host_reads, num_host_reads
from topoep_jax.aot.kernels import is_kernel
from topoep_jax.aot.layer import LayerProgram
from topoep_jax.aot.prices import US, Prices
from topoep_jax.aot.schedule import Collective, collectives
from topoep_jax.aot.steps import kernels, read_steps
from topoep_jax.aot.targets import Target
from topoep_jax.cli.output import plural, table
from topoep_jax.rates import Rates

_MIB = 2**20
_MOST_BUFFERS = 8
_REPLICA_PHASES = ("pull", "repull", "push")


@dataclasses.dataclass(frozen=True)
class Report:
    """A compiled program, read.

    Attributes:
      program: the program.
      target: the GPUs.
      layer: what it is made of; None for a program of the user's.
      worst_case: the layer in the design to compare with, or None.
      collectives: of the program.
      reads: by the host.
      forecasts: by skew of the demand that is planned for; all are one where the program has no layer.
    """

    program: Program
    target: Target
    layer: LayerProgram | None
    worst_case: LayerProgram | None
    collectives: list[Collective]
    reads: list[HostRead]
    forecasts: dict[float, Forecast]

    @classmethod
    def of(
        cls,
        program: Program,
        target: Target,
        num_domains: int,
        layer: LayerProgram | None = None,
        worst_case: LayerProgram | None = None,
        *,
        rates: Rates | None = None,
    ) -> "Report":
        """Reads a program; plans a microbatch of each skew for the largest layer that it has.

        Args:
          program: the program.
          target: the GPUs.
          num_domains: nodes that it spans.
          layer: see `Report`.
          worst_case: see `Report`.
          rates: constants of the GPU.
        """
        steps = read_steps(program)
        prices = Prices(
            rates or Rates(), target.hardware, target.memory_bandwidth, program.num_devices, num_domains, None
        )
        forecasts = dict.fromkeys(SKEWS, Forecast(steps, prices))
        if program.layers:
            config, tokens = max(program.layers, key=lambda layer: layer[0].expert_size * layer[0].num_experts)
            config = dataclasses.replace(config, hardware=target.hardware)
            for skew in SKEWS:
                work = planned_work(config, tokens, skew)
                forecasts[skew] = Forecast(steps, dataclasses.replace(prices, work=work))
        return cls(program, target, layer, worst_case, collectives(program), host_reads(program), forecasts)

    @property
    def forecast(self) -> Forecast:
        """Of the last of `SKEWS`."""
        return self.forecasts[SKEWS[-1]]

    @property
    def flops_ratio(self) -> float | None:
        """Rows that the expert GEMMs compute over rows that there are, of the worst skew; None without a layer.

        From the grid of the kernels, which skip blocks that hold no row. `ragged_dot` computes every row for every
        instance.
        """
        if self.layer is None:
            return None
        config = self.layer.config
        if config.gemm == "ragged_dot":
            assignments = self.layer.tokens * config.top_k
            return config.num_instances * sum(config.window_rows(assignments)) / assignments
        works = [forecast.prices.work for forecast in self.forecasts.values()]
        return max(work.flops_ratio for work in works if work)

    @property
    def num_kernels(self) -> int:
        """Kernels and copies that one run launches."""
        return sum(times for _, times in kernels(self.forecast.steps))

    @property
    def device_bytes(self) -> int:
        """What one GPU holds of the program: arguments, results and temporaries."""
        memory = self.program.memory
        return memory.arguments + memory.outputs - memory.aliases + memory.temp

    def collective_us(self, collective: Collective) -> float:
        """Predicted time of one run, for the plan of the last of `SKEWS`."""
        return self.forecast.prices.collective(collective) / US

    def gemm_us(self, collective: Collective) -> float:
        """Predicted time of the expert GEMMs over one run."""
        priced = {step.name: (step, times) for step, times in kernels(self.forecast.steps)}
        under = [(*priced[gemm.name], gemm.turns) for gemm in collective.gemms if gemm.name in priced]
        return sum(self.forecast.prices.step(step) * turns for step, _, turns in under) / US

    def json(self) -> dict[str, Any]:
        """Bytes are those of one device; times are predicted, in microseconds or milliseconds as their names say."""
        memory = self.program.memory
        found: dict[str, Any] = {
            "temp_bytes": memory.temp,
            "argument_bytes": memory.arguments,
            "output_bytes": memory.outputs,
            "device_bytes": self.device_bytes,
            "flops_ratio": self.flops_ratio,
            "kernels": self.num_kernels,
            "forecast_ms": self._by_skew(lambda forecast: forecast.total_ps / MS),
            "forward_ms": self._by_skew(lambda forecast: forecast.forward_ps / MS),
            "bound_ms": self._by_skew(lambda forecast: forecast.bound_ps / MS),
            "range_ms": self._by_skew(lambda forecast: [ps / MS for ps in forecast.range_ps]),
            "categories_us": self._by_skew(lambda forecast: _us(forecast.categories)),
            "waits_us": self._by_skew(lambda forecast: _us(forecast.waits)),
            "losses": self._by_skew(lambda forecast: [dataclasses.asdict(loss) for loss in forecast.losses]),
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

    def _by_skew(self, value: Callable[[Forecast], Any]) -> dict[str, Any]:
        return {f"{skew:g}": value(forecast) for skew, forecast in self.forecasts.items()}

    def text(self) -> Iterator[str]:
        """What the command prints, piece by piece."""
        yield self._memory()
        if (ratio := self.flops_ratio) is not None:
            skews = ", ".join(self._by_skew(str))
            yield f"\nFLOPs of the expert GEMMs: {ratio:.3f} x ideal (from the grid, worst of skews {skews})\n"
        yield forecast_text.tables(self.forecasts if self.program.layers else {SKEWS[0]: self.forecast})
        yield self._collectives()
        yield self._launches()
        yield self._host_reads()

    def _memory(self) -> str:
        memory = self.program.memory
        sizes = {"temporaries": memory.temp, "arguments": memory.arguments, "results": memory.outputs}
        if memory.aliases:
            sizes["of these in the arguments' memory"] = memory.aliases
        sizes["together"] = self.device_bytes
        if self.layer is not None:
            sizes["layer: temporaries and results without parameter gradients"] = self.layer.layer_bytes
        if self.worst_case is not None:
            sizes["the same of the design with worst-case rows"] = self.worst_case.layer_bytes
        text = table(["memory of one GPU", "MiB"], [[name, _mib(size)] for name, size in sizes.items()])
        share = self.device_bytes / self.target.memory_bytes
        text += f"{share:.0%} of the {_mib(self.target.memory_bytes)} MiB of an {self.target.kind}"
        text += ": it does not fit\n" if share > 1 else "; allocators, NCCL and the rest of a model need theirs\n"
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
                    f"{under / 1e3:.3f}" if collective.gemms else "-",
                ]
            )
        head = ["collective", "kind", "under", "times", "MiB at most", "predicted ms", "GEMM ms"]
        return f"\n{table(head, rows, left=3)}"

    def _launches(self) -> str:
        module = self.program.module
        steps = list(kernels(self.forecast.steps))
        in_graphs = sum(times for step, times in steps if step.in_graph)
        lines = [
            f"launches of one run: {sum(c.times for c in self.collectives)} collectives and"
            f" {self.num_kernels:,} kernels and copies ({in_graphs:,} of them in"
            f" {plural(sum(t.kind == 'kCommandBuffer' for t in self.program.thunks), 'CUDA graph')})",
            "calls: " + (", ".join(f"{n} x {name}" for name, n in custom_calls(self.program).items()) or "none"),
        ]
        for run in module.scheduled():
            for loop in module.computations[run.computation]:
                if loop.opcode == "while":
                    count = sum(is_kernel(step) for part in loop.calls for step in module.computations[part])
                    turns = (
                        "a number of turns that nobody knows" if loop.trip_count is None else f"{loop.trip_count} turns"
                    )
                    lines.append(f"loop of {turns} of {count} kernels, run {run.times} x: {loop.name}")
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


def _us(found: dict[str, int]) -> dict[str, float]:
    return {name: ps / US for name, ps in found.items()}


def _gemms(collective: Collective) -> str:
    counts = collections.Counter(gemm.kind for gemm in collective.gemms)
    return ", ".join(f"{n} {kind}" for kind, n in counts.items()) or "nothing"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.1f}" if num_bytes < 100 * _MIB else f"{num_bytes / _MIB:,.0f}"
