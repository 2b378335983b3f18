"""Grouped products as loops over blocks of rows: what runs where there are no GPU kernels."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from topoep_jax._compat import vary_like
from topoep_jax.dispatch import Window
from topoep_jax.experts.packed import Instances, Matrix, WeightGrad, share_of


def gmm(rows: jax.Array, params: Instances, window: Window, matrix: Matrix, transposed: bool) -> jax.Array:
    """See `experts.gmm`."""
    num_mains = params.mains.shape[0]
    num_instances = num_mains + (0 if params.slots is None else params.slots.shape[0])
    width = matrix.rows if transposed else matrix.cols
    blocks = rows.reshape(window.block_instance.shape[0], -1, rows.shape[1])
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

    return lax.scan(step, None, (blocks, window.block_instance))[1].reshape(rows.shape[0], width)


def wgrad(
    sums: jax.Array,
    first_instance: int,
    jobs: Sequence[WeightGrad],
    block_rows: int,
    piece: tuple[jax.Array | int, int],
) -> jax.Array:
    """See `experts.wgrad`; a share is some rows of each matrix."""
    for job in jobs:
        sums = _add(sums, first_instance, job, block_rows, piece)
    return sums


def _add(
    sums: jax.Array, first_instance: int, job: WeightGrad, block_rows: int, piece: tuple[jax.Array | int, int]
) -> jax.Array:
    matrix = job.matrix
    first, end, most = share_of(matrix.rows, piece)
    # A slice of fixed size that holds the share, and a mask for what is another's.
    at = jnp.minimum(first, matrix.rows - most)
    row = at + jnp.arange(most, dtype=jnp.int32)
    own = (row >= first) & (row < end)

    def add(block: jax.Array, total: jax.Array) -> jax.Array:
        inputs = lax.dynamic_slice(job.inputs, (block * block_rows, at), (block_rows, most))
        inputs = jnp.where(own[None], inputs, jnp.zeros((), inputs.dtype))
        grads = lax.dynamic_slice_in_dim(job.grads, block * block_rows, block_rows)
        return total + lax.dot_general(inputs, grads, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    def instance(i: jax.Array, sums: jax.Array) -> jax.Array:
        begin, count = job.window.first_block[first_instance + i], job.window.num_blocks[first_instance + i]
        zeros = vary_like(jnp.zeros((most, matrix.cols), jnp.float32), job.inputs)
        total = lax.fori_loop(begin, begin + count, add, zeros)
        place = i, matrix.offset + at * matrix.cols
        old = lax.dynamic_slice(sums, place, (1, most * matrix.cols))
        return lax.dynamic_update_slice(sums, old + total.reshape(1, -1), place)

    return lax.fori_loop(0, sums.shape[0], instance, sums)
