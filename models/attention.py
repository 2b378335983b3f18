"""Causal self-attention of two kinds, grouped queries and multi-head latents, over one bounded-memory core."""

import dataclasses
import functools
import logging
import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from models.layers import Projection, RMSNorm
from models.rotary import Rotation, rotate_halves, rotate_pairs

Implementation = Literal["auto", "xla", "cudnn"]

MAX_SCORES = 2**27
"""Scores that a device holds at a time where XLA computes them: 512 MiB in f32."""

_LATENT_EPS = 1e-6  # DeepSeek's latent norms do not follow the model's own eps.


@dataclasses.dataclass(frozen=True)
class Core:
    """softmax(query key^T) value, causal, within segments.

    cuDNN never stores the scores. XLA does, so there they are made for a block of queries at a time, and made again in
    the backward pass.

    Attributes:
      mesh: the devices that decide what "auto" takes.
      batch_axes: mesh axes that the batch is sharded over.
      implementation: "xla", "cudnn" (which raises where it does not apply), or "auto": cuDNN where the devices are
        present and it compiles for these shapes, else XLA.
    """

    mesh: Mesh
    batch_axes: tuple[str, ...] = ()
    implementation: Implementation = "auto"

    def __post_init__(self) -> None:
        if self.implementation not in get_args(Implementation):
            raise ValueError(f"attention={self.implementation!r} is unknown: take one of {get_args(Implementation)}")

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None, *, scale: float
    ) -> jax.Array:
        """Mixes values.

        Args:
          query: [B, S, heads, D].
          key: [B, S, kv_heads, D].
          value: [B, S, kv_heads, V], V at most D.
          segments: int32 [B, S], or None where each sequence is one segment.
          scale: factor on the scores.

        Returns:
          [B, S, heads, V].
        """
        width = value.shape[3]
        # JAX wants values as wide as keys; zeros more cost less than a second implementation.
        value = jnp.pad(value, ((0, 0), (0, 0), (0, 0), (0, key.shape[3] - width)))
        with jax.numpy_dtype_promotion("standard"):  # JAX's own code promotes bfloat16 scores to f32 implicitly.
            if self._takes_cudnn(query, key, masked=segments is not None):
                mixed = _cudnn(query, key, value, segments, scale=scale)
            else:
                mixed = _in_blocks(query, key, value, segments, scale=scale, rows=self._rows(query))
        return mixed[..., :width]

    def _takes_cudnn(self, query: jax.Array, key: jax.Array, *, masked: bool) -> bool:
        if self.implementation != "auto":
            return self.implementation == "cudnn"
        ours = set(self.mesh.devices.flat)
        # None where a program is compiled ahead of time, for GPUs that this machine does not have.
        device = next((device for device in jax.local_devices() if device in ours), None)
        if device is None or device.platform == "cpu":
            return False
        return _compiles_cudnn(device, query.shape[1:], key.shape[1:], query.dtype, masked)

    def _rows(self, query: jax.Array) -> int:
        """Queries whose scores may exist at a time: a power of 2, so that it divides the usual lengths."""
        batch, length, heads, _ = query.shape
        shards = math.prod(self.mesh.shape[axis] for axis in self.batch_axes)
        rows = MAX_SCORES // (-(-batch // shards) * heads * length)
        return length if rows >= length else max(2 ** (max(rows, 1).bit_length() - 1), 16)


def _cudnn(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None, *, scale: float
) -> jax.Array:
    mask = None if segments is None else (segments[:, None, :, None] == segments[:, None, None, :])
    return jax.nn.dot_product_attention(
        query, key, value, mask=mask, scale=scale, is_causal=True, implementation="cudnn"
    )


@functools.cache
def _compiles_cudnn(device: jax.Device, query: tuple[int, ...], key: tuple[int, ...], dtype: Any, masked: bool) -> bool:
    """Whether this machine's cuDNN has a kernel, forward and backward: only compiling tells."""

    def loss(query: jax.Array, key: jax.Array, segments: jax.Array | None) -> jax.Array:
        return _cudnn(query, key, key, segments, scale=1.0).astype(jnp.float32).sum()

    place = jax.sharding.SingleDeviceSharding(device)
    shapes = [jax.ShapeDtypeStruct((1, *shape), dtype, sharding=place) for shape in (query, key)]
    segments = jax.ShapeDtypeStruct((1, query[0]), jnp.int32, sharding=place) if masked else None
    try:
        jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes, segments).compile()
    except Exception as error:  # noqa: BLE001 - JAX, XLA and cuDNN each have errors of their own for "not supported".
        logging.getLogger(__name__).warning("attention takes XLA, for cuDNN does not apply: %s", error)
        return False
    return True


