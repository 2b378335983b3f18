"""Rotary positions: which frequencies, which coordinates form a pair, and YaRN's stretch to longer contexts.

Sources: Su et al., "RoFormer" (arXiv 2104.09864); Peng et al., "YaRN" (arXiv 2309.00071), with the magnitude terms as
the code released with DeepSeek-V2 (arXiv 2405.04434) has them.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Yarn:
    """A context stretched by `factor`: slow frequencies are interpolated, fast ones kept, a linear ramp between.

    Attributes:
      factor: how many times longer the context became.
      original_length: tokens of the context before.
      beta_fast: frequencies that turn at least this often over `original_length` are kept.
      beta_slow: those that turn at most this often are divided by `factor`.
      mscale: weight of the magnitude that rotated coordinates gain.
      mscale_all_dim: weight of the magnitude that the whole score gains; the rotation is divided by it, so that equal
        weights leave the rotation a rotation.

    Raises:
      ValueError: values out of range.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        if not (self.factor >= 1 and self.original_length >= 1 and self.beta_fast >= self.beta_slow > 0):
            raise ValueError(f"{self} needs factor >= 1, original_length >= 1 and beta_fast >= beta_slow > 0")
        # With one weight alone, transformers takes another magnitude than the model's own code.
        both = self.mscale > 0 and self.mscale_all_dim > 0
        if not math.isfinite(self.factor) or not (both or (self.mscale, self.mscale_all_dim) == (1, 0)):
            raise ValueError(f"{self} needs a finite factor, and positive mscale and mscale_all_dim: both or none")

    @property
    def rotation_magnitude(self) -> float:
        """Factor on rotated coordinates of queries and of keys."""
        return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)

    @property
    def score_magnitude(self) -> float:
        """Factor on attention scores: that of a query times that of a key."""
        return self._magnitude(self.mscale_all_dim) ** 2

    def _magnitude(self, weight: float) -> float:
        return 1.0 + 0.1 * weight * math.log(self.factor) if self.factor > 1 else 1.0

    def to_hf(self) -> dict[str, Any]:
        """The `rope_scaling` of a Hugging Face config."""
        return {
            "type": "yarn",
            "factor": self.factor,
            "original_max_position_embeddings": self.original_length,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            "mscale": self.mscale,
            "mscale_all_dim": self.mscale_all_dim,
        }

    def stretch(self, frequency: np.ndarray, theta: float) -> np.ndarray:
        """The new frequencies, f64 [dim / 2], for those of base `theta`."""
        half = len(frequency)

        def index_of(turns: float) -> float:
            """The (fractional) index at which a frequency makes that many turns over the original context."""
            return half * math.log(self.original_length / (turns * 2 * math.pi)) / math.log(theta)

        low = max(math.floor(index_of(self.beta_fast)), 0)
        high = min(math.ceil(index_of(self.beta_slow)), 2 * half - 1)
        ramp = np.clip((np.arange(half) - low) / max(high - low, 1e-3), 0, 1)
        return frequency * (1 - ramp) + frequency / self.factor * ramp


class Rotation(NamedTuple):
    """Cosine and sine of every pair's angle at every position, f32 [B or 1, S, dim / 2]."""

    cos: jax.Array
    sin: jax.Array


def rotation(positions: jax.Array, dim: int, theta: float, yarn: Yarn | None = None) -> Rotation:
    """The rotation of `dim` coordinates at each position.

    Args:
      positions: int32 [B or 1, S].
      dim: rotated coordinates of a head, even.
      theta: base of the geometric row of wavelengths.
      yarn: the stretch, or None.
    """
    frequency = theta ** (-np.arange(0, dim, 2) / dim)
    magnitude = 1.0
    if yarn is not None:
        frequency, magnitude = yarn.stretch(frequency, theta), yarn.rotation_magnitude
    angle = positions[..., None].astype(jnp.float32) * jnp.asarray(frequency, jnp.float32)[None, None, :]
    return Rotation(jnp.cos(angle) * magnitude, jnp.sin(angle) * magnitude)


def rotate_halves(x: jax.Array, by: Rotation) -> jax.Array:
    """Rotates the first coordinates of each head, paired (i, i + dim / 2); those beyond dim pass (partial rotary).

    Args:
      x: [B, S, heads, head_dim], head_dim at least dim.
      by: of dim coordinates.

    Returns:
      The shape and dtype of `x`; computed in f32.
    """
    half = by.cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    return jnp.concatenate([*_turn(first, second, by), x[..., 2 * half :]], axis=-1)


def rotate_pairs(x: jax.Array, by: Rotation) -> jax.Array:
    """Rotates as `rotate_halves` does, with neighbours paired (2 i, 2 i + 1), and all of head_dim = dim rotated."""
    return jnp.stack(_turn(x[..., 0::2], x[..., 1::2], by), axis=-1).reshape(x.shape)


def _turn(first: jax.Array, second: jax.Array, by: Rotation) -> tuple[jax.Array, jax.Array]:
    cos, sin = by.cos[:, :, None, :], by.sin[:, :, None, :]
    dtype, first, second = first.dtype, first.astype(jnp.float32), second.astype(jnp.float32)
    return (first * cos - second * sin).astype(dtype), (second * cos + first * sin).astype(dtype)
