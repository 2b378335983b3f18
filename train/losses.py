"""What is minimised: the cross-entropy, and the auxiliary losses that each model was trained with."""

import jax
import optax

from models import DeepSeekV2Config, GLM4MoEConfig, Qwen3MoEConfig
from topoep_jax import Routed
from topoep_jax.balance import communication_loss, device_loss, expert_loss
from train.config import ModelConfig


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over the tokens in nats, f32 [], of logits f32 [B, S, V] for labels int32 [B, S]."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def balance_loss(shapes: ModelConfig, routed: Routed) -> jax.Array:
    """Sum over the layers of the auxiliary losses of one microbatch, each times its coefficient.

    Qwen3: over the batch, 0.001 times its experts per token, as Hugging Face's `router_aux_loss_coef` counts.
    GLM-4.5: over each sequence, 1e-4 (arXiv 2508.06471), beside the rule that moves the selection bias. DeepSeek-V2:
    of experts, devices and communication, 0.003, 0.05 and 0.02 (arXiv 2405.04434, section 3.1.2).

    Args:
      shapes: the model.
      routed: of its layers, `expert_idx` int32 [layers, B, S, K] and `logits` f32 [layers, B, S, E].

    Returns:
      f32 [].
    """

    def of_layer(routed: Routed) -> jax.Array:
        match shapes:
            case Qwen3MoEConfig():
                return 0.001 * shapes.top_k * expert_loss(routed)
            case GLM4MoEConfig():
                return 1e-4 * expert_loss(routed, score="sigmoid", over="sequence")
            case DeepSeekV2Config():
                groups, most = shapes.num_groups, shapes.topk_group
                of_devices = 0.05 * device_loss(routed, num_groups=groups)
                of_communication = 0.02 * communication_loss(routed, num_groups=groups, topk_group=most)
                return 0.003 * expert_loss(routed, over="sequence") + of_devices + of_communication

    return jax.vmap(of_layer)(routed).sum()
