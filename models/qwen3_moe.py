"""Qwen3-MoE: grouped-query attention with normed heads, experts in every layer, softmax routing.

Released values: the `config.json` of Qwen3-30B-A3B (Apache-2.0); "Qwen3 Technical Report", arXiv 2505.09388.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from models.attention import GroupedQueryAttention
from models.config import DecoderConfig, HFConfig, grouped_query_faults
from models.decoder import Decoder
from models.rotary import Rotation, rotation
from models.weights import ROTARY, Weight, decoder, grouped_query


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoEConfig(DecoderConfig):
    """Shapes of one model.

    Attributes:
      num_kv_heads: heads of keys and values.
      head_dim: width of a head, all of it rotated.
      renormalize: whether the weights of a token's experts sum to 1.
    """

    num_kv_heads: int
    head_dim: int
    renormalize: bool = True
    rope_theta: float = 1e6
    qk_norm: ClassVar[bool] = True
    qkv_bias: ClassVar[bool] = False

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
            max_positions=40960,
        )

    @classmethod
    def paper(cls) -> "Qwen3MoEConfig":
        """The released model at the depth that the TopoEP paper runs."""
        return dataclasses.replace(cls.qwen3_30b_a3b(), num_layers=5)

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

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Qwen3MoEConfig":
        """Reads a Hugging Face config of model type "qwen3_moe".

        Raises:
          ValueError: all that is missing or not supported.
        """
        hf = HFConfig(config, "qwen3_moe")
        hf.no_scaling()
        hf.only("decoder_sparse_step", 1)
        hf.only("mlp_only_layers", [])
        hf.only("attention_bias", False)
        hf.only("use_sliding_window", False)
        hf.only("partial_rotary_factor", 1)
        hidden, num_heads = hf.integer("hidden_size"), hf.integer("num_attention_heads")
        values: dict[str, Any] = {
            "vocab": hf.integer("vocab_size"),
            "hidden": hidden,
            "num_layers": hf.integer("num_hidden_layers"),
            "num_heads": num_heads,
            "num_kv_heads": hf.integer("num_key_value_heads"),
            "head_dim": hf.integer("head_dim", default=hidden // max(num_heads, 1)),
            "ffn": hf.integer("moe_intermediate_size"),
            "num_experts": hf.integer("num_experts", "num_local_experts"),
            "top_k": hf.integer("num_experts_per_tok"),
            "renormalize": hf.flag("norm_topk_prob"),
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
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "hidden_act": "silu",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "moe_intermediate_size": self.ffn,
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "norm_topk_prob": self.renormalize,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tied_embeddings,
            "max_position_embeddings": self.max_positions,
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }

    def faults(self) -> list[str]:
        """What is wrong with the values."""
        faults = [
            *super().faults(),
            *grouped_query_faults(self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim),
        ]
        for name in ("dense_layers", "shared_ffn"):
            if getattr(self, name):
                faults.append(f"{name}={getattr(self, name)} must be 0: Qwen3-MoE has none")
        return faults


class Qwen3MoE(Decoder[Qwen3MoEConfig]):
    """Qwen3-MoE; see `Decoder`."""

    def attention(self, config: Qwen3MoEConfig, **common: Any) -> GroupedQueryAttention:
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

    def router(self, config: Qwen3MoEConfig) -> dict[str, Any]:
        """Softmax, top-k, renormalised."""
        return {"router": "qwen3", "router_options": {"renormalize": config.renormalize}}

    def rotation(self, config: Qwen3MoEConfig, positions: jax.Array) -> Rotation:
        """Every coordinate is rotated."""
        return rotation(positions, config.head_dim, config.rope_theta)


def weights(config: Qwen3MoEConfig) -> list[Weight]:
    """The tensors of a released checkpoint."""
    return decoder(config, grouped_query(config))


def ignored(config: Qwen3MoEConfig) -> tuple[str, ...]:
    """What checkpoints hold that the model does not."""
    return (ROTARY,)
