"""Rows picked and added by index: on GPUs by kernels that touch the rows that are there, and no others.

Left to XLA, a gateway copies and adds up as many rows as it has room for, whatever the plan says.
"""

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
_ROWS = 4
"""Of one program."""


def pick(rows: jax.Array, index: jax.Array) -> jax.Array:
    """[m, H]: rows [n, H] by index int32 [m]; what has a negative index holds anything."""
    if not _pallas.pays(rows.shape[1]):
        return _pick(rows, index)
    return platform_dependent(rows, index, cuda=pick_by_kernel, default=_pick)


def add(rows: jax.Array, index: jax.Array) -> jax.Array:
    """[m, H]: the sum of rows [n, H] by index int32 [m, k], in f32, one after the other, rounded once.

    `NOBODY` adds nothing. Where the first index is `UNREAD`, the result holds anything.
    """
    if not _pallas.pays(rows.shape[1]):
        return _add(rows, index)
    return platform_dependent(rows, index, cuda=add_by_kernel, default=_add)


def pick_by_kernel(rows: jax.Array, index: jax.Array, *, interpret: bool = False) -> jax.Array:
    """The kernel of `pick`."""

    def copy(rows: Any, index: Any, out: Any, row: jax.Array, here: Any) -> None:
        at = index[row]

        @pl.when(at >= 0)
        def _() -> None:
            out[row, here] = rows[at, here]

    return _by_row("topoep_pick", copy, rows, index, interpret=interpret)


def add_by_kernel(rows: jax.Array, index: jax.Array, *, interpret: bool = False) -> jax.Array:
    """The kernel of `add`."""
    none = (_pallas.columns(rows.shape[1]),), jnp.float32

    def total(rows: Any, index: Any, out: Any, row: jax.Array, here: Any) -> None:
        def taken(at: jax.Array) -> Any:
            return lax.cond(at >= 0, lambda: rows[at, here].astype(jnp.float32), lambda: jnp.zeros(*none))

        @pl.when(index[row, 0] > UNREAD)
        def _() -> None:
            sums = jnp.zeros(*none)
            for k in range(index.shape[1]):
                sums = sums + taken(index[row, k])
            out[row, here] = sums.astype(out.dtype)

    return _by_row("topoep_add", total, rows, index, interpret=interpret)


def _by_row(name: str, serve: Callable[..., None], rows: jax.Array, index: jax.Array, *, interpret: bool) -> jax.Array:
    """[m, H]: `serve` makes some columns of one row of the result, for index int32 [m, ...]."""
    (count, *_), width, columns = index.shape, rows.shape[1], _pallas.columns(rows.shape[1])

    def kernel(rows: Any, index: Any, out: Any) -> None:
        first = pl.program_id(0) * _ROWS
        for row in (first + i for i in range(_ROWS)):
            for begin in range(0, width, columns):
                pl.when(row < count)(partial(serve, rows, index, out, row, pl.ds(begin, columns)))

    made: jax.Array = _pallas.call(
        kernel,
        (rows, index),
        result_like(rows, (count, width)),
        name=name,
        programs=-(-count // _ROWS),
        interpret=interpret,
    )
    return made


def _pick(rows: jax.Array, index: jax.Array) -> jax.Array:
    return rows[jnp.maximum(index, 0)]


def _add(rows: jax.Array, index: jax.Array) -> jax.Array:
    total = jnp.zeros((index.shape[0], rows.shape[1]), jnp.float32)
    for at in index.T:
        total = total + jnp.where(at[:, None] >= 0, rows[jnp.maximum(at, 0)], 0).astype(jnp.float32)
    return total.astype(rows.dtype)
