"""This library's layer as tasks: `pipeline/forward.py` and `backward.py`, stage by stage (docs/layer.md).

A product takes the arithmetic of its aligned rows at the hardware's sustained rate. What only reads and writes memory
(activations, the order of the tokens, sums of gradients) takes no time here.
"""

import dataclasses
import functools

import numpy as np

from topoep_jax.experts import Matrix, packed_matrices
from topoep_jax.plan.cost import rank_compute_ps
from topoep_jax.plan.hardware import Hardware
from topoep_jax.plan.problem import CostModel
from topoep_jax.rates import Rates
from topoep_jax.simulate.calibration import nodes_per_assignment
from topoep_jax.simulate.program import Links, Program
from topoep_jax.simulate.work import Work
from topoep_jax.transfer import slice_rows

_GRAD_BYTES = 4
"""Replica gradients travel in f32, router weights too."""
_MEMORY_GBS = 3350
"""Of an H100's and an H800's memory."""
US = 1_000_000
"""Picoseconds."""


@dataclasses.dataclass(frozen=True)
class LayerRates:
    """Rates of the machine that runs the layer.

    Attributes:
      hardware: rates of links and products.
      launch_us: fixed time of a collective, in microseconds: launches and the latency of the network
        (`topoep_jax.rates`).
      plan_us: the planner's time on the way to the first dispatch (the same).
      once_of: K, where a token crosses to a domain once, however many of its K experts run there, and is forwarded.
        This library's layer sends each assignment by itself (0), others do not; `verdict.variations` asks what if.
      hot_permille: how much of the busiest link's excess over the mean link counts. The paper's figures imply 460
        (`calibration`): its exchanges are faster than the wire of its busiest rank.
    """

    hardware: Hardware
    launch_us: int = round(Rates.collective_us)
    plan_us: int = round(Rates.plan_us)
    once_of: int = 0
    hot_permille: int = 1000

    def __post_init__(self) -> None:
        for name in ("launch_us", "plan_us"):
            if not 0 <= getattr(self, name) <= 10**6:
                raise ValueError(f"{name}={getattr(self, name)} must be within 0..10^6 microseconds")
        if not 0 <= self.hot_permille <= 1000:
            raise ValueError(f"hot_permille={self.hot_permille} must be within 0..1000")


@dataclasses.dataclass(frozen=True)
class PipelinedLayer:
    """The layer of docs/layer.md on a machine with these rates."""

    rates: LayerRates

    def links(self, work: Work) -> Links:
        """What carries its exchanges."""
        hardware = self.rates.hardware
        rates = hardware.inter_fs_per_byte, hardware.intra_fs_per_byte
        return Links(work.config.topology, *rates, self.rates.hot_permille)

    def add_forward(self, program: Program, work: Work, after: int) -> int:
        """Adds the forward pass; returns the task that others may need."""
        layer = _Layer(program, work, self.rates)
        gathered = program.together("demand", "demand", layer.launch, [after])
        if work.balanced:
            gathered = program.compute("plan", "plan", self.rates.plan_us * US, [gathered])
        weights = layer.exchange("weights", "dispatch", work.rows.sum(0) * _GRAD_BYTES, [gathered])
        begun = [weights]
        if layer.chunks == 2:
            first = layer.dispatch("dispatch_1", 0, begun)
            pull = layer.pull("pull", [first])
            pre = layer.product("gate_up c1", "experts forward", 2, 0, [first])
            begun = [layer.dispatch("dispatch_2", 1, [pre, *pull])]
            out = layer.product("down c1", "experts forward", 1, 0, [pre, *pull])
            layer.combine("combine_1", 0, [out])
        else:
            pull = layer.pull("pull", [gathered])
            begun = [layer.dispatch("dispatch_2", 0, begun)]
        pre = layer.product("gate_up c2", "experts forward", 2, layer.last, [*begun, *pull])
        out = layer.product("down c2", "experts forward", 1, layer.last, [pre])
        return layer.combine("combine_2", layer.last, layer.gather("combine_2", layer.last, [out]))

    def add_backward(self, program: Program, work: Work, after: int) -> int:
        """Adds the backward pass; returns the task that others may need."""
        layer = _Layer(program, work, self.rates)
        begun = self._chunk_1_backward(layer, after) if layer.chunks == 2 else self._begin(layer, after)
        pre = layer.recompute("gate_up c2 again", layer.last, begun)
        down = layer.weight_grad("slots' down", 1, begun + pre, of_slots=True)
        ready = [*begun, *pre, *down]
        pushed = layer.push("push of down", 1, ready, ready)
        # Where gateways gather, chunk 1 waits for that: both need much memory.
        if layer.chunks == 2 and not work.hops:
            layer.combine("home_1", 0, pushed)
        row_grads = layer.product("gate_up^T c2", "experts backward", 2, layer.last, pushed)
        gathered = layer.gather("home_2", layer.last, [row_grads])
        if layer.chunks == 2 and work.hops:
            layer.combine("home_1", 0, gathered)
        last = layer.combine("home_2", layer.last, gathered)
        gate_up = layer.weight_grad("slots' gate_up", 2, [row_grads], of_slots=True)
        weights = layer.exchange("weight_grads", "combine", work.rows.sum(0).T * _GRAD_BYTES, [last, *gate_up])
        pushed = layer.push("push of gate_up", 2, [weights], [weights] if work.balanced else [row_grads])
        return program.compute("gradients", "experts backward", 0, [weights, *pushed])

    def _begin(self, layer: "_Layer", after: int) -> list[int]:
        """What chunk 2 starts from where it is all."""
        pull = layer.pull("repull", [after])
        again = layer.again("again_2", 0, [after])
        grad = layer.dispatch("grad_2", 0, [after])
        inner = layer.product("down^T c2", "experts backward", 1, 0, [*pull, grad])
        return [*pull, *again, inner]

    def _chunk_1_backward(self, layer: "_Layer", after: int) -> list[int]:
        """All products with rows of chunk 1; rows and gradients of chunk 2 here: what chunk 2 starts from."""
        grad = layer.dispatch("grad_1", 0, [after])
        again = layer.again("again_1", 0, [grad])
        inner = layer.product("down^T c1", "experts backward", 1, 0, [grad])
        pull = layer.pull("repull", [*again, inner])
        pre = layer.recompute("gate_up c1 again", 0, [*again, inner])
        ready = [*pull, *pre, *again, inner]
        grad = layer.dispatch("grad_2", 1, ready)
        row_grads = layer.product("gate_up^T c1", "experts backward", 2, 0, ready)
        again = layer.again("again_2", 1, [grad, row_grads])
        inner = layer.product("down^T c2", "experts backward", 1, 1, [grad, row_grads])
        return [*again, inner]


