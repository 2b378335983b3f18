"""DeepSeek-V2: latent attention with YaRN, a dense first layer, experts chosen within groups, shared experts.

Released values: the `config.json` of DeepSeek-V2 (236B); "DeepSeek-V2", arXiv 2405.04434.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from models.attention import LatentAttention
from models.config import DecoderConfig, HFConfig
from models.decoder import Decoder
from models.rotary import Rotation, Yarn, rotation
from models.weights import ROTARY, Weight, decoder, norm, projection


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSeekV2Config(DecoderConfig):
    """Shapes of one model.

    Attributes:
      q_lora: width of the latent of queries; 0: none, as in DeepSeek-V2-Lite.
      kv_lora: width of the latent of keys and values.
      nope_dim: coordinates of a query or key head without positions.
      rope_dim: coordinates with rotary positions.
      v_dim: width of a value head.
      yarn: the stretch of the context, or None.
      num_groups: groups of neighbouring experts.
      topk_group: groups that a token may use.
      scale: factor on the routed experts, whose weights do not sum to 1.
    """

    q_lora: int
    kv_lora: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    yarn: Yarn | None = None
    num_groups: int = 1
    topk_group: int = 1
    scale: float = 1.0

    @classmethod
    def deepseek_v2(cls) -> "DeepSeekV2Config":
        """The released 236B model, 21B active."""
        return cls(
            vocab=102400,
            hidden=5120,
            num_layers=60,
            num_heads=128,
            q_lora=1536,
            kv_lora=512,
            nope_dim=128,
            rope_dim=64,
            v_dim=128,
            yarn=Yarn(factor=40.0, original_length=4096, mscale=0.707, mscale_all_dim=0.707),
            ffn=1536,
            num_experts=160,
            top_k=6,
            num_groups=8,
            topk_group=3,
            scale=16.0,
            shared_ffn=2 * 1536,
            dense_layers=1,
            dense_ffn=12288,
            max_positions=163840,
        )

    @classmethod
    def paper(cls) -> "DeepSeekV2Config":
        """The released model at the depth that the TopoEP paper runs."""
        return dataclasses.replace(cls.deepseek_v2(), num_layers=4)

    @classmethod
    def tiny(cls) -> "DeepSeekV2Config":
        """A byte-level model for a laptop, with every part of the released one."""
        return cls(
            vocab=257,
            hidden=128,
            num_layers=4,
            num_heads=4,
            q_lora=64,
            kv_lora=32,
            nope_dim=32,
            rope_dim=16,
            v_dim=32,
            yarn=Yarn(factor=8.0, original_length=512, mscale=0.707, mscale_all_dim=0.707),
            ffn=64,
            num_experts=32,
            top_k=4,
            num_groups=4,
            topk_group=2,
            scale=4.0,
            shared_ffn=2 * 64,
            dense_layers=1,
            dense_ffn=256,
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "DeepSeekV2Config":
        """Reads a Hugging Face config of model type "deepseek_v2".

        Raises:
          ValueError: all that is missing or not supported.
        """
        hf = HFConfig(config, "deepseek_v2")
        hf.only("attention_bias", False)
        hf.only("partial_rotary_factor", 1)
        hf.only("moe_layer_freq", 1)
        hf.only("scoring_func", "softmax")
        # The model's own code and transformers disagree on what it would mean, and no released model has it.
        hf.only("norm_topk_prob", False)
        hf.only("topk_method", "greedy", "group_limited_greedy")
        num_heads, ffn = hf.integer("num_attention_heads"), hf.integer("moe_intermediate_size")
        hf.only("num_key_value_heads", num_heads)
        grouped = config.get("topk_method") == "group_limited_greedy"
        values: dict[str, Any] = {
            "vocab": hf.integer("vocab_size"),
            "hidden": hf.integer("hidden_size"),
            "num_layers": hf.integer("num_hidden_layers"),
            "num_heads": num_heads,
            "q_lora": hf.integer("q_lora_rank", default=0),
            "kv_lora": hf.integer("kv_lora_rank"),
            "nope_dim": hf.integer("qk_nope_head_dim"),
            "rope_dim": hf.integer("qk_rope_head_dim"),
            "v_dim": hf.integer("v_head_dim"),
            "yarn": hf.yarn(),
            "ffn": ffn,
            "num_experts": hf.integer("n_routed_experts", "num_local_experts"),
            "top_k": hf.integer("num_experts_per_tok"),
            "num_groups": hf.integer("n_group") if grouped else 1,
            "topk_group": hf.integer("topk_group") if grouped else 1,
            "scale": hf.number("routed_scaling_factor"),
            "shared_ffn": ffn * hf.integer("n_shared_experts"),
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
        grouped = self.num_groups > 1
        return {
            "model_type": "deepseek_v2",
            "architectures": ["DeepseekV2ForCausalLM"],
            "hidden_act": "silu",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_heads,
            "q_lora_rank": self.q_lora or None,
            "kv_lora_rank": self.kv_lora,
            "qk_nope_head_dim": self.nope_dim,
            "qk_rope_head_dim": self.rope_dim,
            "v_head_dim": self.v_dim,
            "rope_scaling": None if self.yarn is None else self.yarn.to_hf(),
            "moe_intermediate_size": self.ffn,
            "n_routed_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "topk_method": "group_limited_greedy" if grouped else "greedy",
            "n_group": self.num_groups,
            "topk_group": self.topk_group,
            "norm_topk_prob": False,
            "routed_scaling_factor": self.scale,
            "scoring_func": "softmax",
            "n_shared_experts": self.shared_ffn // self.ffn,
            "first_k_dense_replace": self.dense_layers,
            "moe_layer_freq": 1,
            "intermediate_size": self.dense_ffn or self.ffn,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tied_embeddings,
            "max_position_embeddings": self.max_positions,
            "attention_bias": False,
        }

    def faults(self) -> list[str]:
        """What is wrong with the values."""
        faults = [*super().faults(), *self.shared_expert_faults()]
        faults += [
            f"{name}={getattr(self, name)} must be at least 1"
            for name in ("kv_lora", "nope_dim", "rope_dim", "v_dim", "num_groups", "topk_group")
            if getattr(self, name) < 1
        ]
        if self.q_lora < 0:
            faults.append(f"q_lora={self.q_lora} must not be negative; 0 is none")
        if self.rope_dim % 2:
            faults.append(f"rope_dim={self.rope_dim} is odd: rotary positions turn pairs")
        if self.v_dim > self.nope_dim + self.rope_dim:
            faults.append(f"v_dim={self.v_dim} exceeds the {self.nope_dim + self.rope_dim} coordinates of a key")
        if self.num_groups > 0 and self.num_experts % self.num_groups:
            faults.append(f"num_groups={self.num_groups} does not divide num_experts={self.num_experts}")
        if self.topk_group > self.num_groups:
            faults.append(f"topk_group={self.topk_group} exceeds num_groups={self.num_groups}")
        elif self.topk_group * self.num_experts < self.top_k * self.num_groups:
            faults.append(f"topk_group={self.topk_group} groups hold fewer experts than top_k={self.top_k}")
        return faults


class DeepSeekV2(Decoder[DeepSeekV2Config]):
    """DeepSeek-V2; see `Decoder`."""

    def attention(self, config: DeepSeekV2Config, **common: Any) -> LatentAttention:
        """Attention of a layer."""
        return LatentAttention(
            config.hidden,
            config.num_heads,
            q_lora=config.q_lora,
            kv_lora=config.kv_lora,
            nope_dim=config.nope_dim,
            rope_dim=config.rope_dim,
            v_dim=config.v_dim,
            score_magnitude=1.0 if config.yarn is None else config.yarn.score_magnitude,
            **common,
        )

    def router(self, config: DeepSeekV2Config) -> dict[str, Any]:
        """Softmax; groups by their best expert, then the best experts within."""
        options = {"num_groups": config.num_groups, "topk_group": config.topk_group, "scale": config.scale}
        return {"router": "deepseek_v2", "router_options": options}

    def rotation(self, config: DeepSeekV2Config, positions: jax.Array) -> Rotation:
        """A part of its own of queries and keys is rotated."""
        return rotation(positions, config.rope_dim, config.rope_theta, config.yarn)


def weights(config: DeepSeekV2Config) -> list[Weight]:
    """The tensors of a released checkpoint."""

    def latent_attention(path: str, name: str) -> list[Weight]:
        table = projection(f"{path}/kv_down", f"{name}.kv_a_proj_with_mqa") + norm(
            f"{path}/kv_norm", f"{name}.kv_a_layernorm"
        )
        table += projection(f"{path}/kv_up", f"{name}.kv_b_proj") + projection(f"{path}/out", f"{name}.o_proj")
        if not config.q_lora:
            return table + projection(f"{path}/query", f"{name}.q_proj")
        table += projection(f"{path}/query_down", f"{name}.q_a_proj")
        table += norm(f"{path}/query_norm", f"{name}.q_a_layernorm")
        return table + projection(f"{path}/query_up", f"{name}.q_b_proj")

    return decoder(config, latent_attention)


def ignored(config: DeepSeekV2Config) -> tuple[str, ...]:
    """What checkpoints hold that the model does not."""
    return (ROTARY,)
