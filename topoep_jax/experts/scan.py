"""Grouped products as loops over blocks of rows, as many as there are: what runs where there are no GPU kernels.

A branch for each block skips what is idle or another's, which halves a CPU's time for weight gradients. On a GPU, which
takes this form for sizes that no tile divides, the host reads every branch.
"""

import jax
import jax.numpy as jnp
from jax import lax

from topoep_jax._compat import vary_like
from topoep_jax.experts.packed import Instances, Matrix, Work

_BITS = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def gmm(
    rows: jax.Array, params: Instances, block_instance: jax.Array, *, block_rows: int, matrix: Matrix, transposed: bool
) -> jax.Array:
    """See `experts.gmm`."""
    num_mains, num_instances = params.mains.shape[0], params.num_instances
    width = matrix.rows if transposed else matrix.cols
    blocks = rows[: len(block_instance) * block_rows].reshape(-1, block_rows, rows.shape[1])
    contract = (((1,), (1 if transposed else 0,)), ((), ()))
    # On CPU, XLA 0.10 keeps a loop's bf16 results in f32 and converts all of them in every step; bits it leaves alone.
    bits = _BITS[rows.dtype.itemsize]

    def product(block: jax.Array, weights: jax.Array, index: jax.Array) -> jax.Array:
        place = index, jnp.zeros_like(index) + matrix.offset
        taken = lax.dynamic_slice(weights, place, (1, matrix.rows * matrix.cols)).reshape(matrix.rows, matrix.cols)
        # What the CPU would do anyway, but slower.
        left, right = block.astype(jnp.float32), taken.astype(jnp.float32)
        return lax.bitcast_convert_type(lax.dot_general(left, right, contract).astype(rows.dtype), bits)

    def idle(block: jax.Array, instance: jax.Array) -> jax.Array:
        return vary_like(jnp.zeros((block.shape[0], width), bits), block)

    branches = [idle, lambda block, instance: product(block, params.mains, instance)]
    if (slots := params.slots) is not None:
        branches.append(lambda block, instance: product(block, slots, instance - num_mains))

    def step(_: None, xs: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        block, instance = xs
        kind = jnp.where(instance < num_mains, 1, jnp.where(instance < num_instances, 2, 0))
        return None, lax.switch(kind, branches, block, instance)

    out = lax.scan(step, None, (blocks, block_instance))[1]
    return lax.bitcast_convert_type(out, rows.dtype).reshape(-1, width)


def wgrad(
    sums: jax.Array, works: tuple[Work, ...], first_row: jax.Array, *, first_instance: int, block_rows: int
) -> jax.Array:
    """See `experts.wgrad`."""
    for work in works:
        sums = _add(sums, work, first_row, first_instance, block_rows)
    return sums


def _add(sums: jax.Array, work: Work, first_row: jax.Array, first_instance: int, block_rows: int) -> jax.Array:
    num_instances, height, _ = sums.shape
    row = jnp.arange(block_rows, dtype=jnp.int32)[:, None]

    def step(sums: jax.Array, xs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        block, instance = xs

        def add(sums: jax.Array) -> jax.Array:
            inputs = lax.dynamic_slice(work.inputs, (block * block_rows, first_row), (block_rows, height))
            grads = lax.dynamic_slice_in_dim(work.grads, block * block_rows, block_rows)
            # The tail of an instance's last block holds anything.
            own = row < work.filled[instance] - (block - work.first_block[instance]) * block_rows
            inputs, grads = (jnp.where(own, rows, jnp.zeros((), rows.dtype)) for rows in (inputs, grads))
            product = lax.dot_general(inputs, grads, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
            held = instance - first_instance
            old = lax.dynamic_index_in_dim(sums, held, keepdims=False)
            return lax.dynamic_update_index_in_dim(sums, old + product, held, 0)

        served = (instance >= first_instance) & (instance < first_instance + num_instances)
        return lax.cond(served, add, lambda sums: sums, sums), None

    blocks = jnp.arange(work.block_instance.shape[0], dtype=jnp.int32)
    return lax.scan(step, vary_like(sums, work.inputs), (blocks, work.block_instance))[0]
