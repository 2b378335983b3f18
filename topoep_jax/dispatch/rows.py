"""Rows picked and added by index: on GPUs by kernels that touch the rows that are there, and no others.

Left to XLA, a gateway copies and adds up as many rows as it has room for, whatever the plan says.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from topoep_jax import _pallas
from topoep_jax._compat import platform_dependent, result_like

NOBODY = -1
"""An index of no row."""
UNREAD = -2
"""The first index of a row that nobody reads."""
_MOST_COLUMNS, _LEAST_COLUMNS = 4096, 16
_ROWS = 4
"""Of one program."""


def pick(rows: jax.Array, index: jax.Array) -> jax.Array:
    """[m, H]: rows [n, H] by index int32 [m]; what has a negative index holds anything."""
    if not _kernel_fits(rows):
        return _pick(rows, index)
    return platform_dependent(rows, index, cuda=pick_by_kernel, default=_pick)


def add(rows: jax.Array, index: jax.Array) -> jax.Array:
    """[m, H]: the sum of rows [n, H] by index int32 [m, k], in f32, one after the other, rounded once.

    `NOBODY` adds nothing. Where the first index is `UNREAD`, the result holds anything.
    """
    if not _kernel_fits(rows):
        return _add(rows, index)
    return platform_dependent(rows, index, cuda=add_by_kernel, default=_add)


def pick_by_kernel(rows: jax.Array, index: jax.Array, *, interpret: bool = False) -> jax.Array:
    """The kernel of `pick`."""
    width, columns = rows.shape[1], _columns(rows)

    def kernel(rows: Any, index: Any, out: Any) -> None:
        def copy(row: jax.Array) -> None:
            for begin in range(0, width, columns):
                here = pl.ds(begin, columns)
                out[row, here] = rows[index[row], here]

        _each_row(index.shape[0], lambda row: pl.when(index[row] >= 0)(partial(copy, row)))

    return _pallas.call(
        kernel,
        (rows, index),
        result_like(rows, (index.shape[0], width)),
        name="topoep_pick",
        programs=-(-index.shape[0] // _ROWS),
        interpret=interpret,
    )


def add_by_kernel(rows: jax.Array, index: jax.Array, *, interpret: bool = False) -> jax.Array:
    """The kernel of `add`."""
    width, columns = rows.shape[1], _columns(rows)

    def kernel(rows: Any, index: Any, out: Any) -> None:
        def taken(at: jax.Array, here: Any) -> jax.Array:
            none = jnp.zeros((columns,), jnp.float32)
            row: jax.Array = lax.cond(at >= 0, lambda: rows[at, here].astype(jnp.float32), lambda: none)
            return row

        def total(row: jax.Array) -> None:
            for begin in range(0, width, columns):
                here, sums = pl.ds(begin, columns), jnp.zeros((columns,), jnp.float32)
                for k in range(index.shape[1]):
                    sums = sums + taken(index[row, k], here)
                out[row, here] = sums.astype(out.dtype)

        _each_row(index.shape[0], lambda row: pl.when(index[row, 0] > UNREAD)(partial(total, row)))

    return _pallas.call(
        kernel,
        (rows, index),
        result_like(rows, (index.shape[0], width)),
        name="topoep_add",
        programs=-(-index.shape[0] // _ROWS),
        interpret=interpret,
    )


def _each_row(count: int, serve: Callable[[jax.Array], None]) -> None:
    """Serves the rows of one program."""
    first = pl.program_id(0) * _ROWS
    for row in (first + i for i in range(_ROWS)):
        pl.when(row < count)(partial(serve, row))


def _columns(rows: jax.Array) -> int:
    return math.gcd(rows.shape[1], _MOST_COLUMNS)


def _kernel_fits(rows: jax.Array) -> bool:
    return _columns(rows) >= _LEAST_COLUMNS


def _pick(rows: jax.Array, index: jax.Array) -> jax.Array:
    return rows[jnp.maximum(index, 0)]


def _add(rows: jax.Array, index: jax.Array) -> jax.Array:
    total = jnp.zeros((index.shape[0], rows.shape[1]), jnp.float32)
    for at in index.T:
        total = total + jnp.where(at[:, None] >= 0, rows[jnp.maximum(at, 0)], 0).astype(jnp.float32)
    return total.astype(rows.dtype)
