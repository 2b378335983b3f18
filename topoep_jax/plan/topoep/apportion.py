"""Whole rows of several sources over several takers; xla_ffi/plan/topoep/apportion.h is the same in C++."""

import numpy as np


def apportion(given: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """Who gives whom how many rows: int64 [S, n], near the proportion, and summing to both sides exactly.

    Source s gives taker n the proportional share floor(given[s] x taken[n] / total). What is then left of the sources
    is laid end to end, as is what is left of the takers; where the two lines overlap, the rest goes from one to the
    other. Nothing is ever negative.

    Args:
      given: int64 [S], rows of each source.
      taken: int64 [n], rows of each taker, with the same sum; the products of two entries must fit 64 bits.

    Example:
      The shares are 1.5 each; 1 of them each, then source 0's last row goes to taker 0 and source 1's to taker 1.

      >>> apportion(np.array([3, 3]), np.array([3, 3])).tolist()
      [[2, 1], [1, 2]]
    """
    share = np.multiply.outer(given, taken) // max(int(given.sum()), 1)
    return share + overlap(given - share.sum(axis=1), taken - share.sum(axis=0))


def overlap(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Common length of intervals: `first` [..., m] and `second` [..., n], each laid end to end from 0; [..., m, n]."""
    first_end, second_end = first.cumsum(axis=-1)[..., :, None], second.cumsum(axis=-1)[..., None, :]
    start = np.maximum(first_end - first[..., :, None], second_end - second[..., None, :])
    return np.maximum(np.minimum(first_end, second_end) - start, 0)
