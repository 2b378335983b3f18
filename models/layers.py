"""The parts every decoder shares: norm, embedding, projection and dense block, each with a chosen compute dtype."""

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
        return (wide * _along_last(self.scale[...].astype(jnp.float32), x.ndim)).astype(x.dtype)


class Embedding(nnx.Module):
    """Token table [vocab, hidden]."""

    def __init__(
        self, vocab: int, hidden: int, *, dtype: DTypeLike, param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ) -> None:
        self.dtype = dtype
        self.table = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (vocab, hidden), param_dtype))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Looks up tokens, int32 [...]: [..., hidden] in the compute dtype, NaN for what is no token."""
        table = self.table[...]
        known = jnp.where(tokens < 0, table.shape[0], tokens)  # Negative indices would count from the end.
        return jnp.take(table, known, axis=0, mode="fill", fill_value=jnp.nan).astype(self.dtype)

    def scores(self, x: jax.Array) -> jax.Array:
        """The table as output layer, where it is tied: [..., hidden] -> [..., vocab] in the compute dtype."""
        return jnp.matmul(x.astype(self.dtype), self.table[...].astype(self.dtype).T)


class Projection(nnx.Module):
    """Linear map [..., inputs] -> [..., outputs], with a bias if asked for."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool = False,
        dtype: DTypeLike,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.dtype = dtype
        self.kernel = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (inputs, outputs), param_dtype))
        if bias:
            self.bias = nnx.Param(jnp.zeros((outputs,), param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x [..., inputs] to [..., outputs] in the compute dtype."""
        y = jnp.matmul(x.astype(self.dtype), self.kernel[...].astype(self.dtype))
        return y + _along_last(self.bias[...].astype(self.dtype), y.ndim) if hasattr(self, "bias") else y


class SwiGLU(nnx.Module):
    """The dense block: down(silu(gate(x)) * up(x)), the activation in f32 as in the experts."""

    def __init__(
        self, hidden: int, ffn: int, *, dtype: DTypeLike, param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ) -> None:
        self.gate = Projection(hidden, ffn, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.up = Projection(hidden, ffn, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.down = Projection(ffn, hidden, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x [..., hidden] to the same shape in the compute dtype."""
        gate, up = self.gate(x).astype(jnp.float32), self.up(x).astype(jnp.float32)
        return self.down(jax.nn.silu(gate) * up)


def _along_last(vector: jax.Array, ndim: int) -> jax.Array:
    """A vector as an array of `ndim` axes: implicit broadcasting is refused where rank promotion is an error."""
    return vector.reshape((1,) * (ndim - 1) + (-1,))
