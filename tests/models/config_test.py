"""Configs: published sizes by shape evaluation, Hugging Face's spellings, and every fault in one error."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from models import MODEL_TYPES, DeepSeekV2Config, GLM4MoEConfig, Qwen3MoEConfig, checkpoint
from models.rotary import Yarn

RELEASED = {
    "qwen3_moe": Qwen3MoEConfig.qwen3_30b_a3b(),
    "glm4_moe": GLM4MoEConfig.glm_4_5_air(),
    "deepseek_v2": DeepSeekV2Config.deepseek_v2(),
}


def paths(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    }


@pytest.mark.parametrize(
    ("kind", "total", "active", "published"),
    [
        ("qwen3_moe", 30_532_122_624, 3_353_032_704, (30.5, 3.3)),
        ("glm4_moe", 106_852_245_504, 13_424_123_904, (106, 12)),
        ("deepseek_v2", 235_741_434_880, 21_375_800_320, (236, 21)),
    ],
)
def test_published_sizes(kind, total, active, published):
    config, model = RELEASED[kind], MODEL_TYPES[kind][1]
    assert model.num_parameters(config) == (total, active)
    # Of the embedding table a token reads one row; only without it GLM's active parameters are near the published ones.
    active -= config.vocab * config.hidden if kind == "glm4_moe" else 0
    unit = 0.1 if kind == "qwen3_moe" else 1
    for count, figure in zip((total, active), published, strict=True):
        assert abs(count / 1e9 - figure) < unit


@pytest.mark.parametrize(("kind", "layers"), [("qwen3_moe", 5), ("glm4_moe", 5), ("deepseek_v2", 4)])
def test_named_configs(kind, layers):
    config_type = MODEL_TYPES[kind][0]
    assert config_type.paper() == dataclasses.replace(RELEASED[kind], num_layers=layers)
    tiny = config_type.tiny()
    assert tiny.vocab == 257
    assert MODEL_TYPES[kind][1].num_parameters(tiny)[0] < 4e6
    assert bool(tiny.dense_layers) == bool(RELEASED[kind].dense_layers)


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_hugging_face_and_back(kind):
    config_type = MODEL_TYPES[kind][0]
    for config in (RELEASED[kind], config_type.paper(), config_type.tiny()):
        written = json.loads(json.dumps(config.to_hf()))
        assert config_type.from_hf(written) == config
        # As transformers 5 writes it.
        rope = {"rope_type": "default", **(written.pop("rope_scaling", None) or {})}
        rope |= {"rope_type": rope.get("type", "default"), "rope_theta": written.pop("rope_theta")}
        if "partial_rotary_factor" in written:
            rope["partial_rotary_factor"] = written.pop("partial_rotary_factor")
        if kind == "qwen3_moe":
            written["num_local_experts"] = written.pop("num_experts")
        assert config_type.from_hf({**written, "rope_parameters": rope}) == config


@pytest.mark.parametrize(
    ("weights", "read"),
    [((1, 0.707), (1.0, 0.707)), ((None, None), (1.0, 0.0)), ((1.0, 0), (1.0, 0.0)), ((None, 1.0), None)],
)
def test_magnitudes_of_yarn_where_all_agree_on_them(weights, read):
    rope = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
    rope |= dict(zip(("mscale", "mscale_all_dim"), weights, strict=True))
    hf = DeepSeekV2Config.tiny().to_hf() | {"rope_scaling": rope}
    if read is None:
        with pytest.raises(ValueError, match=r"mscale_all_dim=1\.0 of YaRN without mscale"):
            DeepSeekV2Config.from_hf(hf)
    else:
        assert DeepSeekV2Config.from_hf(hf).yarn == Yarn(4.0, 64, mscale=read[0], mscale_all_dim=read[1])


@pytest.mark.parametrize(
    ("kind", "said", "message"),
    [
        (
            "qwen3_moe",
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            },
            "rope_type is said to be 'yarn' and 'default'",
        ),
        (
            "qwen3_moe",
            {"rope_scaling": {"rope_type": "default", "rope_theta": 123}},
            "rope_theta is said to be 10000.0 and",
        ),
        (
            "qwen3_moe",
            {"rope_scaling": {"rope_type": "default", "type": "yarn"}},
            "rope_type is said to be 'default' and",
        ),
        ("qwen3_moe", {"rope_scaling": "yarn"}, "rope_scaling='yarn' must be an object"),
        ("qwen3_moe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported, only 1"),
        ("glm4_moe", {"rope_scaling": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor is said to be 0.5 and"),
        ("glm4_moe", {"partial_rotary_factor": None}, "partial_rotary_factor=None must be a number"),
        ("glm4_moe", {"routed_scaling_factor": float("nan")}, "scale=nan must be finite"),
        ("deepseek_v2", {"rope_theta": float("inf")}, "rope_theta=inf must be finite"),
    ],
)
def test_what_is_said_twice_is_said_alike_and_is_a_number(kind, said, message):
    config_type = MODEL_TYPES[kind][0]
    with pytest.raises(ValueError, match=re.escape(message)):
        config_type.from_hf(config_type.tiny().to_hf() | said)


def test_odd_sizes_go_to_hugging_face_and_back():
    glm = GLM4MoEConfig.tiny()
    rotated = [dataclasses.replace(glm, head_dim=h, rotary_dim=r) for h in (44, 64, 250) for r in range(2, h + 1, 2)]
    for config in (dataclasses.replace(glm, dense_layers=0), *rotated):
        assert GLM4MoEConfig.from_hf(config.to_hf()) == config
    deepseek = dataclasses.replace(DeepSeekV2Config.tiny(), dense_layers=0, yarn=Yarn(8.0, 512))
    assert DeepSeekV2Config.from_hf(deepseek.to_hf()) == deepseek


def test_what_the_released_configs_say_beside_what_we_read():
    lite = DeepSeekV2Config.tiny().to_hf() | {"q_lora_rank": None, "rope_scaling": None, "topk_method": "greedy"}
    lite |= {"n_group": 4, "torch_dtype": "bfloat16", "seq_aux": True, "auto_map": {}, "quantization_config": None}
    config = DeepSeekV2Config.from_hf(lite)
    assert (config.q_lora, config.yarn, config.num_groups, config.topk_group) == (0, None, 1, 1)
    qwen = Qwen3MoEConfig.tiny().to_hf() | {
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 48,
    }
    del qwen["head_dim"]
    assert Qwen3MoEConfig.from_hf(qwen).head_dim == qwen["hidden_size"] // qwen["num_attention_heads"]


@pytest.mark.parametrize(
    ("kind", "wrong", "messages"),
    [
        (
            "qwen3_moe",
            {
                "model_type": "qwen3",
                "mlp_only_layers": [1],
                "attention_bias": True,
                "use_sliding_window": True,
                "decoder_sparse_step": 2,
                "hidden_size": "big",
                "rope_scaling": {"type": "linear", "factor": 2},
                "vocab_size": None,
                "norm_topk_prob": 1,
            },
            [
                "model_type='qwen3' is not supported, only 'qwen3_moe'",
                "mlp_only_layers=[1]",
                "attention_bias=True",
                "use_sliding_window=True",
                "decoder_sparse_step=2",
                "hidden_size='big' must be an integer",
                "rotary positions of type 'linear'",
                "vocab_size is missing",
                "norm_topk_prob=1 must be true or false",
            ],
        ),
        (
            "glm4_moe",
            {"n_group": 2, "hidden_act": "gelu", "n_routed_experts": None, "rms_norm_eps": "x"},
            [
                "n_group=2",
                "hidden_act='gelu'",
                "n_routed_experts or num_local_experts is missing",
                "rms_norm_eps='x' must be a number",
            ],
        ),
        (
            "deepseek_v2",
            {
                "norm_topk_prob": True,
                "scoring_func": "sigmoid",
                "num_key_value_heads": 1,
                "topk_method": "noaux_tc",
                "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64, "mscale": 0.5},
            },
            [
                "norm_topk_prob=True",
                "scoring_func='sigmoid'",
                "num_key_value_heads=1",
                "topk_method='noaux_tc'",
                "mscale=0.5, mscale_all_dim=0.0) needs a finite factor, and positive mscale and mscale_all_dim",
            ],
        ),
        (
            "deepseek_v2",
            {"rope_scaling": {"type": "yarn", "factor": 4, "truncate": False}},
            [
                "truncate=False of YaRN",
                "YaRN needs factor and original_max_position_embeddings",
            ],
        ),
        ("deepseek_v2", {"rope_scaling": {"type": "llama3"}}, ["type 'llama3' are not supported, only 'yarn'"]),
    ],
)
def test_what_is_not_supported_is_said_at_once(kind, wrong, messages):
    config_type = MODEL_TYPES[kind][0]
    with pytest.raises(ValueError, match=f"cannot be loaded as '{kind}'") as error:
        config_type.from_hf(config_type.tiny().to_hf() | wrong)
    for message in messages:
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("kind", "wrong", "messages"),
    [
        (
            "qwen3_moe",
            {"num_heads": 3, "head_dim": 7, "top_k": 33, "vocab": 0, "dense_layers": 1, "shared_ffn": 8},
            [
                "num_heads=3 is not a multiple of num_kv_heads=2",
                "7 of head_dim=7, must be even",
                "top_k=33 exceeds num_experts=32",
                "vocab=0 must be at least 1",
                "dense_layers=1 must be 0",
                "shared_ffn=8 must be 0",
                "dense_ffn=0 must be at least 1",
            ],
        ),
        (
            "glm4_moe",
            {"rotary_dim": 64, "shared_ffn": 65, "dense_layers": 4, "norm_eps": 0.0, "rope_theta": -1.0},
            [
                "64 of head_dim=32",
                "shared_ffn=65 is not a multiple of ffn=64",
                "dense_layers=4 must leave one of num_layers=4",
                "norm_eps=0.0 must be positive",
                "rope_theta=-1.0 must be positive",
            ],
        ),
        (
            "deepseek_v2",
            {
                "rope_dim": 3,
                "v_dim": 36,
                "num_groups": 3,
                "topk_group": 5,
                "q_lora": -1,
                "kv_lora": 0,
                "shared_ffn": -64,
            },
            [
                "rope_dim=3 is odd",
                "v_dim=36 exceeds the 35 coordinates of a key",
                "num_groups=3 does not divide num_experts=32",
                "topk_group=5 exceeds num_groups=3",
                "q_lora=-1 must not be negative",
                "kv_lora=0 must be at least 1",
                "shared_ffn=-64 must not be negative",
            ],
        ),
        ("deepseek_v2", {"num_groups": 16, "topk_group": 1}, ["topk_group=1 groups hold fewer experts than top_k=4"]),
    ],
)
def test_what_does_not_fit_together_is_said_at_once(kind, wrong, messages):
    with pytest.raises(ValueError, match="does not fit together") as error:
        dataclasses.replace(MODEL_TYPES[kind][0].tiny(), **wrong)
    for message in messages:
        assert message in str(error.value)


@pytest.mark.parametrize("wrong", [{"factor": 0.5}, {"original_length": 0}, {"beta_fast": 1.0, "beta_slow": 2.0}])
def test_bad_yarn_is_refused(wrong):
    with pytest.raises(ValueError, match=r"factor >= 1, original_length >= 1 and beta_fast >= beta_slow > 0"):
        Yarn(**({"factor": 4.0, "original_length": 64} | wrong))


@pytest.mark.parametrize("kind", MODEL_TYPES)
@pytest.mark.parametrize("stage", [None, (0, 2), (2, 4)])
def test_parameters_have_the_names_of_the_weight_table(kind, stage):
    """What a checkpoint is read by and what the model holds; routers stay f32 in a model of narrower parameters."""
    config_type, model_type = MODEL_TYPES[kind]
    config = config_type.tiny()
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("ep",))
    options = {"mesh": mesh, "moe_options": {"num_slots": 0}, "param_dtype": jnp.bfloat16}
    model = nnx.eval_shape(lambda: model_type(config, **options, stage=stage, rngs=nnx.Rngs(0)))
    params = nnx.to_pure_dict(nnx.state(model))
    table = checkpoint.abstract(config, dtype=jnp.bfloat16, stage=stage)
    assert paths(params) == paths(table)
    assert jax.tree.all(jax.tree.map(lambda leaf, other: leaf.shape == other.shape, params, table))
    wide = {path for path in paths(params) if params_at(params, path).dtype == jnp.float32}
    assert {path.rpartition("/")[2] for path in wide} <= {"router", "correction_bias"}


def params_at(params, path):
    for name in path.split("/"):
        params = params[name]
    return params
