"""The parts every decoder shares: norm, embedding and projection, each with f32 masters and a chosen compute dtype."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, computed in f32 and returned in the dtype of its input."""

    def __init__(self, size: int, *, eps: float, param_dtype: DTypeLike = jnp.float32) -> None:
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((size,), param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises x [..., size]."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
        return (wide * scale).astype(x.dtype)


class Embedding(nnx.Module):
    """Token table [vocab, hidden]."""

    def __init__(
        self, vocab: int, hidden: int, *, dtype: DTypeLike, param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ) -> None:
        self.dtype = dtype
        self.table = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (vocab, hidden), param_dtype))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Looks up tokens, int32 [...]: [..., hidden] in the compute dtype."""
        return jnp.take(self.table[...], tokens, axis=0).astype(self.dtype)


class Projection(nnx.Module):
    """Linear map without bias, [..., inputs] -> [..., outputs]."""

    def __init__(
        self, inputs: int, outputs: int, *, dtype: DTypeLike, param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ) -> None:
        self.dtype = dtype
        self.kernel = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (inputs, outputs), param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x [..., inputs] to [..., outputs] in the compute dtype."""
        return jnp.matmul(x.astype(self.dtype), self.kernel[...].astype(self.dtype))
