"""The grouped products of a layer, each in the form that suits the platform.

**What may hold anything, NaN too**, forward and backward, in every form, since nobody reads it:

- the parameters of instances that have no rows, as those of slots that a plan leaves empty;
- rows of a receive buffer that no assignment fills: idle blocks, and the tail of an instance's last block.

A product keeps rows apart, so that what is in such a row stays in it, and is not sent home. Gradients of weights are
sums over rows, and leave it out.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from topoep_jax import _compat
from topoep_jax.dispatch import Window
from topoep_jax.experts import activation, pallas, ragged, scan
from topoep_jax.experts.packed import Instances, Matrix, WeightGrad, Work


def gmm(
    rows: jax.Array, params: Instances, window: Window, matrix: Matrix, *, transposed: bool = False, gemm: str
) -> jax.Array:
    """Multiplies each block of rows with the matrix of its instance, accumulating in f32.

    Kernels for GPUs round f32 operands to TF32, as JAX does there unless told otherwise.

    Args:
      rows: [n or more, in] rows, aligned by instance; what lies behind the window's n rows is left alone.
      params: packed parameters, in the dtype of `rows`.
      window: of n rows, whose receive buffer `rows` fill; blocks of no instance that `params` holds are idle and yield
        zeros.
      matrix: which matrix of the expert.
      transposed: multiply with its transpose, as the backward pass does.
      gemm: the form, see `LayerConfig.gemm`.

    Returns:
      [n, out] in the dtype of `rows`.

    Raises:
      ValueError: gemm="pallas" and sides that no tile divides.
    """
    block_rows = window.num_rows // window.block_instance.shape[0]
    shared = {"block_rows": block_rows, "matrix": matrix, "transposed": transposed}
    forms = [partial(form.gmm, **shared) for form in (scan, pallas, ragged)]
    with jax.named_scope("topoep_gmm"):
        return _run(gemm, block_rows, [matrix], forms, rows, params, window.block_instance)


def wgrad(
    sums: jax.Array,
    first_instance: int,
    jobs: Sequence[WeightGrad],
    first_row: jax.Array | int = 0,
    *,
    block_rows: int,
    gemm: str,
) -> jax.Array:
    """Adds some rows of the gradient of one matrix, for some instances, in place where the compiler can.

    The order of summation is fixed: jobs in order, and the blocks of each in row order.

    Args:
      sums: f32 [m, rows, cols], what to add to: rows first_row .. first_row + rows of the gradient of instances
        first_instance .. first_instance + m - 1.
      first_instance: 0 for mains, Em for slots.
      jobs: what to add, all of the same matrix.
      first_row: int32 [], may be traced; a multiple of `rows`.
      block_rows: rows of a block.
      gemm: the form, see `LayerConfig.gemm`.

    Returns:
      f32 [m, rows, cols].

    Raises:
      ValueError: gemm="pallas" and sides that no tile divides.
    """
    works = tuple(Work.of(job) for job in jobs)
    forms = [
        partial(form.wgrad, first_instance=first_instance, block_rows=block_rows) for form in (scan, pallas, ragged)
    ]
    with jax.named_scope("topoep_wgrad"):
        return _run(
            gemm, block_rows, [Matrix(0, *sums.shape[1:])], forms, sums, works, jnp.asarray(first_row, jnp.int32)
        )


@jax.named_scope("topoep_swiglu_backward")
def swiglu_backward(
    gate_up: jax.Array, weight: jax.Array, grad: jax.Array, *, block_rows: int, gemm: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of `swiglu`, and the activation again, from which weight gradients are made.

    Args:
      gate_up: [n, 2 I] the operand of `swiglu`; a kernel puts its gradient there, if nothing else needs it.
      weight: f32 [n].
      grad: [n, I] gradient of the result; a kernel puts the activation there.
      block_rows: rows of a block.
      gemm: the form of the products before and after, see `LayerConfig.gemm`.

    Returns:
      Gradient of gate_up [n, 2 I], activation [n, I], both in the dtype of `gate_up`, gradient of weight f32 [n].
    """
    forms = [activation.backward, activation.backward_by_kernel, activation.backward]
    return _run(gemm, block_rows, [Matrix(0, grad.shape[1], grad.shape[1])], forms, gate_up, weight, grad)


def _run(
    gemm: str, block_rows: int, matrices: Sequence[Matrix], forms: Sequence[Callable[..., Any]], *operands: Any
) -> Any:
    scanned, kernel, oracle = forms
    if gemm == "ragged_dot":
        return oracle(*operands)
    if gemm == "scan" or (gemm == "auto" and not pallas.divides(block_rows, matrices)):
        return scanned(*operands)
    if gemm == "auto":
        return _compat.platform_dependent(*operands, cuda=kernel, default=scanned)
    pallas.check(block_rows, matrices)
    return _compat.platform_dependent(*operands, cpu=partial(kernel, interpret=True), default=kernel)
