"""GLM-4.5: grouped-query attention, a dense first layer, sigmoid routing, a shared expert.

Half of each head is rotated, and a correction bias of the router balances experts without a loss.

Released values: the `config.json` of GLM-4.5-Air (MIT); "GLM-4.5", arXiv 2508.06471. The class defaults of Hugging
Face's `Glm4MoeConfig` are not the released values. The layer that predicts a second token (MTP) is left out.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax

from models.attention import GroupedQueryAttention
from models.config import DecoderConfig, HFConfig, grouped_query_faults
from models.decoder import Decoder
from models.rotary import Rotation, rotation
from models.weights import ROTARY, Weight, decoder, grouped_query, same


@dataclasses.dataclass(frozen=True, kw_only=True)
class GLM4MoEConfig(DecoderConfig):
    """Shapes of one model.

    Attributes:
      num_kv_heads: heads of keys and values.
      head_dim: width of a head.
      rotary_dim: how many of its coordinates, the first ones, are rotated.
      qk_norm: norm query and key heads; the 355B model does.
      qkv_bias: add a bias to queries, keys and values.
      renormalize: whether the weights of a token's experts sum to `scale`.
      scale: factor on the routed experts.
    """

    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    qk_norm: bool = False
    qkv_bias: bool = True
    renormalize: bool = True
    scale: float = 1.0
    rope_theta: float = 1e6
    norm_eps: float = 1e-5

    @classmethod
    def glm_4_5_air(cls) -> "GLM4MoEConfig":
        """The released 106B model, 12B active."""
        return cls(
            vocab=151552,
            hidden=4096,
            num_layers=46,
            num_heads=96,
            num_kv_heads=8,
            head_dim=128,
            rotary_dim=64,
            ffn=1408,
            num_experts=128,
            top_k=8,
            shared_ffn=1408,
            dense_layers=1,
            dense_ffn=10944,
            max_positions=131072,
        )

    @classmethod
    def paper(cls) -> "GLM4MoEConfig":
        """The released model at the depth that the TopoEP paper runs."""
        return dataclasses.replace(cls.glm_4_5_air(), num_layers=5)

    @classmethod
    def tiny(cls) -> "GLM4MoEConfig":
        """A byte-level model for a laptop, with every part of the released one."""
        return cls(
            vocab=257,
            hidden=128,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            rotary_dim=16,
            ffn=64,
            num_experts=32,
            top_k=4,
            shared_ffn=64,
            dense_layers=1,
            dense_ffn=256,
            rope_theta=1e4,
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "GLM4MoEConfig":
        """Reads a Hugging Face config of model type "glm4_moe".

        Raises:
          ValueError: all that is missing or not supported.
        """
        hf = HFConfig(config, "glm4_moe")
        hf.no_scaling()
        hf.only("n_group", 1)
        hf.only("topk_group", 1)
        hidden, num_heads = hf.integer("hidden_size"), hf.integer("num_attention_heads")
        head_dim = hf.integer("head_dim", default=hidden // max(num_heads, 1))
        ffn = hf.integer("moe_intermediate_size")
        values: dict[str, Any] = {
            "vocab": hf.integer("vocab_size"),
            "hidden": hidden,
            "num_layers": hf.integer("num_hidden_layers"),
            "num_heads": num_heads,
            "num_kv_heads": hf.integer("num_key_value_heads"),
            "head_dim": head_dim,
            "rotary_dim": int(head_dim * hf.number("partial_rotary_factor", default=0.5)),
            "qk_norm": hf.flag("use_qk_norm"),
            "qkv_bias": hf.flag("attention_bias"),
            "ffn": ffn,
            "num_experts": hf.integer("n_routed_experts", "num_local_experts"),
            "top_k": hf.integer("num_experts_per_tok"),
            "shared_ffn": ffn * hf.integer("n_shared_experts"),
            "renormalize": hf.flag("norm_topk_prob"),
            "scale": hf.number("routed_scaling_factor"),
            "dense_layers": hf.integer("first_k_dense_replace"),
            "dense_ffn": hf.integer("intermediate_size"),
            "rope_theta": hf.number("rope_theta"),
            "norm_eps": hf.number("rms_norm_eps"),
            "tied_embeddings": hf.flag("tie_word_embeddings", default=False),
            "max_positions": hf.integer("max_position_embeddings"),
        }
        hf.done()
        return cls(**values)

    def to_hf(self) -> dict[str, Any]:
        """The Hugging Face config, but for the dtype of a checkpoint."""
        return {
            "model_type": "glm4_moe",
            "architectures": ["Glm4MoeForCausalLM"],
            "hidden_act": "silu",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "partial_rotary_factor": self._rotary_factor(),
            "use_qk_norm": self.qk_norm,
            "attention_bias": self.qkv_bias,
            "moe_intermediate_size": self.ffn,
            "n_routed_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "n_shared_experts": self.shared_ffn // self.ffn,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": self.renormalize,
            "routed_scaling_factor": self.scale,
            "first_k_dense_replace": self.dense_layers,
            "intermediate_size": self.dense_ffn or self.ffn,
            "num_nextn_predict_layers": 0,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tied_embeddings,
            "max_position_embeddings": self.max_positions,
        }

    def _rotary_factor(self) -> float:
        """The share that, times the head and cut off as `transformers` does, is `rotary_dim`."""
        share = self.rotary_dim / self.head_dim
        return share if int(self.head_dim * share) == self.rotary_dim else math.nextafter(share, 1)

    def faults(self) -> list[str]:
        """What is wrong with the values."""
        attention = grouped_query_faults(self.num_heads, self.num_kv_heads, self.head_dim, self.rotary_dim)
        return [*super().faults(), *attention, *self.shared_expert_faults()]


class GLM4MoE(Decoder[GLM4MoEConfig]):
    """GLM-4.5; see `Decoder`."""

    def attention(self, config: GLM4MoEConfig, **common: Any) -> GroupedQueryAttention:
        """Attention of a layer."""
        return GroupedQueryAttention(
            config.hidden,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            qk_norm=config.qk_norm,
            qkv_bias=config.qkv_bias,
            norm_eps=config.norm_eps,
            **common,
        )

    def router(self, config: GLM4MoEConfig) -> dict[str, Any]:
        """Sigmoid; selection by score and correction bias, weights by the score alone."""
        return {"router": "glm4", "router_options": {"renormalize": config.renormalize, "scale": config.scale}}

    def rotation(self, config: GLM4MoEConfig, positions: jax.Array) -> Rotation:
        """The first coordinates of each head are rotated."""
        return rotation(positions, config.rotary_dim, config.rope_theta)


def weights(config: GLM4MoEConfig) -> list[Weight]:
    """The tensors of a released checkpoint."""
    bias = Weight(
        "layers/moe/correction_bias", ("model.layers.{layer}.mlp.gate.e_score_correction_bias",), same, wide=True
    )
    return [*decoder(config, grouped_query(config)), bias]


def ignored(config: GLM4MoEConfig) -> tuple[str, ...]:
    """What checkpoints hold that the model does not: the layer behind the last, which predicts a second token."""
    return (ROTARY, rf"model\.layers\.{config.num_layers}\..*")
