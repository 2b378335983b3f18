"""The layer as it would be on one device: every expert on every token, then a weighted sum over the chosen ones."""

import jax
import jax.numpy as jnp

from topoep_jax import LayerConfig
from topoep_jax.moe import Params


def router_weight(config: LayerConfig, logits: jax.Array, chosen: jax.Array) -> jax.Array:
    """f32 [T, K] router weights of given experts, straight from the models' definitions; 0 where chosen is -1."""
    options = dict(config.router_options)
    if config.router == "glm4":
        score = jax.nn.sigmoid(logits)
    else:
        score = jax.nn.softmax(logits, axis=-1)
    weight = jnp.take_along_axis(score, jnp.maximum(chosen, 0), axis=1)
    if config.router in ("qwen3", "glm4"):
        weight = weight / weight.sum(1, keepdims=True)
    return jnp.where(chosen >= 0, weight * options.get("scale", 1.0), 0.0)


def dense_layer(params: Params, x: jax.Array, config: LayerConfig, chosen: jax.Array) -> jax.Array:
    """f32 [T, H] from global parameters (`init_params`), all tokens [T, H], and the layer's own choices [T, K].

    Tokens whose choices are all -1 are padding: their result is that of the shared experts on zeros, which is zero.
    """
    hidden, ffn, num_experts = config.hidden, config.ffn, config.num_experts
    f32 = lambda v: v.astype(jnp.float32)  # noqa: E731
    x = f32(x)
    weight = router_weight(config, x @ f32(params["router"]), chosen)
    gate_up = f32(params["w"][:, : 2 * hidden * ffn]).reshape(num_experts, hidden, 2 * ffn)
    down = f32(params["w"][:, 2 * hidden * ffn :]).reshape(num_experts, ffn, hidden)
    mixture = jnp.zeros((x.shape[0], num_experts + 1), jnp.float32)
    column = jnp.where(chosen < 0, num_experts, chosen)
    mixture = mixture.at[jnp.arange(x.shape[0])[:, None], column].add(weight)[:, :num_experts]
    gate, up = jnp.split(jnp.einsum("th,ehf->tef", x, gate_up), 2, axis=-1)
    y = jnp.einsum("tef,efh,te->th", jax.nn.silu(gate) * up, down, mixture)
    if config.shared_ffn:
        valid = (chosen >= 0).any(1, keepdims=True)
        gate, up = jnp.split(x @ f32(params["shared_gate_up"]), 2, axis=-1)
        y = y + jnp.where(valid, (jax.nn.silu(gate) * up) @ f32(params["shared_down"]), 0.0)
    return y
