"""What forward and backward pass share: where rows lie, and the layer's operations under the names of their phases."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from topoep_jax._arrays import zeros_after
from topoep_jax._compat import vary_like
from topoep_jax.combine import combine, combine_own, gather_at_gateways, sum_over_experts, sum_two_hop
from topoep_jax.config import LayerConfig
from topoep_jax.dispatch import (
    Layout,
    Rails,
    TwoHop,
    Window,
    build_layout,
    build_two_hop,
    dispatch,
    forward,
    hop,
    send_first,
    send_order,
    window,
)
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
      places: int32 [M - 1, T, K] of `gather_places`; None where rows travel as they are.
    """

    x: jax.Array
    weight: jax.Array
    params: jax.Array
    expert_idx: jax.Array
    omega: jax.Array
    slot_expert: jax.Array
    quota: jax.Array
    places: jax.Array | None = None


class Home(NamedTuple):
    """Results on their way home; zeros at first."""

    rows: jax.Array
    """[A, H] in send order; with two launches [A + (M - 1) T, H], their operand."""
    gathered: jax.Array | None
    """[Cg, H] rows of a gateway."""


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
    two: TwoHop | None
    """Where tokens cross domains once."""

    @classmethod
    @jax.named_scope("topoep_layout")
    def build(cls, config: LayerConfig, axis_name: str, inputs: Inputs) -> "Layer":
        """From the plan alone, without any exchange."""
        num_assignments = inputs.expert_idx.size
        layout = build_layout(config, inputs.omega, inputs.slot_expert, inputs.quota, num_assignments, axis_name)
        order, place = send_order(inputs.expert_idx, config.num_experts)
        rails, two = Rails.of(config.topology), None
        if inputs.places is not None and rails is not None:
            by_token = place.reshape(inputs.expert_idx.shape)
            plan = inputs.slot_expert, inputs.quota
            two = build_two_hop(config, rails, layout, *plan, order, by_token, inputs.places, axis_name)
        *ahead, rows = config.window_rows(num_assignments)
        lo = sum(ahead)
        cut = partial(_window, config, layout, two)
        last = cut(lo, rows, config.num_instances)
        return cls(
            config,
            axis_name,
            layout,
            order,
            place,
            first=cut(0, lo, config.num_mains) if ahead else None,
            last=last,
            whole=cut(0, lo + rows, config.num_instances) if ahead else last,
            two=two,
        )

    @property
    def matrices(self) -> tuple[Matrix, Matrix]:
        """(gate_up, down)."""
        return packed_matrices(self.config.hidden, self.config.ffn)

    @jax.named_scope("topoep_by_assignment")
    def by_assignment(self, by_token: jax.Array) -> jax.Array:
        """[T, ...] to what a source sends: [A, ...] in send order, then tokens for other domains, if they travel."""
        return by_token[self.order // self.config.top_k if self.two is None else self.two.source]

    def dispatch(self, name: str, values: jax.Array, win: Window) -> jax.Array:
        """Values [A] in send order, each by itself, to the instances of a window."""
        with phase(name):
            return dispatch(values, win, self.axis_name)

    def combine(self, name: str, values: jax.Array, into: jax.Array, win: Window) -> jax.Array:
        """Values of a window back to the send order."""
        with phase(name):
            return combine(values, into, win, self.axis_name)

    def send(
        self, name: str, rows: jax.Array, win: Window, region: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Rows of `by_assignment` to the instances of a window.

        Args:
          name: of the phase.
          rows: [A, H], with two launches [A + (M - 1) T, H].
          win: the window.
          region: the tokens that this gateway has of the same rows from another window; None brings them here.

        Returns:
          [win.num_rows, H], and the region for other windows.
        """
        if self.two is None:
            return self.dispatch(name, rows, win), None
        with phase(name):
            received, region = send_first(rows, self.two, win, region, self.axis_name)
        with phase(f"{name}_forward"):
            return forward(region, received, self.two, win, self._groups, self.axis_name), region

    def empty_home(self, after: jax.Array) -> Home:
        """Zeros of the dtype of `after`, made once it is there. Rows that nobody executes stay as they are."""
        width, extra = self.config.hidden, 0 if self.two is None else self.two.source.shape[0] - self.order.shape[0]
        rows = zeros_after(after, (self.order.shape[0] + extra, width), after.dtype)
        return Home(rows, None if self.two is None else zeros_after(after, (len(self.two.copy_of), width), after.dtype))

    def bring(self, name: str, rows: jax.Array, into: Home, win: Window) -> Home:
        """Rows of a window on their way home: to where `send` took them from, or to the gateway."""
        if self.two is None:
            return Home(self.combine(name, rows, into.rows, win), None)
        assert into.gathered is not None
        with phase(f"{name}_gather"):
            gathered = gather_at_gateways(rows, into.gathered, win, self._groups, self.axis_name)
        with phase(name):
            return Home(combine_own(rows, into.rows, win, self.axis_name), gathered)

    def sum_home(self, name: str, home: Home, num_tokens: int) -> jax.Array:
        """[T, H]: the results of each token, added."""
        if self.two is None:
            return sum_over_experts(home.rows, self.place, num_tokens)
        assert home.gathered is not None
        with phase(name):
            return sum_two_hop(home.rows, home.gathered, self.two, self.axis_name)

    @property
    def _groups(self) -> list[list[int]]:
        rails = Rails.of(self.config.topology)
        assert rails is not None
        return rails.groups

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
            win = _window(self.config, self.layout, self.two, index * rows, rows, self.config.num_instances)
            return index + 1, serve(win, state)

        # The carry varies like the layout does, or check_vma would refuse what one pass makes of it.
        begin = vary_like(jnp.ones((), jnp.int32), self.layout.passes)
        return lax.while_loop(lambda carry: carry[0] < self.layout.passes, extra_pass, (begin, state))[1]


def _window(
    config: LayerConfig, layout: Layout, two: TwoHop | None, lo: jax.Array | int, rows: int, instances: int
) -> Window:
    win = window(layout, lo, rows, config.block_rows, instances)
    return win if two is None else win._replace(hop=hop(two, layout, lo, rows, instances))
