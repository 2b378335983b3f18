"""Causal grouped-query attention with rotary positions and, as in Qwen3, a norm on every query and key head."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from models.layers import Projection, RMSNorm


def rotate(x: jax.Array, *, theta: float) -> jax.Array:
    """Rotary position embedding over the second axis.

    Halves are paired (i, i + head_dim / 2), the convention of the released Qwen3 weights. Angles are f32.

    Args:
      x: [batch, length, heads, head_dim], head_dim even.
      theta: base of the geometric row of wavelengths.

    Returns:
      The rotated heads, in the shape and dtype of `x`.
    """
    length, half = x.shape[1], x.shape[3] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency[None, :]
    cos, sin = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Causal self-attention: `num_heads` query heads share `num_kv_heads` key and value heads."""

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        rope_theta: float,
        norm_eps: float,
        dtype: DTypeLike,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}: query heads share key heads"
                " in equal groups"
            )
        if head_dim % 2:
            raise ValueError(f"head_dim={head_dim} is odd: rotary positions turn pairs, take an even head_dim")
        dtypes: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        self.head_dim, self.rope_theta = head_dim, rope_theta
        self.query = Projection(hidden, num_heads * head_dim, **dtypes, rngs=rngs)
        self.key = Projection(hidden, num_kv_heads * head_dim, **dtypes, rngs=rngs)
        self.value = Projection(hidden, num_kv_heads * head_dim, **dtypes, rngs=rngs)
        self.out = Projection(num_heads * head_dim, hidden, **dtypes, rngs=rngs)
        self.query_norm = RMSNorm(head_dim, eps=norm_eps, param_dtype=param_dtype)
        self.key_norm = RMSNorm(head_dim, eps=norm_eps, param_dtype=param_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Mixes x [batch, length, hidden] into the same shape, in the compute dtype."""
        split = (*x.shape[:2], -1, self.head_dim)
        query = rotate(self.query_norm(self.query(x).reshape(split)), theta=self.rope_theta)
        key = rotate(self.key_norm(self.key(x).reshape(split)), theta=self.rope_theta)
        value = self.value(x).reshape(split)
        with jax.numpy_dtype_promotion("standard"):  # JAX's own code promotes bfloat16 scores to f32 implicitly.
            mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.reshape(*x.shape[:2], -1))
