"""Choices among many, the lowest index on a tie."""

import numpy as np

_MOST = np.iinfo(np.int64).max


def first_smallest(feasible: np.ndarray, *keys: np.ndarray) -> np.ndarray:
    """Flat index of the feasible element with the lexicographically smallest keys in each row of [B, ..]; int64 [B].

    Every row must have a feasible element.
    """
    remaining = feasible.reshape(len(feasible), -1)
    for key in keys:
        key = np.where(remaining, key.reshape(remaining.shape), _MOST)
        remaining = remaining & (key == key.min(axis=1, keepdims=True))
    return remaining.argmax(axis=1)


def first_largest_of_each(group: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Index of the first largest value of each group; `group` (int [n]) ascends."""
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    if starts.size == 0:
        return starts
    sizes = np.diff(starts, append=group.size)
    largest = np.flatnonzero(value == np.maximum.reduceat(value, starts).repeat(sizes))
    return largest[np.flatnonzero(np.diff(group[largest], prepend=-1))]