def _in_blocks(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None, *, scale: float, rows: int
) -> jax.Array:
    """Attention in XLA, `rows` queries at a time."""
    batch, length, heads, size = query.shape
    if rows >= length:
        index = jnp.arange(length, dtype=jnp.int32)
        return _block(query, key, value, segments, segments, index, scale)
    count = -(-length // rows)
    surplus = count * rows - length  # Queries of no token, cut off below.
    query = jnp.pad(query, ((0, 0), (0, surplus), (0, 0), (0, 0)))
    blocks = jnp.moveaxis(query.reshape(batch, count, rows, heads, size), 1, 0)
    of_query = None
    if segments is not None:
        of_query = jnp.moveaxis(jnp.pad(segments, ((0, 0), (0, surplus))).reshape(batch, count, rows), 1, 0)
    index = jnp.arange(count * rows, dtype=jnp.int32).reshape(count, rows)
    # Gradients of keys and values are summed over blocks in the dtype that they have outside the loop.
    wide = [array.astype(jnp.float32) for array in (key, value)]

    @jax.checkpoint
    def mix(block: tuple[jax.Array, jax.Array | None, jax.Array], wide: list[jax.Array]) -> jax.Array:
        query, of_query, index = block
        key, value = (array.astype(query.dtype) for array in wide)
        return _block(query, key, value, of_query, segments, index, scale)

    mixed = jax.lax.map(lambda block: mix(block, wide), (blocks, of_query, index))
    return jnp.moveaxis(mixed, 0, 1).reshape(batch, count * rows, heads, size)[:, :length]


def _block(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    of_query: jax.Array | None,
    of_key: jax.Array | None,
    index: jax.Array,
    scale: float,
) -> jax.Array:
    """Attention of queries [B, rows, ...] at positions `index` [rows] of their sequence, all scores at once."""
    mask = (index[:, None] >= jnp.arange(key.shape[1], dtype=jnp.int32)[None, :])[None, None]
    if of_query is not None and of_key is not None:
        mask = mask & (of_query[:, None, :, None] == of_key[:, None, None, :])
    return jax.nn.dot_product_attention(query, key, value, mask=mask, scale=scale, implementation="xla")


class GroupedQueryAttention(nnx.Module):
    """`num_heads` query heads share `num_kv_heads` key and value heads (Ainslie et al., arXiv 2305.13245).

    Args:
      hidden: width of a token.
      num_heads: a multiple of num_kv_heads.
      num_kv_heads: heads of keys and of values.
      head_dim: width of each head.
      core: what mixes values.
      qk_norm: norm every query and key head, with scales that the heads share.
      qkv_bias: add a bias to queries, keys and values; never to the output.
      norm_eps: of those norms.
      dtype: of activations and products.
      param_dtype: of the parameters.
      rngs: stream `params`.
    """

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        core: Core,
        qk_norm: bool,
        qkv_bias: bool,
        norm_eps: float,
        dtype: DTypeLike,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        dtypes: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        self.head_dim, self.core = head_dim, core
        self.query = Projection(hidden, num_heads * head_dim, bias=qkv_bias, **dtypes, rngs=rngs)
        self.key = Projection(hidden, num_kv_heads * head_dim, bias=qkv_bias, **dtypes, rngs=rngs)
        self.value = Projection(hidden, num_kv_heads * head_dim, bias=qkv_bias, **dtypes, rngs=rngs)
        self.out = Projection(num_heads * head_dim, hidden, **dtypes, rngs=rngs)
        if qk_norm:
            self.query_norm = RMSNorm(head_dim, eps=norm_eps, param_dtype=param_dtype)
            self.key_norm = RMSNorm(head_dim, eps=norm_eps, param_dtype=param_dtype)

    def __call__(self, x: jax.Array, by: Rotation, segments: jax.Array | None = None) -> jax.Array:
        """Mixes x [B, S, hidden] into the same shape, in the compute dtype.

        Args:
          x: normed tokens.
          by: rotation of the first coordinates of each head, in half pairs.
          segments: int32 [B, S], or None.
        """
        split = (*x.shape[:2], -1, self.head_dim)
        query, key, value = (project(x).reshape(split) for project in (self.query, self.key, self.value))
        if hasattr(self, "query_norm"):
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = rotate_halves(query, by), rotate_halves(key, by)
        mixed = self.core(query, key, value, segments, scale=self.head_dim**-0.5)
        return self.out(mixed.reshape(*x.shape[:2], -1))


class LatentAttention(nnx.Module):
    """Multi-head latent attention: keys and values come out of one narrow latent (DeepSeek-V2, arXiv 2405.04434, 2.1).

    Every head's query and key are `nope_dim` coordinates without positions and `rope_dim` rotated ones; of the key, the
    rotated part is one for all heads.

    Args:
      hidden: width of a token.
      num_heads: heads of queries, keys and values.
      q_lora: width of the latent of queries; 0 where they are projected straight from the token.
      kv_lora: width of the latent of keys and values.
      nope_dim: see above.
      rope_dim: see above.
      v_dim: width of a value, at most nope_dim + rope_dim.
      core: what mixes values.
      score_magnitude: factor on the scores besides 1 / sqrt(nope_dim + rope_dim), see `Yarn`.
      dtype: of activations and products.
      param_dtype: of the parameters.
      rngs: stream `params`.
    """

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        *,
        q_lora: int,
        kv_lora: int,
        nope_dim: int,
        rope_dim: int,
        v_dim: int,
        core: Core,
        score_magnitude: float = 1.0,
        dtype: DTypeLike,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        dtypes: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        self.kv_lora, self.nope_dim, self.rope_dim, self.core = kv_lora, nope_dim, rope_dim, core
        self.scale = score_magnitude * (nope_dim + rope_dim) ** -0.5
        queries = num_heads * (nope_dim + rope_dim)
        if q_lora:
            self.query_down = Projection(hidden, q_lora, **dtypes, rngs=rngs)
            self.query_norm = RMSNorm(q_lora, eps=_LATENT_EPS, param_dtype=param_dtype)
            self.query_up = Projection(q_lora, queries, **dtypes, rngs=rngs)
        else:
            self.query = Projection(hidden, queries, **dtypes, rngs=rngs)
        self.kv_down = Projection(hidden, kv_lora + rope_dim, **dtypes, rngs=rngs)
        self.kv_norm = RMSNorm(kv_lora, eps=_LATENT_EPS, param_dtype=param_dtype)
        self.kv_up = Projection(kv_lora, num_heads * (nope_dim + v_dim), **dtypes, rngs=rngs)
        self.out = Projection(num_heads * v_dim, hidden, **dtypes, rngs=rngs)

    def __call__(self, x: jax.Array, by: Rotation, segments: jax.Array | None = None) -> jax.Array:
        """Mixes x [B, S, hidden] into the same shape, in the compute dtype.

        Args:
          x: normed tokens.
          by: rotation of rope_dim coordinates, in neighbouring pairs.
          segments: int32 [B, S], or None.
        """
        batch, length, _ = x.shape
        if hasattr(self, "query_down"):
            query = self.query_up(self.query_norm(self.query_down(x)))
        else:
            query = self.query(x)
        query = query.reshape(batch, length, -1, self.nope_dim + self.rope_dim)
        query = jnp.concatenate([query[..., : self.nope_dim], rotate_pairs(query[..., self.nope_dim :], by)], axis=-1)
        down = self.kv_down(x)
        latent, turned = down[..., : self.kv_lora], rotate_pairs(down[..., None, self.kv_lora :], by)
        up = self.kv_up(self.kv_norm(latent)).reshape(batch, length, query.shape[2], -1)
        key, value = up[..., : self.nope_dim], up[..., self.nope_dim :]
        turned = jnp.broadcast_to(turned, (*key.shape[:3], self.rope_dim))
        mixed = self.core(query, jnp.concatenate([key, turned], axis=-1), value, segments, scale=self.scale)
        return self.out(mixed.reshape(batch, length, -1))
