"""The layers of a Gemma-like decoder in Flax nnx, f32. Plain Flax: nothing here knows of topoep_jax.

Arrays are described by their dimensions: B batch, T time, D hidden, N query heads, K key and value heads, H head.
"""

import jax
import jax.numpy as jnp
from flax import nnx


class RMSNorm(nnx.Module):
    """Root-mean-square norm; the parameter is the scale's distance from one."""

    def __init__(self, size: int) -> None:
        self.scale = nnx.Param(jnp.zeros(size))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
        return x * (1 + jnp.broadcast_to(self.scale[...], x.shape))


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding of x [B, T, N or K, H]: pairs (i, i + H/2) turn by an angle that grows with T."""
    length, half = x.shape[1], x.shape[3] // 2
    angle = jnp.outer(jnp.arange(length), theta ** (-jnp.arange(half) / half))[None, :, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Attention(nnx.Module):
    """Causal attention: groups of query heads share a key and value head; queries and keys are normalised."""

    def __init__(
        self, hidden: int, num_heads: int, num_kv_heads: int, head_dim: int, rope_theta: float, rngs: nnx.Rngs
    ) -> None:
        heads, kv_heads = (num_heads, head_dim), (num_kv_heads, head_dim)
        self.query = nnx.LinearGeneral(hidden, heads, use_bias=False, rngs=rngs)
        self.key = nnx.LinearGeneral(hidden, kv_heads, use_bias=False, rngs=rngs)
        self.value = nnx.LinearGeneral(hidden, kv_heads, use_bias=False, rngs=rngs)
        self.out = nnx.LinearGeneral(heads, hidden, axis=(-2, -1), use_bias=False, rngs=rngs)
        self.query_norm, self.key_norm = RMSNorm(head_dim), RMSNorm(head_dim)
        self.rope_theta = rope_theta

    def __call__(self, x: jax.Array) -> jax.Array:
        query = rotate(self.query_norm(self.query(x)), self.rope_theta)  # BTNH
        key = rotate(self.key_norm(self.key(x)), self.rope_theta)  # BTKH
        return self.out(jax.nn.dot_product_attention(query, key, self.value(x), is_causal=True))


class MLP(nnx.Module):
    """GeGLU: x [B, T, D] to the same shape."""

    def __init__(self, hidden: int, ffn: int, rngs: nnx.Rngs) -> None:
        self.gate = nnx.Linear(hidden, ffn, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(hidden, ffn, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(ffn, hidden, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.gate(x)) * self.up(x))
