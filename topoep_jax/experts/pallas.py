"""Grouped products as Pallas kernels for GPUs, which read and write packed parameters where they lie.

One program of a grid makes one tile of the result. An expert's matrix is a range of its packed row, so a tile of it is
loaded through an array of indices into that row: no slice of a parameter is ever copied. Programs without rows to
multiply end at once.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from topoep_jax import _compat, _pallas
from topoep_jax.config import TILE
from topoep_jax.experts import tiles
from topoep_jax.experts.packed import Instances, Matrix, Work
from topoep_jax.experts.tiles import Tile

_GROUP = 8
"""Rows of tiles that the programs in flight share, so that what they read stays in the cache."""


def divides(block_rows: int, matrices: Sequence[Matrix]) -> bool:
    """Whether tiles of the least size divide everything."""
    return all(side % TILE == 0 for matrix in matrices for side in (block_rows, matrix.rows, matrix.cols))


def check(block_rows: int, matrices: Sequence[Matrix]) -> None:
    """Raises ValueError where no kernel can be made."""
    if not divides(block_rows, matrices):
        sides = [f"{matrix.rows} x {matrix.cols}" for matrix in matrices]
        raise ValueError(
            f"gemm='pallas' needs multiples of {TILE}, but block_rows={block_rows} and matrices are"
            f" {' and '.join(sides)}: choose other sizes, or gemm='scan'"
        )


def gmm(
    rows: jax.Array,
    params: Instances,
    block_instance: jax.Array,
    *,
    block_rows: int,
    matrix: Matrix,
    transposed: bool,
    tile: Tile | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `experts.gmm`."""
    num_rows, depth = block_instance.shape[0] * block_rows, rows.shape[1]
    width = matrix.rows if transposed else matrix.cols
    tile = tile or tiles.gmm_tile(block_rows, width, depth, rows.dtype.itemsize)
    height, breadth = num_rows // tile.rows, width // tile.cols
    num_mains, count = params.mains.shape[0], params.num_instances
    packed = [array for array in params if array is not None]

    def kernel(left: Any, *refs: Any) -> None:
        *weights, instances, out = refs
        row, col = _place(pl.program_id(0), height, breadth)
        instance = instances[row * tile.rows // block_rows]
        at = _span(row, tile.rows), _span(col, tile.cols)

        def product(weights: Any, held: jax.Array) -> None:
            def add(k: jax.Array, total: jax.Array) -> jax.Array:
                sides = (k, tile.depth), (col, tile.cols)
                right = weights[held, _indices(matrix, *(sides[::-1] if transposed else sides))]
                return total + _dot(left[at[0], _span(k, tile.depth)], right, 1, 1 if transposed else 0)

            zeros = jnp.zeros((tile.rows, tile.cols), jnp.float32)
            out[at] = lax.fori_loop(0, depth // tile.depth, add, zeros).astype(out.dtype)

        pl.when(instance < num_mains)(lambda: product(weights[0], instance))
        if len(weights) > 1:
            in_slot = (instance >= num_mains) & (instance < count)
            pl.when(in_slot)(lambda: product(weights[1], instance - num_mains))

        @pl.when(instance >= count)
        def _() -> None:
            out[at] = jnp.zeros((tile.rows, tile.cols), out.dtype)

    return _pallas.call(
        kernel,
        (rows, *packed, block_instance),
        _compat.result_like(rows, (num_rows, width)),
        name="topoep_gmm",
        programs=height * breadth,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=interpret,
    )


def wgrad(
    sums: jax.Array,
    works: tuple[Work, ...],
    first_row: jax.Array,
    *,
    first_instance: int,
    block_rows: int,
    tile: Tile | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `experts.wgrad`.

    Neighbouring programs belong to different instances, so that the one with most rows occupies the whole GPU.
    """
    num_instances, height, width = sums.shape
    tile = tile or tiles.wgrad_tile(height, width, block_rows, num_instances, works[0].inputs.dtype.itemsize)
    grid = height // tile.rows, width // tile.cols
    steps = block_rows // tile.depth

    def kernel(_: Any, first_row: Any, *refs: Any) -> None:
        *flat, out = refs
        operands = [Work(*flat[i : i + len(Work._fields)]) for i in range(0, len(flat), len(Work._fields))]
        instance = pl.program_id(0) % num_instances
        row, col = _place(pl.program_id(0) // num_instances, *grid)
        at = instance, _span(row, tile.rows), _span(col, tile.cols)
        # The quotient tells the compiler how well the loads are aligned.
        left = _span(first_row[0] // tile.rows + row, tile.rows)

        def step(k: jax.Array, sums: jax.Array, work: Work, own: jax.Array | None = None) -> jax.Array:
            terms = _span(k, tile.depth)
            inputs, grads = work.inputs[terms, left], work.grads[terms, _span(col, tile.cols)]
            if own is not None:
                inputs, grads = (jnp.where(own, side, jnp.zeros((), side.dtype)) for side in (inputs, grads))
            return sums + _dot(inputs, grads, 0, 0)

        @pl.when(sum(work.filled[first_instance + instance] for work in operands) > 0)
        def add() -> None:
            sums = out[at]
            for work in operands:
                first, filled = work.first_block[first_instance + instance], work.filled[first_instance + instance]
                whole, rest = first * steps + filled // tile.depth, filled % tile.depth
                sums = lax.fori_loop(first * steps, whole, partial(step, work=work), sums)
                # What lies behind the rows holds anything. Selecting in this step alone leaves the others as they are.
                own = lax.broadcasted_iota(jnp.int32, (tile.depth, 1), 0) < rest
                last = whole + (rest > 0).astype(jnp.int32)
                sums = lax.fori_loop(whole, last, partial(step, work=work, own=own), sums)
            out[at] = sums

    return _pallas.call(
        kernel,
        (sums, first_row.reshape(1), *jax.tree.leaves(works)),
        _compat.result_like(sums, sums.shape),
        name="topoep_wgrad",
        programs=num_instances * math.prod(grid),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=interpret,
        aliases={0: 0},
    )


def _place(index: jax.Array, height: int, width: int) -> tuple[jax.Array, jax.Array]:
    """(row, column) of a tile in a grid that is walked in bands of `_GROUP` rows, column by column."""
    size = _GROUP * width
    top = index // size * _GROUP
    band = jnp.minimum(height - top, _GROUP)
    return top + index % size % band, index % size // band


def _dot(left: jax.Array, right: jax.Array, left_axis: int, right_axis: int) -> jax.Array:
    """The product of two matrices over these of their axes, in f32."""
    return lax.dot_general(left, right, (((left_axis,), (right_axis,)), ((), ())), preferred_element_type=jnp.float32)


def _span(index: jax.Array, length: int) -> Any:
    return pl.ds(index * length, length)


def _indices(matrix: Matrix, rows: tuple[jax.Array, int], cols: tuple[jax.Array, int]) -> jax.Array:
    """Where a tile of a matrix lies in a packed parameter; (which tile, its length) of either side."""
    shape = rows[1], cols[1]
    row = rows[0] * rows[1] + lax.broadcasted_iota(jnp.int32, shape, 0)
    col = cols[0] * cols[1] + lax.broadcasted_iota(jnp.int32, shape, 1)
    return matrix.offset + row * matrix.cols + col