@dataclasses.dataclass(frozen=True)
class _Layer:
    """The tasks of one layer and microbatch, by what they do."""

    program: Program
    work: Work
    rates: LayerRates

    @property
    def launch(self) -> int:
        return self.rates.launch_us * US

    @property
    def chunks(self) -> int:
        return self.work.config.chunks

    @property
    def last(self) -> int:
        """The chunk that holds replicas."""
        return self.chunks - 1

    @functools.cached_property
    def costs(self) -> tuple[CostModel, ...]:
        """Prices of rows times one [H, I] matrix (down), and times two (gate and up)."""
        config, hardware = self.work.config, self.rates.hardware
        row_ps = [2 * matrices * config.hidden * config.ffn * 1000 // hardware.gflops for matrices in (1, 2)]
        speeds = hardware.rank_speed
        return tuple(dataclasses.replace(config.cost, row_ps=ps, rank_speed=speeds) for ps in row_ps)

    def exchange(self, name: str, phase: str, moved: np.ndarray, after: list[int], launches: int = 1) -> int:
        return self.program.exchange(name, phase, moved, launches * self.launch, after)

    def dispatch(self, name: str, chunk: int, after: list[int]) -> int:
        """Rows to their instances; in two launches, gateways copy and forward what the first brought."""
        if not self.work.hops:
            return self.exchange(name, "dispatch", self._moved(chunk), after)
        first, forwarded = self._launches(chunk)
        begun = self.exchange(name, "dispatch", first, after)
        if chunk != self.last:  # which holds rows of the own domain
            return begun
        fixed = self.launch + self._copied(forwarded)
        return self.program.exchange(f"{name} forward", "dispatch", forwarded, fixed, [begun])

    def again(self, name: str, chunk: int, after: list[int]) -> list[int]:
        """Rows that were not kept."""
        return [self.dispatch(name, chunk, after)] if self.work.config.residuals == "none" else []

    def gather(self, name: str, chunk: int, after: list[int]) -> list[int]:
        """Rows to the gateways of their sources, if there are any."""
        if not self.work.hops:
            return after
        return [self.exchange(f"{name} gather", "combine", self._launches(chunk)[1].T, after)]

    def combine(self, name: str, chunk: int, after: list[int]) -> int:
        """Rows home; in two launches, gateways' sums go home with the last chunk."""
        if not self.work.hops:
            return self.exchange(name, "combine", self._moved(chunk).T, after)
        first, forwarded = self._launches(chunk, tokens=False)
        own = self.exchange(name, "combine", first.T, after)
        if chunk != self.last:
            return own
        tokens = np.zeros_like(first) if self.work.tokens is None else self.work.tokens * self.costs[0].token_bytes
        return self.program.exchange(f"{name} rails", "combine", tokens.T, self.launch + self._copied(forwarded), [own])

    def pull(self, name: str, after: list[int]) -> list[int]:
        """The pull of replicas, where the layer has slots; it is launched even when the plan has none."""
        return [self.exchange(name, "pull", self.work.pulled, after)] if self.work.balanced else []

    def product(self, name: str, phase: str, matrices: int, chunk: int, after: list[int]) -> int:
        """Rows of a chunk times gate and up (2 matrices) or down (1)."""
        return self.program.compute(name, phase, self._ps(self.work.aligned[chunk], matrices), after)

    def recompute(self, name: str, chunk: int, after: list[int]) -> list[int]:
        """Gate and up of rows, where they were not kept."""
        kept = self.work.config.residuals == "all"
        return [] if kept else [self.product(name, "experts backward", 2, chunk, after)]

    def weight_grad(self, name: str, matrices: int, after: list[int], *, of_slots: bool) -> list[int]:
        """Gradient of gate and up, or of down, for all mains or all replicas of a rank."""
        if of_slots and not self.work.balanced:
            return []
        mains = self.work.config.num_mains
        rows = self.work.aligned.sum(0)
        rows = rows[:, mains:] if of_slots else rows[:, :mains]
        return [self.program.compute(name, "experts backward", self._ps(rows, matrices), after)]

    def push(self, name: str, matrices: int, after: list[int], mains_after: list[int]) -> list[int]:
        """Replica gradients home, strip by strip, beside the same strips of the mains.

        A turn's strip of either waits for the other's of the turn before: strips being equal, the longer time counts.
        """
        made = self.weight_grad(f"mains' {name.removeprefix('push of ')}", matrices, mains_after, of_slots=False)
        if not self.work.balanced:
            return made
        matrix = self._matrix(matrices)
        moved = self.work.replicas.T * (matrix.rows * matrix.cols * _GRAD_BYTES)
        return [*made, self.exchange(name, "push", moved, after, self._strips(matrix))]

    def _moved(self, chunk: int) -> np.ndarray:
        """int64 [R, R] bytes of a chunk's rows from source to executing rank."""
        moved = self.work.rows[chunk] * self.costs[0].token_bytes
        if not self.rates.once_of:
            return moved
        topology, crosses = self.work.config.topology, self.work.config.topology.crosses_domains()
        rows = self.work.rows.sum(0)
        inter = int((rows * crosses).sum()) / max(self.work.num_rows, 1)
        once = round(1000 * nodes_per_assignment(inter, topology.num_domains, self.rates.once_of))
        # What arrives comes through all ranks of the domain alike.
        forwarded = ~crosses * ((moved * crosses).sum(0) // (~crosses).sum(0))
        return moved * crosses * once // 1000 + moved * ~crosses + forwarded

    def _launches(self, chunk: int, *, tokens: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """int64 [R, R] bytes of a chunk in both launches; the first without tokens, if asked for."""
        first, forwarded = self.work.launches(chunk)
        if not tokens and self.work.tokens is not None and chunk == self.last:
            first = first - self.work.tokens
        return first * self.costs[0].token_bytes, forwarded * self.costs[0].token_bytes

    @staticmethod
    def _copied(forwarded: np.ndarray) -> np.ndarray:
        """int64 [R] picoseconds in which gateways read and write so many bytes [R, R], before they send."""
        return np.asarray(2 * forwarded.sum(axis=1) * 1000 / (Rates.memory_share * _MEMORY_GBS), np.int64)

    def _strips(self, matrix: Matrix) -> int:
        config = self.work.config
        staged = config.num_ranks * max(config.num_slots, 1)
        return matrix.rows // slice_rows(staged, matrix.rows, matrix.cols, config.staging_bytes)

    def _matrix(self, matrices: int) -> Matrix:
        gate_up, down = packed_matrices(self.work.config.hidden, self.work.config.ffn)
        return gate_up if matrices == 2 else down

    def _ps(self, aligned: np.ndarray, matrices: int) -> np.ndarray:
        """int64 [R]: time of rows int64 [R, j] times so many [H, I] matrices."""
        return rank_compute_ps(aligned, self.costs[matrices - 1])
