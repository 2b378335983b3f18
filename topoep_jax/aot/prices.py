"""What a step of the compiled program takes: picoseconds on the busiest rank, from a plan and the constants of a GPU.

Nothing here is measured. docs/forecast.md has the formulas, `topoep_jax.rates` the constants and their sources.
"""

import dataclasses
import functools
import math
import re

import numpy as np

from topoep_jax.aot.kernels import Kernel, is_float
from topoep_jax.aot.schedule import Collective
from topoep_jax.aot.steps import Step
from topoep_jax.plan.hardware import Hardware
from topoep_jax.plan.links import busiest_direction, link_ps, moved_ps
from topoep_jax.rates import Rates
from topoep_jax.simulate.work import Work

US = 1_000_000
"""Picoseconds."""
_OUT = re.compile(r"(dispatch|again|grad)_([12])(_forward)?$")
_BACK = re.compile(r"(combine|home)_([12])(_gather)?$")
_AREA = 128 * 256
"""Elements of the largest tile of a product, whose 64 terms keep the tensor cores busy for 1,024 cycles."""


@dataclasses.dataclass(frozen=True)
class Prices:
    """Times of steps.

    Attributes:
      rates: constants of the GPU.
      hardware: rates of its links.
      memory_bandwidth: of the GPU, bytes per second.
      num_ranks: R, that the program runs on.
      num_domains: nodes that it spans.
      work: of the plan; None for a program that is no layer, whose buffers then count as full.
    """

    rates: Rates
    hardware: Hardware
    memory_bandwidth: int
    num_ranks: int
    num_domains: int
    work: Work | None

    def step(self, step: Step) -> int:
        """Picoseconds of a kernel, or of a call that plans, pulls or pushes."""
        if step.kernel is None:
            return self._call(step)
        launch = self.rates.graph_kernel_us if step.in_graph else self.rates.kernel_us
        return max(round(launch * US), self._kernel(step.kernel))

    def _kernel(self, kernel: Kernel) -> int:
        match kernel.category:
            case "products of rows":
                return self._rows(kernel)
            case "weight gradients of mains" | "weight gradients of slots":
                return self._weight_gradient(kernel)
        if kernel.sorts:
            return round(self.rates.sort_us * US)
        memory = self._memory(kernel.num_bytes)
        if kernel.terms:
            return max(memory, self._spread(kernel))
        match kernel.instruction.kernel:
            case "topoep_empty":
                return 0
            case "topoep_pick" | "topoep_add":
                return self._memory(self._touched(kernel) * _row_bytes(kernel)) if self.work else memory
            case "topoep_pack":
                return self._memory(2 * self._most_pulled() * _row_bytes(kernel)) if self.work else memory
            case "topoep_accumulate":
                return (
                    self._memory(self._most_accumulated(kernel.instruction.shape[0].dims[0]) * _row_bytes(kernel))
                    if self.work
                    else memory
                )
        return memory

    def collective(self, collective: Collective) -> int:
        """Picoseconds of one run: of the plan's rows or replicas, else of its whole buffer."""
        return round(self.rates.collective_us * US) + self.wire(collective)

    def wire(self, collective: Collective) -> int:
        """The same without what any collective takes."""
        counts = _counts(collective.phase, self.work) if self.work else None
        if counts is None:
            rounds = 2 if collective.kind == "all-reduce" else 1
            total = rounds * collective.num_bytes * (self.num_ranks - 1) // self.num_ranks
            one_domain = self.num_domains == 1
            return link_ps(total, self.hardware.intra_fs_per_byte if one_domain else self.hardware.inter_fs_per_byte)
        sent = collective.operands[0]  # [rows, ...] or [replicas, ...]
        return self._moved(counts * (sent.num_bytes // sent.dims[0]))

    def _call(self, step: Step) -> int:
        fixed = self.rates.plan_us if step.phase == "plan" else self.rates.call_us
        return round(fixed * US) + self.call_wire(step)

    def call_wire(self, step: Step) -> int:
        """Picoseconds in which the links carry what a call moves."""
        if self.work is None or step.phase == "plan":
            return 0
        pushed = step.phase == "push"
        return self._moved(self.work.replicas.T * step.replica_bytes if pushed else self.work.pulled)

    def balanced(self, kernel: Kernel) -> int:
        """What a product would take at the sustained rate, were its rows spread evenly over the ranks."""
        return round(self._flops(kernel) / self.rates.sustained_tflops)

    def _moved(self, moved: np.ndarray) -> int:
        topology = self.work.config.topology if self.work else None
        assert topology is not None
        inter, intra = self.hardware.inter_fs_per_byte, self.hardware.intra_fs_per_byte
        return moved_ps(moved, topology, inter, intra, busiest_direction)

    def _memory(self, num_bytes: float) -> int:
        return round(num_bytes * 1e12 / (self.rates.memory_share * self.memory_bandwidth))

    def _cycles(self, terms: float, area: float) -> float:
        """Of a tile with so many elements, each a sum of so many terms."""
        share = 1.0 if area >= _AREA else self.rates.medium_tile if area >= _AREA // 2 else self.rates.small_tile
        return terms / 64 * area / 32 / share

    def _ps(self, cycles: float) -> int:
        return round(cycles * 1000 / self.rates.clock_ghz)

    def _spread(self, kernel: Kernel) -> int:
        """A product that XLA tiles, as if its autotuner had filled all multiprocessors; f32 is half as fast."""
        result = kernel.instruction.shape[0]
        cycles = self._cycles(kernel.terms, _AREA) * math.prod(result.dims) / _AREA / self.rates.multiprocessors
        slower = 2 if any(array.dtype == "f32" for array in kernel.operands) else 1
        return self._ps(slower * cycles / self.rates.rows_efficiency + self.rates.tile_cycles)

    @staticmethod
    def _count(kernel: Kernel) -> int:
        """Tiles of a product without a grid."""
        return kernel.grid or max(math.prod(kernel.instruction.shape[0].dims) // _AREA, 1)

    def _rows(self, kernel: Kernel) -> int:
        result = kernel.instruction.shape[0]
        tiles = self._count(kernel)
        filled = self._busiest(result.dims[0]) / result.dims[0]
        cycles = self._cycles(_depth(kernel), math.prod(result.dims) / tiles) / self.rates.rows_efficiency
        waves = math.ceil(math.ceil(tiles * filled) / self.rates.multiprocessors)
        return self._ps(waves * (cycles + self.rates.tile_cycles))

    def _weight_gradient(self, kernel: Kernel) -> int:
        """Tiles of the longest instance where all run at once, else all that there is to do, and a last tile."""
        rows = self._instance_rows(kernel)
        result = kernel.instruction.shape[0]
        tiles = max(self._count(kernel) // rows.shape[-1], 1)
        area = math.prod(result.dims) / rows.shape[-1] / tiles
        each = self._cycles(1, area) / self.rates.wgrad_efficiency * rows + self.rates.tile_cycles * (rows > 0)
        longest = each.max(axis=-1)
        if tiles * rows.shape[-1] <= self.rates.multiprocessors:
            return self._ps(float(longest.max()))
        shared = each.sum(axis=-1) * tiles / self.rates.multiprocessors + longest / 2
        return self._ps(float(np.maximum(shared, longest).max()))

    def _instance_rows(self, kernel: Kernel) -> np.ndarray:
        """[R, instances] rows that each gradient is a sum over."""
        result = kernel.instruction.shape[0]
        sums = result.dims[0] if len(result.dims) == 3 else 1
        if self.work is None:
            return np.full((1, sums), sum(_pair_rows(kernel)) / sums)
        config = self.work.config
        sizes = config.window_rows(self.work.num_assignments)
        chunks = [sizes.index(rows) for rows in _pair_rows(kernel) if rows in sizes]
        # Where a rank has as many slots as mains, the scope tells them apart.
        of_slots = kernel.category == "weight gradients of slots" and config.num_slots > 0
        instances = slice(config.num_mains, None) if of_slots else slice(0, config.num_mains)
        return self.work.aligned[chunks][:, :, instances].sum(axis=0)

    def _busiest(self, buffer_rows: int) -> float:
        """Rows that the busiest rank computes of a receive buffer, by the buffer's size."""
        if self.work is None:
            return buffer_rows
        sizes = self.work.config.window_rows(self.work.num_assignments)
        if buffer_rows not in sizes:
            return buffer_rows
        return int(self.work.aligned[sizes.index(buffer_rows)].sum(-1).max())

    def _flops(self, kernel: Kernel) -> float:
        """Of the mean rank."""
        result = kernel.instruction.shape[0]
        if kernel.category.startswith("weight gradients"):
            rows = float(self._instance_rows(kernel).sum(axis=-1).mean())
            return 2 * rows * math.prod(result.dims[1:])
        share = 1.0
        if kernel.category == "products of rows" and self.work is not None:
            sizes = self.work.config.window_rows(self.work.num_assignments)
            if result.dims[0] in sizes:
                rows = self.work.rows[sizes.index(result.dims[0])].sum()
                share = float(rows) / self.work.config.num_ranks / result.dims[0]
        return 2 * math.prod(result.dims) * (_depth(kernel) or kernel.terms) * share

    def _touched(self, kernel: Kernel) -> int:
        """Rows that the busiest rank reads and writes while it picks or adds rows by index."""
        assert self.work is not None
        adds, at_gateway = kernel.instruction.kernel == "topoep_add", "topoep_gateway" in kernel.instruction.op_name
        chunks = [self.work.launches(chunk) for chunk in range(len(self.work.rows))]
        sent, forwarded = np.sum(chunks, axis=0)
        if at_gateway:
            arrived = 0 if self.work.tokens is None else self.work.tokens.sum(axis=0)
            written = arrived if adds else forwarded.sum(axis=1)
            return int((forwarded.sum(axis=1) + written).max())
        if adds:
            return int(sent.sum(axis=1).max()) + kernel.instruction.shape[0].dims[0]
        # A token is read again from the cache.
        return int((sent.sum(axis=1) + np.minimum(sent.sum(axis=1), kernel.operands[0].dims[0])).max())

    @functools.cached_property
    def _away(self) -> np.ndarray:
        """[R, R] replicas from the rank of their main."""
        assert self.work is not None
        return self.work.replicas * ~np.eye(self.work.config.num_ranks, dtype=bool)

    def _most_pulled(self) -> int:
        """Most mains of a rank that others hold replicas of."""
        assert self.work is not None
        return int(np.minimum(self._away.sum(axis=1), self.work.config.num_mains).max())

    def _most_accumulated(self, num_mains: int) -> int:
        """Most rows that a rank reads and writes while it adds replicas' gradients: every main's is read."""
        staged = self._away.sum(axis=1)
        return int((num_mains + staged + np.minimum(staged, num_mains)).max())


def _row_bytes(kernel: Kernel) -> int:
    result = kernel.instruction.shape[0]
    return result.num_bytes // result.dims[0]


def _depth(kernel: Kernel) -> int:
    """Terms of each sum in a product of rows: the width of the operand that has the rows."""
    if kernel.terms:
        return kernel.terms
    rows = kernel.instruction.shape[0].dims[0]
    wide = [a.dims[1] for a in kernel.operands if len(a.dims) == 2 and a.dims[0] >= rows and is_float(a)]
    return wide[0] if wide else 0


def _pair_rows(kernel: Kernel) -> list[int]:
    """Rows of each pair (inputs, gradients) that a weight gradient is made of."""
    result = kernel.instruction.shape[0]
    pairs = [a.dims[0] for a in kernel.operands if len(a.dims) == 2 and is_float(a) and a.dims != result.dims]
    # One of both may stand in a longer buffer.
    return [min(pair) for pair in zip(pairs[::2], pairs[1::2], strict=True)]


def _counts(phase: str, work: Work) -> np.ndarray | None:
    """int64 [R, R] rows or replicas from rank to rank; None for a phase that the plan does not tell about."""
    if match := _OUT.search(phase):
        return work.launches(min(int(match[2]), len(work.rows)) - 1)[bool(match[3])]
    if match := _BACK.search(phase):
        crosses = work.config.topology.crosses_domains()
        first, second = work.launches(min(int(match[2]), len(work.rows)) - 1)
        # Tokens' sums go home by themselves, once all of them are there.
        return second.T if match[3] else (first if work.tokens is None else first * ~crosses).T
    if phase in ("combine_rails", "home_rails"):
        return work.tokens.T if work.tokens is not None else np.zeros_like(work.rows[0])
    return {
        "weights": work.rows.sum(0),
        "weight_grads": work.rows.sum(0).T,
        "pull": work.replicas,
        "repull": work.replicas,
        "push": work.replicas.T,
    }.get(phase)
