"""What an expert's parameter looks like in memory, and the rows that belong to it.

One expert's parameter is packed: gate and up as [H, 2 I], then down as [I, H], flattened to D = 3 H I elements, so that
a replica is one row to pull and its gradient one row to push. Mains and slots stay apart: joining them would copy every
main.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from topoep_jax.dispatch import Window


class Matrix(NamedTuple):
    """Where one matrix lies inside an expert's packed parameter."""

    offset: int
    rows: int
    cols: int


def packed_matrices(hidden: int, ffn: int) -> tuple[Matrix, Matrix]:
    """(gate_up [H, 2 I], down [I, H])."""
    return Matrix(0, hidden, 2 * ffn), Matrix(2 * hidden * ffn, ffn, hidden)


def pack_experts(gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """The parameter `w` of `MoE` and `moe_layer`, of experts whose matrices are apart: down(silu(gate(x)) * up(x)).

    Args:
      gate: [..., H, I], which x is multiplied with from the left; [E, H, I] are all experts of a layer.
      up: [..., H, I].
      down: [..., I, H].

    Returns:
      [..., 3 H I]: gate and up side by side as [H, 2 I], then down, row by row.

    Raises:
      ValueError: shapes that do not fit each other. PyTorch's [outputs, inputs] has to be transposed first.
    """
    if gate.ndim < 2 or up.shape != gate.shape or down.shape != (*gate.shape[:-2], gate.shape[-1], gate.shape[-2]):
        raise ValueError(
            f"gate {gate.shape}, up {up.shape} and down {down.shape} must be [..., H, I], [..., H, I] and [..., I, H]:"
            " matrices that x is multiplied with from the left"
        )
    lead = gate.shape[:-2]
    gate_up = jnp.concatenate([gate, up], axis=-1).reshape(*lead, -1)
    return jnp.concatenate([gate_up, down.reshape(*lead, -1)], axis=-1)


def unpack_experts(w: jax.Array, hidden: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The inverse of `pack_experts`.

    Args:
      w: [..., 3 H I].
      hidden: H.

    Returns:
      gate [..., H, I], up [..., H, I] and down [..., I, H].

    Raises:
      ValueError: the last axis is no multiple of 3 H.
    """
    if not w.ndim or w.shape[-1] % (3 * hidden):
        raise ValueError(
            f"w has shape {w.shape}, but [..., 3 * {hidden} * I] is needed: the last axis is a packed expert"
        )
    lead = w.shape[:-1]
    matrices = packed_matrices(hidden, w.shape[-1] // (3 * hidden))
    gate_up, down = (w[..., m.offset : m.offset + m.rows * m.cols].reshape(*lead, m.rows, m.cols) for m in matrices)
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return gate, up, down


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
    """[n, rows of the matrix] what was multiplied with it; rows beyond the window's, as in `grads`, are left alone."""
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
    filled: jax.Array
    """int32 [instances of the window]: its rows, from the start of that block."""

    @classmethod
    def of(cls, job: WeightGrad) -> "Work":
        """The arrays of `job`."""
        window = job.window
        return cls(job.inputs, job.grads, window.block_instance, window.first_block, window.filled)
