"""Language models built on `topoep_jax.MoE`, in Flax nnx; they run from a checkout and are not part of the wheel."""

from models.qwen3_moe import Qwen3MoE as Qwen3MoE
from models.qwen3_moe import Qwen3MoEConfig as Qwen3MoEConfig
from models.qwen3_moe import state_shardings as state_shardings
