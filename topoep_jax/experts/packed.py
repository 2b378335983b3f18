"""What an expert's parameter looks like in memory.

One expert's parameter is packed: gate and up as [H, 2 I], then down as [I, H], flattened to D = 3 H I elements, so that
a replica is one row to pull and its gradient one row to push. Mains and slots stay apart: joining them would copy every
main.
"""

from typing import NamedTuple

import jax

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


class WeightGrad(NamedTuple):
    """Rows from which the gradient of one matrix follows: inputs^T grads, instance by instance."""

    matrix: Matrix
    window: Window
    """Where the rows of each instance lie."""
    inputs: jax.Array
    """[n, matrix.rows] what was multiplied with the matrix."""
    grads: jax.Array
    """[n, matrix.cols] gradients of the products."""


def share_of(total: int, piece: tuple[jax.Array | int, int]) -> tuple[jax.Array | int, jax.Array | int, int]:
    """(first, end, most) of the p-th of P equal shares of `total` things; no share has more than `most`."""
    index, pieces = piece
    return index * total // pieces, (index + 1) * total // pieces, -(-total // pieces)
