"""Language models built on `topoep_jax.MoE`, in Flax nnx; they run from a checkout and are not part of the wheel."""

from models.deepseek_v2 import DeepSeekV2 as DeepSeekV2
from models.deepseek_v2 import DeepSeekV2Config as DeepSeekV2Config
from models.glm4_moe import GLM4MoE as GLM4MoE
from models.glm4_moe import GLM4MoEConfig as GLM4MoEConfig
from models.qwen3_moe import Qwen3MoE as Qwen3MoE
from models.qwen3_moe import Qwen3MoEConfig as Qwen3MoEConfig
from models.sharding import state_shardings as state_shardings

MODEL_TYPES = {
    "qwen3_moe": (Qwen3MoEConfig, Qwen3MoE),
    "glm4_moe": (GLM4MoEConfig, GLM4MoE),
    "deepseek_v2": (DeepSeekV2Config, DeepSeekV2),
}
"""Config and model by Hugging Face's `model_type`."""
