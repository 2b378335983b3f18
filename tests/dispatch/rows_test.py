"""Rows by index: the kernels give what plain indexing gives, to the bit, and leave alone what nobody asks for."""

import jax.numpy as jnp
import numpy as np
import pytest

from topoep_jax.dispatch import add, pick, rows


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("count", "width"), [(10, 48), (16, 128)])
def test_the_kernels_give_what_plain_indexing_gives(dtype, count, width):
    rng = np.random.default_rng(count)
    values = jnp.asarray(rng.normal(size=(7, width)), dtype)
    index = jnp.asarray(rng.integers(rows.NOBODY, 7, count), jnp.int32)
    picked, wanted = rows.pick_by_kernel(values, index, interpret=True), pick(values, index)
    np.testing.assert_array_equal(picked[index >= 0], wanted[index >= 0])
    np.testing.assert_array_equal(wanted[index >= 0], values[index[index >= 0]])

    table = jnp.asarray(rng.integers(rows.NOBODY, 7, (count, 5)), jnp.int32).at[3].set(rows.NOBODY)
    table = table.at[2, 0].set(rows.UNREAD)
    read = np.arange(count) != 2
    added, wanted = rows.add_by_kernel(values, table, interpret=True), add(values, table)
    np.testing.assert_array_equal(added[read], wanted[read])
    assert not np.asarray(wanted[3]).any()
    one_by_one = np.zeros((count, width), np.float32)
    for row, indices in enumerate(np.asarray(table)):
        for at in indices[indices >= 0]:
            one_by_one[row] += np.asarray(values[at], np.float32)
    np.testing.assert_array_equal(np.asarray(wanted)[read], jnp.asarray(one_by_one, dtype)[read])


def test_the_kernels_touch_no_row_that_nobody_asks_for():
    """Interpreted, what a kernel does not write is NaN or anything else, and never read: so poison stays out."""
    values = jnp.full((4, 16), jnp.nan).at[1].set(2)
    table = jnp.full((4, 2), rows.NOBODY, jnp.int32).at[:, 1].set(1)
    np.testing.assert_array_equal(rows.add_by_kernel(values, table, interpret=True), np.full((4, 16), 2.0))
    np.testing.assert_array_equal(add(values, table), np.full((4, 16), 2.0))


def test_rows_that_no_vector_fits_are_indexed_plainly():
    values = jnp.arange(12.0).reshape(4, 3)
    np.testing.assert_array_equal(pick(values, jnp.asarray([2, 0])), values[jnp.asarray([2, 0])])
    np.testing.assert_array_equal(add(values, jnp.asarray([[2, 0, rows.NOBODY]])), values[2:3] + values[:1])
