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


def accumulate(grads: jax.Array, staged: jax.Array, target: jax.Array, column: jax.Array) -> jax.Array:
    """Adds each staged row to the main that it feeds, row by row: a fixed order, so that equal runs are equal bitwise.

    On GPUs by one kernel in place, which reads no row that feeds no main; elsewhere by a loop over the rows.

    Args:
      grads: f32 [Em, D].
      staged: f32 [rows, S], columns `column` .. `column` + S of replica gradients.
      target: int32 [rows], the main that a row feeds, -1 for none.
      column: int32 [], a multiple of S.

    Returns:
      f32 [Em, D].
    """
    if math.gcd(staged.shape[1], _MOST_COLUMNS) < _LEAST_COLUMNS:
        return by_loop(grads, staged, target, column)
    return platform_dependent(grads, staged, target, column, cuda=by_kernel, default=by_loop)


def by_loop(grads: jax.Array, staged: jax.Array, target: jax.Array, column: jax.Array) -> jax.Array:
    """`accumulate` in operations that every platform has."""
    here = lax.dynamic_slice_in_dim(grads, column, staged.shape[1], 1)

    def add(i: jax.Array, here: jax.Array) -> jax.Array:
        row = jnp.maximum(target[i], 0)
        # Adding zeros instead would turn -0.0 into 0.0.
        added = jnp.where(target[i] >= 0, here[row] + staged[i], here[row])
        return lax.dynamic_update_index_in_dim(here, added, row, 0)

    here = lax.fori_loop(0, staged.shape[0], add, here)
    return lax.dynamic_update_slice_in_dim(grads, here, column, 1)


def by_kernel(
    grads: jax.Array, staged: jax.Array, target: jax.Array, column: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """`accumulate` in a kernel, each program of which has some columns of one main."""
    num_rows, size = staged.shape
    columns = math.gcd(size, _MOST_COLUMNS)

    def kernel(_: Any, staged: Any, target: Any, column: Any, out: Any) -> None:
        main, first = pl.program_id(0) // (size // columns), pl.program_id(0) % (size // columns) * columns
        here = pl.ds(column[0] + first, columns)

        def add(row: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return lax.cond(target[row] == main, partial(take, row), lambda *state: state, *state)

        def take(row: jax.Array, sums: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
            return sums + staged[row, pl.ds(first, columns)], count + 1

        sums, count = lax.fori_loop(0, num_rows, add, (out[main, here], jnp.zeros((), jnp.int32)))

        @pl.when(count > 0)
        def store() -> None:
            out[main, here] = sums

    return _pallas.call(
        kernel,
        (grads, staged, target, column.reshape(1)),
        result_like(grads, grads.shape),
        name="topoep_accumulate",
        programs=grads.shape[0] * (size // columns),
        aliases={0: 0},
        interpret=interpret,
    )
