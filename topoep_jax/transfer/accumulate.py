"""Staged replica gradients onto the gradients of their mains, in the order of the staged rows."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from topoep_jax import _pallas
from topoep_jax._compat import platform_dependent, result_like

_MOST_COLUMNS = 1024
_LEAST_COLUMNS = 16


def accumulate(grads: jax.Array, staged: jax.Array, target: jax.Array) -> jax.Array:
    """Adds each staged row to the main that it feeds, row by row: a fixed order, so that equal runs are equal bitwise.

    On GPUs by one kernel in place, which reads no row that feeds no main; elsewhere by a loop over the rows.

    Args:
      grads: f32 [Em, S].
      staged: f32 [rows, S].
      target: int32 [rows], the main that a row feeds, -1 for none.

    Returns:
      f32 [Em, S].
    """
    if math.gcd(staged.shape[1], _MOST_COLUMNS) < _LEAST_COLUMNS:
        return by_loop(grads, staged, target)
    return platform_dependent(grads, staged, target, cuda=by_kernel, default=by_loop)


def by_loop(grads: jax.Array, staged: jax.Array, target: jax.Array) -> jax.Array:
    """`accumulate` in operations that every platform has."""

    def add(i: jax.Array, grads: jax.Array) -> jax.Array:
        row = jnp.maximum(target[i], 0)
        # Adding zeros instead would turn -0.0 into 0.0.
        added = jnp.where(target[i] >= 0, grads[row] + staged[i], grads[row])
        return lax.dynamic_update_index_in_dim(grads, added, row, 0)

    return lax.fori_loop(0, staged.shape[0], add, grads)


def by_kernel(grads: jax.Array, staged: jax.Array, target: jax.Array, *, interpret: bool = False) -> jax.Array:
    """`accumulate` in a kernel, each program of which has some columns of one main."""
    num_rows, size = staged.shape
    columns = math.gcd(size, _MOST_COLUMNS)

    def kernel(_: Any, staged: Any, target: Any, out: Any) -> None:
        main, first = pl.program_id(0) // (size // columns), pl.program_id(0) % (size // columns) * columns
        here = pl.ds(first, columns)

        def add(row: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return lax.cond(target[row] == main, partial(take, row), lambda *state: state, *state)

        def take(row: jax.Array, sums: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
            return sums + staged[row, here], count + 1

        sums, count = lax.fori_loop(0, num_rows, add, (out[main, here], jnp.zeros((), jnp.int32)))

        @pl.when(count > 0)
        def store() -> None:
            out[main, here] = sums

    return _pallas.call(
        kernel,
        (grads, staged, target),
        result_like(grads, grads.shape),
        name="topoep_accumulate",
        programs=grads.shape[0] * (size // columns),
        aliases={0: 0},
        interpret=interpret,
    )
