"""The grouped products of a layer, in the form that suits the platform."""

from collections.abc import Sequence

import jax

from topoep_jax.dispatch import Window
from topoep_jax.experts import scan
from topoep_jax.experts.packed import Instances, Matrix, WeightGrad


def gmm(
    rows: jax.Array, params: Instances, window: Window, matrix: Matrix, *, transposed: bool = False, gemm: str
) -> jax.Array:
    """Multiplies each block of rows with the matrix of its instance, accumulating in f32.

    Args:
      rows: [n, in] rows, aligned by instance.
      params: packed parameters, in the dtype of `rows`.
      window: whose receive buffer `rows` fill; blocks of no instance that is held are idle and yield zeros.
      matrix: which matrix of the expert.
      transposed: multiply with its transpose, as the backward pass does.
      gemm: the form, see `LayerConfig.gemm`.

    Returns:
      [n, out] in the dtype of `rows`.
    """
    with jax.named_scope("topoep_gmm"):
        return scan.gmm(rows, params, window, matrix, transposed)


def wgrad(
    sums: jax.Array,
    first_instance: int,
    jobs: Sequence[WeightGrad],
    *,
    block_rows: int,
    gemm: str,
    piece: tuple[jax.Array | int, int] = (0, 1),
) -> jax.Array:
    """Adds the weight gradients of some instances to their packed accumulators, in place where the compiler can.

    The order of summation is fixed: jobs in order, and the blocks of each in row order.

    Args:
      sums: f32 [m, D] accumulators of the instances first_instance .. first_instance + m - 1.
      first_instance: 0 for mains, Em for slots.
      jobs: what to add.
      block_rows: rows of a block.
      gemm: the form, see `LayerConfig.gemm`.
      piece: (p, P): do the p-th of P shares of the work. Together the shares do everything once; p may be traced.

    Returns:
      f32 [m, D].
    """
    with jax.named_scope("topoep_wgrad"):
        return scan.wgrad(sums, first_instance, jobs, block_rows, piece)
