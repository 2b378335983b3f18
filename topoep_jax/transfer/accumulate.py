"""Staged replica gradients onto the gradients of their mains, in the order of the staged rows."""

import jax
import jax.numpy as jnp
from jax import lax


def accumulate(grads: jax.Array, staged: jax.Array, target: jax.Array, column: jax.Array) -> jax.Array:
    """Adds each staged row to the main that it feeds, row by row: a fixed order, so that equal runs are equal bitwise.

    Args:
      grads: f32 [Em, D].
      staged: f32 [rows, S], columns `column` .. `column` + S of replica gradients.
      target: int32 [rows], the main that a row feeds, -1 for none.
      column: int32 [].

    Returns:
      f32 [Em, D].
    """
    here = lax.dynamic_slice_in_dim(grads, column, staged.shape[1], 1)

    def add(i: jax.Array, here: jax.Array) -> jax.Array:
        row = jnp.maximum(target[i], 0)
        # Adding zeros instead would turn -0.0 into 0.0.
        added = jnp.where(target[i] >= 0, here[row] + staged[i], here[row])
        return lax.dynamic_update_index_in_dim(here, added, row, 0)

    here = lax.fori_loop(0, staged.shape[0], add, here)
    return lax.dynamic_update_slice_in_dim(grads, here, column, 1)
