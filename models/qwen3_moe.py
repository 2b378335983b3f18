"""Qwen3-MoE: its shapes, the model in order of execution, and where each parameter lives on the mesh.

All layers are alike, so their parameters are stacked on a leading axis and one scanned body is compiled for any depth.
Released values: the `config.json` of Qwen3-30B-A3B (Apache-2.0).
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from models.attention import Attention
from models.layers import Embedding, Projection, RMSNorm
from topoep_jax import MoE, MoEMetrics


@dataclasses.dataclass(frozen=True)
class Qwen3MoEConfig:
    """Shapes of one model. `ffn` is the width of one expert."""

    vocab: int
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    num_experts: int
    top_k: int
    rope_theta: float = 1e6
    norm_eps: float = 1e-6

    @classmethod
    def qwen3_30b_a3b(cls) -> "Qwen3MoEConfig":
        """The released 30B model, 3B active."""
        return cls(
            vocab=151936,
            hidden=2048,
            num_layers=48,
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            ffn=768,
            num_experts=128,
            top_k=8,
        )

    @classmethod
    def tiny(cls) -> "Qwen3MoEConfig":
        """A byte-level model for a laptop: narrow experts, so that copying one costs less than sending its tokens."""
        return cls(
            vocab=257,
            hidden=128,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            ffn=64,
            num_experts=32,
            top_k=4,
            rope_theta=1e4,
        )


class DecoderLayer(nnx.Module):
    """Attention and the expert block, each behind a norm and added to the residual stream."""

    def __init__(
        self,
        config: Qwen3MoEConfig,
        *,
        mesh: Mesh,
        axis: str,
        moe_options: Mapping[str, Any],
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        dtypes: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        self.attention_norm = RMSNorm(config.hidden, eps=config.norm_eps, param_dtype=param_dtype)
        self.attention = Attention(
            config.hidden,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            rope_theta=config.rope_theta,
            norm_eps=config.norm_eps,
            **dtypes,
            rngs=rngs,
        )
        self.moe_norm = RMSNorm(config.hidden, eps=config.norm_eps, param_dtype=param_dtype)
        self.moe = MoE(
            config.hidden,
            config.ffn,
            config.num_experts,
            config.top_k,
            mesh=mesh,
            axis=axis,
            router="qwen3",
            **moe_options,
            **dtypes,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array, *, layer: jax.Array, step: jax.Array) -> tuple[jax.Array, MoEMetrics]:
        """Maps x [batch, length, hidden] to the same shape, and tells what the planner did."""
        x = x + self.attention(self.attention_norm(x))
        update, metrics = self.moe(self.moe_norm(x), layer=layer, step=step)
        return x + update, metrics


class Qwen3MoE(nnx.Module):
    """A decoder whose expert blocks plan, replicate and reroute every microbatch.

    Args:
      config: the shapes.
      mesh: device mesh with the expert-parallel axis; batches are sharded over it.
      axis: name of that axis.
      moe_options: passed on to every `topoep_jax.MoE` (planner, num_slots, topology, ...).
      remat: keep only each layer's input for the backward pass.
      dtype: of activations and matrix products.
      param_dtype: of the parameters (the masters).
      rngs: stream `params`.

    Raises:
      ValueError: shapes that do not fit together or the mesh, see `Attention` and `topoep_jax.MoE`.
    """

    def __init__(
        self,
        config: Qwen3MoEConfig,
        *,
        mesh: Mesh,
        axis: str = "ep",
        moe_options: Mapping[str, Any] | None = None,
        remat: bool = False,
        dtype: DTypeLike = jnp.bfloat16,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.mesh, self.axis, self.remat = mesh, axis, remat
        dtypes: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs: nnx.Rngs) -> DecoderLayer:
            return DecoderLayer(config, mesh=mesh, axis=axis, moe_options=moe_options or {}, **dtypes, rngs=rngs)

        self.num_layers = config.num_layers
        self.embedding = Embedding(config.vocab, config.hidden, **dtypes, rngs=rngs)
        self.layers = stack(rngs)
        self.norm = RMSNorm(config.hidden, eps=config.norm_eps, param_dtype=param_dtype)
        self.head = Projection(config.hidden, config.vocab, **dtypes, rngs=rngs)

    def __call__(self, tokens: jax.Array, *, step: jax.Array | int = 0) -> tuple[jax.Array, MoEMetrics]:
        """Next-token logits.

        Args:
          tokens: int32 [batch, length]; the batch is a multiple of the size of the expert-parallel axis.
          step: training step, seen by forced routing alone.

        Returns:
          logits f32 [batch, length, vocab], and the metrics of every layer, each field stacked to [num_layers, ...].
        """
        step = jnp.asarray(step, jnp.int32)
        layers, stacked = nnx.split(self.layers)

        def body(x: jax.Array, xs: tuple[Any, jax.Array]) -> tuple[jax.Array, MoEMetrics]:
            state, index = xs
            x, metrics = nnx.merge(layers, state)(x, layer=index, step=step)
            return self._shard(x), metrics

        x = self._shard(self.embedding(tokens))
        body = jax.checkpoint(body) if self.remat else body
        x, metrics = jax.lax.scan(body, x, (stacked, jnp.arange(self.num_layers, dtype=jnp.int32)))
        return self.head(self.norm(x)).astype(jnp.float32), metrics

    def _shard(self, x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(self.axis)))


def state_shardings(state: Any, mesh: Mesh, *, axis: str = "ep") -> Any:
    """Where every parameter lives: expert weights split by expert over `axis`, all else on every device.

    Args:
      state: parameters, or shapes of them, as nested dicts or an nnx state with the names of `Qwen3MoE`.
      mesh: the training mesh.
      axis: the expert-parallel axis.

    Returns:
      The same tree with a NamedSharding for each array. Arrays keep their logical global shape: nothing depends on
      the number of ranks, so a checkpoint restores on any.
    """

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        names = [getattr(entry, "key", getattr(entry, "name", None)) for entry in path]
        is_experts = any(pair == ("moe", "w") for pair in itertools.pairwise(names))
        return NamedSharding(mesh, PartitionSpec(None, axis) if is_experts else PartitionSpec())

    return jax.tree_util.tree_map_with_path(place, state)
