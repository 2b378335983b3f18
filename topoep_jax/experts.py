"""Grouped SwiGLU over the instances of one rank, on rows that are sorted and aligned by instance.

One expert's parameter is packed: gate and up as [H, 2 I], then down as [I, H], flattened to D = 3 H I elements, so that
a replica is one row to pull and its gradient one row to push. Mains and slots stay apart: joining them would copy every
main. Router weights enter between activation and down projection, which makes their gradient a by-product.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from topoep_jax._compat import vary_like
from topoep_jax.dispatch import Window


class Matrix(NamedTuple):
    """Where one matrix lies inside an expert's packed parameter."""

    offset: int
    rows: int
    cols: int


def packed_matrices(hidden: int, ffn: int) -> tuple[Matrix, Matrix]:
    """(gate_up [H, 2 I], down [I, H])."""
    return Matrix(0, hidden, 2 * ffn), Matrix(2 * hidden * ffn, ffn, hidden)


class Instances(NamedTuple):
    """Packed parameters of what a rank executes."""

    mains: jax.Array
    """[Em, D]."""
    slots: jax.Array | None
    """[N, D], or None where no replica can be held."""


def gmm(
    rows: jax.Array, params: Instances, block_instance: jax.Array, matrix: Matrix, *, transposed: bool = False
) -> jax.Array:
    """Multiplies each block of rows with the matrix of its instance, accumulating in f32.

    Args:
      rows: [n, in] rows, aligned by instance.
      params: packed parameters.
      block_instance: int32 [n / block_rows]; blocks of instance J or beyond are idle and yield zeros.
      matrix: which matrix of the expert.
      transposed: multiply with its transpose, as the backward pass does.

    Returns:
      [n, out] in the dtype of `rows`.
    """
    num_mains = params.mains.shape[0]
    num_instances = num_mains + (0 if params.slots is None else params.slots.shape[0])
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
    grads: jax.Array,
    first_instance: int,
    window: Window,
    block_rows: int,
    pairs: tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
) -> jax.Array:
    """Adds the weight gradients of some instances to their packed f32 accumulator, block by block in row order.

    Args:
      grads: f32 [m, D] accumulator of the instances first_instance .. first_instance + m - 1.
      first_instance: 0 for mains, Em for slots.
      window: which blocks belong to which instance.
      block_rows: rows of a block.
      pairs: ((inputs, output gradients) of gate_up, the same of down), each [n, .].
    """
    chosen = slice(first_instance, first_instance + grads.shape[0])

    def step(_: None, xs: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        grad, first, count = xs

        def add(block: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
            cut = lambda v: lax.dynamic_slice_in_dim(v, block * block_rows, block_rows)  # noqa: E731
            return [
                s + lax.dot_general(cut(x), cut(dy), (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
                for s, (x, dy) in zip(sums, pairs, strict=True)
            ]

        zeros = [vary_like(jnp.zeros((x.shape[1], dy.shape[1]), jnp.float32), x) for x, dy in pairs]
        sums = lax.fori_loop(first, first + count, add, zeros)
        return None, grad + jnp.concatenate([s.reshape(-1) for s in sums])

    return lax.scan(step, None, (grads, window.first_block[chosen], window.num_blocks[chosen]))[1]


def swiglu(gate_up: jax.Array, weight: jax.Array) -> jax.Array:
    """weight * silu(gate) * up in f32. gate_up [n, 2 I], weight f32 [n]; returns [n, I] in the dtype of `gate_up`."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=1)
    return (jax.nn.silu(gate) * up * weight[:, None]).astype(gate_up.dtype)


def swiglu_grad(gate_up: jax.Array, weight: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gradients of `swiglu` towards gate_up [n, 2 I] (in its dtype) and weight (f32 [n]), from grad [n, I]."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=1)
    gate_sigmoid = jax.nn.sigmoid(gate)
    silu = gate * gate_sigmoid
    grad = grad.astype(jnp.float32)
    weight_grad = (grad * silu * up).sum(1)
    grad = grad * weight[:, None]
    gate_grad = grad * up * (gate_sigmoid + silu * (1 - gate_sigmoid))
    return jnp.concatenate([gate_grad, grad * silu], axis=1).astype(gate_up.dtype), weight_grad
