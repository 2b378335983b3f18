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
    """Rows from which the gradient of a matrix follows: inputs^T grads, instance by instance."""

    window: Window
    """Where the rows of each instance lie."""
    inputs: jax.Array
    """[n, rows of the matrix] what was multiplied with it."""
    grads: jax.Array
    """[n, columns of the matrix] gradients of the products."""


class Work(NamedTuple):
    """The arrays of a `WeightGrad`."""

    inputs: jax.Array
    grads: jax.Array
    block_instance: jax.Array
    """int32 [n / block_rows]: instance of each block."""
    first_block: jax.Array
    """int32 [instances of the window]: first block of each."""
    num_blocks: jax.Array
    """int32 [instances of the window]: its blocks."""

    @classmethod
    def of(cls, job: WeightGrad) -> "Work":
        """The arrays of `job`."""
        window = job.window
        return cls(job.inputs, job.grads, window.block_instance, window.first_block, window.num_blocks)
