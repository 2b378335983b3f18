"""Values that are read or written in a narrower dtype."""

import pathlib

import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from models.checkpoint.faults import raise_faults


class Cast:
    """Casts blocks, and remembers what did not fit: float16 ends at 65504, and infinity is another value."""

    def __init__(self) -> None:
        self._faults: list[str] = []

    def __call__(self, name: str, values: np.ndarray, dtype: DTypeLike) -> np.ndarray:
        """The values in `dtype`, contiguous."""
        if jnp.finfo(dtype).max >= jnp.finfo(values.dtype).max:
            return np.ascontiguousarray(values, dtype)
        with np.errstate(over="ignore"):
            result = np.ascontiguousarray(values, dtype)
        lost = np.isfinite(values) & ~np.isfinite(result)
        if lost.any():
            most = np.abs(values[lost]).max()
            kind = result.dtype.name
            self._faults.append(f"too large for {kind}: {name} has {lost.sum()} such values, up to {most:.6g}")
        return result

    def done(self, where: str | pathlib.Path = "values to write") -> None:
        """Raises CheckpointError with every tensor that had such values."""
        raise_faults(where, self._faults)
