"""What forward and backward pass share: where rows lie, and the layer's operations under the names of their phases."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from topoep_jax._arrays import empty_after
from topoep_jax._compat import vary_like
from topoep_jax.combine import (
    combine,
    combine_own,
    combine_sums,
    gather_at_gateways,
    sum_at_gateways,
    sum_over_experts,
)
from topoep_jax.config import LayerConfig
from topoep_jax.dispatch import (
    Layout,
    Moves,
    Rails,
    TwoHop,
    Window,
    build_layout,
    build_two_hop,
    come_home,
    dispatch,
    forward,
    hop,
    joined,
    pick,
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
      layer: int32 [] that faults of the exchange name; None where it is not checked.
    """

    x: jax.Array
    weight: jax.Array
    params: jax.Array
    expert_idx: jax.Array
    omega: jax.Array
    slot_expert: jax.Array
    quota: jax.Array
    places: jax.Array | None = None
    layer: jax.Array | None = None


class Home(NamedTuple):
    """Results on their way home; None where none are there yet. Rows that nobody executes hold anything."""

    rows: jax.Array | None = None
    """[A, H] in send order; with two launches [A + (M - 1) T, H], their operand."""
    gathered: jax.Array | None = None
    """[Cg, H] rows of a gateway."""
    sums: jax.Array | None = None
    """[(M - 1) T, H] of these, that it sends home."""


@partial(
    jax.tree_util.register_dataclass,
    meta_fields=["config", "axis_name"],
    data_fields=["layout", "order", "place", "sums", "first", "last", "whole", "two"],
)
@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer on one rank, with the plan of one microbatch; both passes use the same tables."""

    config: LayerConfig
    axis_name: str
    layout: Layout
    order: jax.Array
    """int32 [A]: assignment of each row in the send order."""
    place: jax.Array
    """int32 [A]: row of each assignment."""
    sums: jax.Array
    """int32 [T, m]: rows that each token adds, as `sum_over_experts` takes them."""
    first: Window | None
    """Chunk 1, of rows that mains get from their own domain; None where chunk 2 is all."""
    last: Window
    """Chunk 2."""
    whole: Moves
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
        by_token = place.reshape(inputs.expert_idx.shape)
        if inputs.places is not None and rails is not None:
            plan = inputs.slot_expert, inputs.quota
            two = build_two_hop(config, rails, layout, *plan, order, by_token, inputs.places, axis_name)
        *ahead, rows = config.window_rows(num_assignments)
        first = window(layout.ahead, 0, ahead[0], config.block_rows, config.num_mains) if ahead else None
        last = _rest(config, layout, two, sum(ahead), rows)
        return cls(
            config,
            axis_name,
            layout,
            order,
            place,
            come_home(config, layout, by_token) if two is None else two.sums,
            first=first,
            last=last,
            whole=last if first is None else joined(first, last, config.num_ranks),
            two=two,
        )

    @property
    def matrices(self) -> tuple[Matrix, Matrix]:
        """(gate_up, down)."""
        return packed_matrices(self.config.hidden, self.config.ffn)

    @jax.named_scope("topoep_by_assignment")
    def by_assignment(self, by_token: jax.Array) -> jax.Array:
        """[T, ...] to what a source sends: [A, ...] in send order, then tokens for other domains, if they travel."""
        if self.two is None:
            return by_token[self.order // self.config.top_k]
        return pick(by_token, self.two.source)

    def dispatch(self, name: str, values: jax.Array, win: Moves) -> jax.Array:
        """Values [A] in send order, each by itself, to the instances of a window."""
        with phase(name):
            return dispatch(values, win, self.axis_name)

    def combine(self, name: str, values: jax.Array, into: jax.Array, win: Moves) -> jax.Array:
        """Values of a window back to the send order."""
        with phase(name):
            return combine(values, into, win, self.axis_name)

    def send(self, name: str, rows: jax.Array, win: Window) -> jax.Array:
        """Rows of `by_assignment` on their way to the instances of a window: all that travels beside one product.

        Args:
          name: of the phase.
          rows: [A, H], with two launches [A + (M - 1) T, H].
          win: the window.

        Returns:
          [n, H], of which the first win.num_rows are the window's; `forward` completes them.
        """
        if self.two is None or win.hop is None:
            return self.dispatch(name, rows, win)
        with phase(name):
            return send_first(rows, self.two, win, self.axis_name)

    def forward(self, name: str, received: jax.Array, win: Window) -> jax.Array:
        """What `send` left to gateways."""
        if self.two is None or win.hop is None:
            return received
        with phase(f"{name}_forward"):
            return forward(received, win, self._groups, self.axis_name)

    def gather(self, name: str, rows: jax.Array, into: Home, win: Window) -> Home:
        """Rows of a window to the gateways of their sources, if they travel by way of them."""
        if self.two is None or win.hop is None:
            return into
        with phase(f"{name}_gather"):
            gathered = self._gathered(into, rows)
            return into._replace(gathered=gather_at_gateways(rows, gathered, win, self._groups, self.axis_name))

    def bring(self, name: str, rows: jax.Array, into: Home, win: Window) -> Home:
        """The other rows of a window home."""
        home = self._rows(into, rows)
        if self.two is None or win.hop is None:
            return into._replace(rows=self.combine(name, rows, home, win))
        with phase(name):
            return into._replace(rows=combine_own(rows, home, win, self.axis_name))

    def sum_gathered(self, home: Home) -> Home:
        """Adds up what gateways hold, once it is all there."""
        if self.two is None or home.gathered is None:
            return home
        return home._replace(gathered=None, sums=sum_at_gateways(home.gathered, self.two))

    def sum_home(self, name: str, home: Home) -> jax.Array:
        """[T, H]: the results of each token, added; sums of other domains come from their gateways."""
        rows = home.rows
        assert rows is not None
        if self.two is not None and home.sums is not None:
            with phase(name):
                rows = combine_sums(home.sums, rows, self.two, self.axis_name)
        return sum_over_experts(rows, self.sums)

    def full_home(self, after: jax.Array) -> Home:
        """Room for all rows, for passes that add to it; of the dtype of `after`."""
        return Home(self._rows(Home(), after), None if self.two is None else self._gathered(Home(), after))

    def _rows(self, home: Home, after: jax.Array) -> jax.Array:
        if home.rows is not None:
            return home.rows
        size = len(self.order if self.two is None else self.two.source)
        return empty_after(after if home.sums is None else home.sums, (size, self.config.hidden), after.dtype)

    def _gathered(self, home: Home, after: jax.Array) -> jax.Array:
        if home.gathered is not None:
            return home.gathered
        assert self.two is not None
        return empty_after(after, (len(self.two.copy_of), self.config.hidden), after.dtype)

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
            win = _rest(self.config, self.layout, self.two, index * rows, rows)
            return index + 1, serve(win, state)

        # The carry varies like the layout does, or check_vma would refuse what one pass makes of it.
        begin = vary_like(jnp.ones((), jnp.int32), self.layout.passes)
        return lax.while_loop(lambda carry: carry[0] < self.layout.passes, extra_pass, (begin, state))[1]


def _rest(config: LayerConfig, layout: Layout, two: TwoHop | None, lo: jax.Array | int, rows: int) -> Window:
    win = window(layout.rest, lo, rows, config.block_rows, config.num_instances)
    return win if two is None else dataclasses.replace(win, hop=hop(two, layout.rest, lo, rows))
