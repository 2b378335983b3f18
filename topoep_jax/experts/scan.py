"""Grouped products as loops over blocks of rows: what runs where there are no GPU kernels."""

import jax
import jax.numpy as jnp
from jax import lax

from topoep_jax._compat import vary_like
from topoep_jax.experts.packed import Instances, Matrix, Work, share_of


def gmm(
    rows: jax.Array, params: Instances, block_instance: jax.Array, *, matrix: Matrix, transposed: bool
) -> jax.Array:
    """See `experts.gmm`."""
    num_mains, num_instances = params.mains.shape[0], params.num_instances
    width = matrix.rows if transposed else matrix.cols
    blocks = rows.reshape(block_instance.shape[0], -1, rows.shape[1])
    contract = (((1,), (1 if transposed else 0,)), ((), ()))

    def product(block: jax.Array, weights: jax.Array, index: jax.Array) -> jax.Array:
        taken = lax.dynamic_slice(
            weights, (index, jnp.zeros_like(index) + matrix.offset), (1, matrix.rows * matrix.cols)
        ).reshape(matrix.rows, matrix.cols)
        return lax.dot_general(block, taken, contract, preferred_element_type=jnp.float32).astype(rows.dtype)

    def idle(block: jax.Array, instance: jax.Array) -> jax.Array:
        return vary_like(jnp.zeros((block.shape[0], width), rows.dtype), block)

    branches = [idle, lambda block, instance: product(block, params.mains, instance)]
    if (slots := params.slots) is not None:
        branches.append(lambda block, instance: product(block, slots, instance - num_mains))

    def step(_: None, xs: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        block, instance = xs
        kind = jnp.where(instance < num_mains, 1, jnp.where(instance < num_instances, 2, 0))
        return None, lax.switch(kind, branches, block, instance)

    return lax.scan(step, None, (blocks, block_instance))[1].reshape(rows.shape[0], width)


def wgrad(
    sums: jax.Array,
    works: tuple[Work, ...],
    index: jax.Array,
    *,
    first_instance: int,
    matrices: tuple[Matrix, ...],
    block_rows: int,
    pieces: int,
) -> jax.Array:
    """See `experts.wgrad`; a share is some rows of each matrix."""
    for matrix, work in zip(matrices, works, strict=True):
        sums = _add(sums, work, index, first_instance, matrix, block_rows, pieces)
    return sums


def _add(
    sums: jax.Array,
    work: Work,
    index: jax.Array,
    first_instance: int,
    matrix: Matrix,
    block_rows: int,
    pieces: int,
) -> jax.Array:
    first, end, most = share_of(matrix.rows, index, pieces)
    # A slice of fixed size that holds the share, and a mask for what is another's.
    at = jnp.minimum(first, matrix.rows - most)
    row = at + jnp.arange(most, dtype=jnp.int32)
    own = (row >= first) & (row < end)

    def add(block: jax.Array, total: jax.Array) -> jax.Array:
        inputs = lax.dynamic_slice(work.inputs, (block * block_rows, at), (block_rows, most))
        inputs = jnp.where(own[None], inputs, jnp.zeros((), inputs.dtype))
        grads = lax.dynamic_slice_in_dim(work.grads, block * block_rows, block_rows)
        return total + lax.dot_general(inputs, grads, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    def instance(i: jax.Array, sums: jax.Array) -> jax.Array:
        begin, count = work.first_block[first_instance + i], work.num_blocks[first_instance + i]
        zeros = vary_like(jnp.zeros((most, matrix.cols), jnp.float32), work.inputs)
        total = lax.fori_loop(begin, begin + count, add, zeros)
        place = i, matrix.offset + at * matrix.cols
        old = lax.dynamic_slice(sums, place, (1, most * matrix.cols))
        return lax.dynamic_update_slice(sums, old + total.reshape(1, -1), place)

    return lax.fori_loop(0, sums.shape[0], instance, sums)
