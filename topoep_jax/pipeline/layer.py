"""What forward and backward pass share: where rows lie, and the layer's operations under the names of their phases."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from topoep_jax._compat import vary_like
from topoep_jax.combine import combine
from topoep_jax.config import LayerConfig
from topoep_jax.dispatch import Layout, Window, build_layout, dispatch, send_order, window
from topoep_jax.experts import Instances, Matrix, WeightGrad, gmm, packed_matrices, swiglu_backward, wgrad
from topoep_jax.pipeline.order import phase

State = TypeVar("State")


class Inputs(NamedTuple):
    """Operands of `planned_experts`.

    Attributes:
      x: [T, H] this rank's tokens; rows and activations travel in this dtype.
      weight: f32 [T, K] router weights.
      params: [Em, D] packed parameters of this rank's mains; gradients come back in this dtype, summed in f32.
      expert_idx: int32 [T, K]; entries below 0 are padding.
      omega: int32 [R, E] demand of all ranks.
      slot_expert: int32 [R, N] of the plan.
      quota: int32 [R, R, J] of the plan.
    """

    x: jax.Array
    weight: jax.Array
    params: jax.Array
    expert_idx: jax.Array
    omega: jax.Array
    slot_expert: jax.Array
    quota: jax.Array


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer on one rank, with the plan of one microbatch."""

    config: LayerConfig
    axis_name: str
    layout: Layout
    order: jax.Array
    """int32 [A]: assignment of each row in the send order."""
    place: jax.Array
    """int32 [A]: row of each assignment."""
    first: Window | None
    """Chunk 1, which holds mains only; None where chunk 2 is all."""
    last: Window
    """Chunk 2."""
    whole: Window
    """Both."""

    @classmethod
    @jax.named_scope("topoep_layout")
    def build(cls, config: LayerConfig, axis_name: str, inputs: Inputs) -> "Layer":
        """From the plan alone, without any exchange."""
        num_assignments = inputs.expert_idx.size
        layout = build_layout(config, inputs.omega, inputs.slot_expert, inputs.quota, num_assignments, axis_name)
        *ahead, rows = config.window_rows(num_assignments)
        lo = sum(ahead)
        cut = lambda lo, rows, instances: window(layout, lo, rows, config.block_rows, instances)  # noqa: E731
        last = cut(lo, rows, config.num_instances)
        return cls(
            config,
            axis_name,
            layout,
            *send_order(inputs.expert_idx, config.num_experts),
            first=cut(0, lo, config.num_mains) if ahead else None,
            last=last,
            whole=cut(0, lo + rows, config.num_instances) if ahead else last,
        )

    @property
    def matrices(self) -> tuple[Matrix, Matrix]:
        """(gate_up, down)."""
        return packed_matrices(self.config.hidden, self.config.ffn)

    @jax.named_scope("topoep_by_assignment")
    def by_assignment(self, by_token: jax.Array) -> jax.Array:
        """[T, ...] to [A, ...] in send order."""
        return by_token[self.order // self.config.top_k]

    def dispatch(self, name: str, rows: jax.Array, win: Window) -> jax.Array:
        """Rows in send order to the instances of a window."""
        with phase(name):
            return dispatch(rows, win, self.axis_name)

    def combine(self, name: str, rows: jax.Array, into: jax.Array, win: Window) -> jax.Array:
        """Rows of a window back to the send order."""
        with phase(name):
            return combine(rows, into, win, self.axis_name)

    def gmm(
        self, rows: jax.Array, held: Instances, win: Window, matrix: Matrix, *, transposed: bool = False
    ) -> jax.Array:
        """Rows of a window times the matrix of their instance."""
        return gmm(rows, held, win, matrix, transposed=transposed, gemm=self.config.gemm)

    def wgrad(
        self,
        sums: jax.Array,
        first_instance: int,
        jobs: Sequence[WeightGrad],
        first_row: jax.Array | int = 0,
    ) -> jax.Array:
        """Adds rows of a matrix's gradient to the f32 sums [m, rows, cols] of some instances."""
        config = self.config
        return wgrad(sums, first_instance, jobs, first_row, block_rows=config.block_rows, gemm=config.gemm)

    def swiglu_backward(
        self, pre: jax.Array, scale: jax.Array, inner_grad: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(gradient towards gate and up, activation, gradient of the router weights) of a window's rows."""
        return swiglu_backward(pre, scale, inner_grad, block_rows=self.config.block_rows, gemm=self.config.gemm)

    def overflow_passes(self, serve: Callable[[Window, State], State], state: State) -> State:
        """Applies `serve` to what lies beyond the receive buffer, one buffer after the other; every rank as often."""
        if self.config.overflow != "loop":
            return state
        rows = self.whole.num_rows

        def extra_pass(carry: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
            index, state = carry
            win = window(self.layout, index * rows, rows, self.config.block_rows, self.config.num_instances)
            return index + 1, serve(win, state)

        # The carry varies like the layout does, or check_vma would refuse what one pass makes of it.
        begin = vary_like(jnp.ones((), jnp.int32), self.layout.passes)
        return lax.while_loop(lambda carry: carry[0] < self.layout.passes, extra_pass, (begin, state))[1]
