"""Splits rows of several sources over several takers in whole numbers."""

import numpy as np


def apportion(given: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """Who gives whom how many rows: int64 [..., S, n], in proportion to both sides, and summing to both exactly.

    Everyone gets the proportional share rounded down; what is left on both sides is laid end to end and matched by
    overlap. Nothing is ever negative.

    Args:
      given: int64 [..., S], rows of each source.
      taken: int64 [..., n], rows of each taker, with the same sum; the products of two entries must fit 64 bits.
    """
    total = np.maximum(given.sum(axis=-1), 1)[..., None, None]
    base = given[..., :, None] * taken[..., None, :] // total
    return base + overlap(given - base.sum(axis=-1), taken - base.sum(axis=-2))


def overlap(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Common length of intervals: `first` [..., m] and `second` [..., n], each laid end to end from 0; [..., m, n]."""
    first_end, second_end = first.cumsum(axis=-1), second.cumsum(axis=-1)
    return common_length(first_end - first, first_end, second_end - second, second_end)


def common_length(
    first_start: np.ndarray, first_end: np.ndarray, second_start: np.ndarray, second_end: np.ndarray
) -> np.ndarray:
    """Common length of every interval of a first list [..., m] with every one of a second [..., n]; [..., m, n]."""
    start = np.maximum(first_start[..., :, None], second_start[..., None, :])
    end = np.minimum(first_end[..., :, None], second_end[..., None, :])
    return np.maximum(end - start, 0)
