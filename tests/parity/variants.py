"""The tiny checkpoints of the parity tests: one for each way through the models, made without storing a weight.

A variant is a configuration as its authors publish it. Every tensor follows from the variant's seed and the tensor's
name by integer arithmetic, so it is the same to the bit wherever it is made. Needs NumPy alone: the script that runs
`transformers` and the tests that run JAX both import this file, in environments that share nothing else.
"""

import dataclasses
import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).resolve().parent / "golden"
BATCH, LENGTH = 8, 10


@dataclasses.dataclass(frozen=True)
class Variant:
    """One tiny checkpoint and its batch.

    Attributes:
      name: of its golden file.
      config: the `config.json`.
      packed: whether rows of the batch hold several sequences, and some end in padding.
      seed: of weights and tokens; chosen so that no token is near a tie between experts (make_golden.py checks).
      stride: from one position to the next. Attention sees distances alone, so where it is 1 a model may count from
        anywhere; other ones it has to be given.
    """

    name: str
    config: Mapping[str, Any]
    packed: bool
    seed: int
    stride: int = 1

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer."""
        return self.config.get("num_experts") or self.config["n_routed_experts"]

    @property
    def dense_layers(self) -> int:
        """Layers before the first one with experts."""
        return self.config.get("first_k_dense_replace", 0)

    @property
    def moe_layers(self) -> range:
        """Indices of the layers with experts."""
        return range(self.dense_layers, self.config["num_hidden_layers"])

    @property
    def golden(self) -> Path:
        """What `transformers` computes."""
        return GOLDEN / f"{self.name}.npz"


# An eps as large as 1e-3 shows which norms use it.
_COMMON = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}

_QWEN3 = _COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attention_bias": False,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 2,
}

_GLM4 = _COMMON | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "use_qk_norm": False,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "rope_theta": 1000000,
    "num_nextn_predict_layers": 1,
}

# What differs in transformers 5 from the code that DeepSeek released with its weights, and how the variants meet it:
# - `norm_topk_prob` is ignored, and the weights are scaled even where it is set; the release sets it to false.
# - With YaRN, cos and sin carry mscale / mscale_all_dim, and the softmax scale mscale_all_dim squared: as released.
# - The norms of both latents have eps 1e-6 whatever `rms_norm_eps` says, in both codes: the release sets 1e-6.
# - The released code permutes interleaved pairs into halves before it turns them, transformers turns them in place as
#   complex numbers: the same scores, since queries and keys are permuted alike.
# - Scores of other groups become 0, not -inf, before the best experts are taken: the same unless a softmax underflows.
_DEEPSEEK = _COMMON | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "attention_bias": False,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": False,
    "routed_scaling_factor": 4.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "aux_loss_alpha": 0.003,
    "rope_theta": 10000,
}

# With these the ramp goes over pairs 2 to 6 of the 8: some turn as before, some 40 times slower, some in between.
_YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
}

VARIANTS = (
    Variant("qwen3", _QWEN3, packed=True, seed=19, stride=3),
    Variant(
        "qwen3_tied",
        _QWEN3 | {"tie_word_embeddings": True, "norm_topk_prob": False, "rope_theta": 10000.0},
        packed=False,
        seed=31,
    ),
    Variant("glm4_air", _GLM4, packed=True, seed=34),
    Variant(
        "glm4_qk_norm",
        _GLM4
        | {
            "attention_bias": False,
            "use_qk_norm": True,
            "partial_rotary_factor": 0.25,
            "first_k_dense_replace": 2,
            "num_hidden_layers": 4,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.5,
            "tie_word_embeddings": True,
        },
        packed=False,
        seed=28,
    ),
    Variant(
        "deepseek_v2", _DEEPSEEK | {"rope_scaling": _YARN, "max_position_embeddings": 163840}, packed=True, seed=20
    ),
    Variant(
        "deepseek_v2_lite",
        _DEEPSEEK
        | {
            "q_lora_rank": None,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "tie_word_embeddings": True,
        },
        packed=False,
        seed=17,
    ),
)


def shapes_of(variant: Variant) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the checkpoint, as the released ones are laid out: outputs first."""
    c = variant.config
    shapes = {
        "model.embed_tokens.weight": (c["vocab_size"], c["hidden_size"]),
        "model.norm.weight": (c["hidden_size"],),
    }
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], c["hidden_size"])
    for layer in range(c["num_hidden_layers"]):
        is_moe = layer in variant.moe_layers
        for name, shape in _layer_shapes(variant, is_moe=is_moe):
            shapes[f"model.layers.{layer}.{name}"] = shape
    return shapes


