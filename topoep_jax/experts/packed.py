"""What an expert's parameter looks like in memory, and the rows that belong to it.

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

    @property
    def num_instances(self) -> int:
        """Em, or Em + N."""
        return self.mains.shape[0] + (0 if self.slots is None else self.slots.shape[0])


class WeightGrad(NamedTuple):
    """Rows from which the gradient of one matrix follows: inputs^T grads, instance by instance."""

    matrix: Matrix
    window: Window
    """Where the rows of each instance lie."""
    inputs: jax.Array
    """[n, matrix.rows] what was multiplied with the matrix."""
    grads: jax.Array
    """[n, matrix.cols] gradients of the products."""


class Work(NamedTuple):
    """The arrays of a `WeightGrad`."""

    inputs: jax.Array
    """[n, matrix.rows]."""
    grads: jax.Array
    """[n, matrix.cols]."""
    first_block: jax.Array
    """int32 [J]: first block of each instance."""
    num_blocks: jax.Array
    """int32 [J]: its blocks."""


def share_of(total: int, index: jax.Array, pieces: int) -> tuple[jax.Array, jax.Array, int]:
    """(first, end) of the share `index` of `total` things in `pieces` equal ones, and the most that a share has."""
    return index * total // pieces, (index + 1) * total // pieces, -(-total // pieces)
