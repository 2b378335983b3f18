"""Grouped products through lax.ragged_dot: the oracle of the other forms, slow and in need of much memory."""

import jax
import jax.numpy as jnp
from jax import lax

from topoep_jax.experts.packed import Instances, Matrix, Work


def gmm(
    rows: jax.Array, params: Instances, block_instance: jax.Array, *, block_rows: int, matrix: Matrix, transposed: bool
) -> jax.Array:
    """See `experts.gmm`."""
    rows = rows[: len(block_instance) * block_rows]
    busy = block_instance < params.num_instances
    instances = jnp.arange(params.num_instances, dtype=jnp.int32)
    weights = params.mains if params.slots is None else jnp.concatenate([params.mains, params.slots])
    weights = weights[:, matrix.offset : matrix.offset + matrix.rows * matrix.cols]
    weights = weights.reshape(params.num_instances, matrix.rows, matrix.cols)
    weights = weights.swapaxes(1, 2) if transposed else weights
    # On CPU every row is multiplied with every matrix, some of which hold anything.
    used = (block_instance[:, None] == instances[None]).any(0)
    weights = jnp.where(used[:, None, None], weights, jnp.zeros((), weights.dtype))
    # Instances stand in their order; the idle blocks between them go with the one before.
    instance = lax.cummax(jnp.where(busy, block_instance, 0))
    sizes = (instance[:, None] == instances[None]).sum(0, dtype=jnp.int32) * block_rows
    product = lax.ragged_dot(rows, weights, sizes, preferred_element_type=jnp.float32)
    return jnp.where(jnp.repeat(busy, block_rows)[:, None], product, 0.0).astype(rows.dtype)


def wgrad(
    sums: jax.Array, works: tuple[Work, ...], first_row: jax.Array, *, first_instance: int, block_rows: int
) -> jax.Array:
    """See `experts.wgrad`."""
    chosen = slice(first_instance, first_instance + sums.shape[0])
    for work in works:
        begin, size = work.first_block[chosen] * block_rows, work.filled[chosen]
        # One of both may be longer than the window.
        num_rows = min(len(work.inputs), len(work.grads))
        row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
        hit = (row >= begin[None]) & (row < (begin + size)[None])
        # Rows of nobody, which become zero, go with the instance before.
        inputs, grads = (
            jnp.where(hit.any(1)[:, None], rows[:num_rows], jnp.zeros((), rows.dtype))
            for rows in (lax.dynamic_slice_in_dim(work.inputs, first_row, sums.shape[1], 1), work.grads)
        )
        instance = lax.cummax(jnp.argmax(hit, 1).astype(jnp.int32))
        sizes = (instance[:, None] == jnp.arange(sums.shape[0], dtype=jnp.int32)[None]).sum(0, dtype=jnp.int32)
        numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
        sums += lax.ragged_dot_general(inputs, grads, sizes, numbers, preferred_element_type=jnp.float32)
    return sums