def _layer_shapes(variant: Variant, *, is_moe: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    c, hidden = variant.config, variant.config["hidden_size"]
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    yield from (_mla_shapes(c) if c["model_type"] == "deepseek_v2" else _gqa_shapes(c))
    if not is_moe:
        yield from _mlp_shapes("mlp", hidden, c["intermediate_size"])
        return
    yield "mlp.gate.weight", (variant.num_experts, hidden)
    if c["model_type"] == "glm4_moe":
        yield "mlp.gate.e_score_correction_bias", (variant.num_experts,)
    for expert in range(variant.num_experts):
        yield from _mlp_shapes(f"mlp.experts.{expert}", hidden, c["moe_intermediate_size"])
    if "n_shared_experts" in c:
        yield from _mlp_shapes("mlp.shared_experts", hidden, c["n_shared_experts"] * c["moe_intermediate_size"])


def _mlp_shapes(prefix: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (inner, hidden)
    yield f"{prefix}.up_proj.weight", (inner, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, inner)


def _gqa_shapes(c: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, head = c["hidden_size"], c["head_dim"]
    rows = {
        "q_proj": c["num_attention_heads"] * head,
        "k_proj": c["num_key_value_heads"] * head,
        "v_proj": c["num_key_value_heads"] * head,
    }
    for name, outputs in rows.items():
        yield f"self_attn.{name}.weight", (outputs, hidden)
        if c["attention_bias"]:
            yield f"self_attn.{name}.bias", (outputs,)
    yield "self_attn.o_proj.weight", (hidden, c["num_attention_heads"] * head)
    if c.get("use_qk_norm", True):
        yield "self_attn.q_norm.weight", (head,)
        yield "self_attn.k_norm.weight", (head,)


def _mla_shapes(c: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    if c["q_lora_rank"] is None:
        yield "self_attn.q_proj.weight", (heads * (nope + rope), hidden)
    else:
        yield "self_attn.q_a_proj.weight", (c["q_lora_rank"], hidden)
        yield "self_attn.q_a_layernorm.weight", (c["q_lora_rank"],)
        yield "self_attn.q_b_proj.weight", (heads * (nope + rope), c["q_lora_rank"])
    yield "self_attn.kv_a_proj_with_mqa.weight", (c["kv_lora_rank"] + rope, hidden)
    yield "self_attn.kv_a_layernorm.weight", (c["kv_lora_rank"],)
    yield "self_attn.kv_b_proj.weight", (heads * (nope + value), c["kv_lora_rank"])
    yield "self_attn.o_proj.weight", (hidden, heads * value)


def tensors_of(variant: Variant) -> dict[str, np.ndarray]:
    """The checkpoint: f32 tensors by name."""
    tensors = {}
    for name, shape in shapes_of(variant).items():
        noise = _noise(variant.seed, name, shape)
        if name.endswith("norm.weight"):
            tensors[name] = np.float32(1) + noise
        elif len(shape) == 1:
            tensors[name] = noise
        else:
            # 12 ** 0.5: the noise is uniform over an interval of length 1.
            tensors[name] = noise * np.float32(12**0.5 * _gain_of(variant, name) / shape[1] ** 0.5)
    return tensors


def _gain_of(variant: Variant, name: str) -> float:
    """Keeps the residual stream and the logits of order 1, and makes the choices of the routers clear."""
    if name == "model.embed_tokens.weight":
        return 2.0 if variant.config["tie_word_embeddings"] else 5.0
    return 1.5 if name.endswith("mlp.gate.weight") else 1.0


def batch_of(variant: Variant) -> dict[str, np.ndarray]:
    """int32 [BATCH, LENGTH] each: tokens; segments, 0 being padding; positions, which restart with every segment."""
    tokens = (_integers(variant.seed, "tokens", BATCH * LENGTH) % variant.config["vocab_size"]).astype(np.int32)
    segments = np.ones((BATCH, LENGTH), np.int32)
    if variant.packed:
        segments[1, 4:] = 2
        segments[2, 3:], segments[2, 8:] = 2, 3
        segments[3, 7:] = 0
        segments[4, 2:], segments[4, 9:] = 2, 0
    starts = np.diff(segments, axis=1, prepend=-1) != 0
    index = np.broadcast_to(np.arange(LENGTH), segments.shape)
    positions = variant.stride * (index - np.maximum.accumulate(np.where(starts, index, 0), axis=1))
    return {
        "tokens": tokens.reshape(BATCH, LENGTH),
        "segments": segments,
        "positions": positions.astype(np.int32),
    }


def next_tokens_of(batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """int32 [BATCH, LENGTH - 1]: what each position but the last is to predict, -100 where nothing follows."""
    segments = batch["segments"]
    follows = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return np.where(follows, batch["tokens"][:, 1:], -100)


def gradients_of(variant: Variant) -> list[str]:
    """Names of the tensors whose gradients the golden file holds: every vector, and a matrix of each kind."""
    first, last = variant.moe_layers[0], variant.moe_layers[-1]
    experts = f"model.layers.{last}.mlp.experts.{variant.seed % variant.num_experts}."
    kept = ("model.embed_tokens.", f"model.layers.{first}.mlp.gate.w", f"model.layers.{last}.mlp.gate.w", experts)
    kept += tuple(f"model.layers.{first}.self_attn.{name}" for name in ("q_proj", "k_proj", "q_b_proj", "kv_a_proj"))
    return [
        name
        for name, shape in shapes_of(variant).items()
        if (len(shape) == 1 and "correction_bias" not in name) or name.startswith(kept)
    ]


def write_folder(folder: Path, variant: Variant, num_files: int = 2) -> None:
    """Writes the checkpoint as its authors would: config.json, safetensors in several files, and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(variant.config), indent=2))
    tensors = tensors_of(variant)
    names = list(tensors)
    weight_map = {}
    for file in range(num_files):
        name = f"model-{file + 1:05d}-of-{num_files:05d}.safetensors"
        part = names[file::num_files]
        write_safetensors(folder / name, {tensor: tensors[tensor] for tensor in part})
        weight_map |= dict.fromkeys(part, name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes f32 tensors: the length of a JSON header, the header, the bytes."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": (end, end + tensor.nbytes)}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensor.tobytes() for tensor in tensors.values()))


def read_folder(folder: Path) -> dict[str, np.ndarray]:
    """The f32 tensors of all safetensors files of a folder, by name."""
    return dict(item for path in sorted(folder.glob("*.safetensors")) for item in _read_safetensors(path))


def _read_safetensors(path: Path) -> Iterable[tuple[str, np.ndarray]]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            assert entry["dtype"] == "F32", f"{name} of {path.name} is {entry['dtype']}"
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            yield name, np.frombuffer(data[begin:end], "<f4").reshape(entry["shape"])


def _noise(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """f32, uniform in [-0.5, 0.5), in steps of 2 ** -24."""
    bits = _integers(seed, name, int(np.prod(shape))) >> np.uint64(40)
    return (bits.astype(np.float32) * np.float32(2**-24) - np.float32(0.5)).reshape(shape)


def _integers(seed: int, name: str, count: int) -> np.ndarray:
    """uint64 [count]: a counter, mixed by the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    start = np.uint64(zlib.crc32(name.encode()) << 24 | seed << 56)
    with np.errstate(over="ignore"):
        x = (start + np.arange(1, count + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
