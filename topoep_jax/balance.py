"""What models were trained with to keep their own routing balanced: auxiliary losses, and the rule of a selection bias.

They change what a model learns; the planner does not need them, and none is on by default. Each loss takes the `Routed`
of one layer and is near 1 for uniform routing; multiply by the coefficient of the model's paper. For all layers of a
model, `jax.vmap` it over their leading axis and sum.
"""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from topoep_jax.routing import Routed

Score = Literal["softmax", "sigmoid"]
Over = Literal["batch", "sequence"]


class _Shares(NamedTuple):
    """The shares of each group of tokens that is balanced by itself."""

    used: jax.Array
    """bool [..., S, E]: whether a token goes to an expert."""
    axes: tuple[int, ...]
    """Those axes of `used` whose tokens share a balance; N below are the others."""
    frequency: jax.Array
    """f32 [N..., E]: assignments to an expert in units of their mean over the experts."""
    probability: jax.Array
    """f32 [N..., E]: mean score of an expert, the only part with a gradient."""
    tokens: jax.Array
    """f32 [N...]: tokens that are no padding."""


def expert_loss(routed: Routed, *, score: Score = "softmax", over: Over = "batch") -> jax.Array:
    """Sum over the experts of their share of the assignments, in units of the mean, times their mean score.

    "batch" is the loss of Switch Transformer (arXiv 2101.03961, eq. 4) for k experts, as Qwen3 takes it over the global
    batch; `router_aux_loss_coef` of Hugging Face's models multiplies K times this value, with the layers pooled.
    "sequence" is DeepSeek-V2's expert-level loss (arXiv 2405.04434, eq. 23) and, with score="sigmoid", the
    sequence-wise loss of DeepSeek-V3 (arXiv 2412.19437, eq. 17) that GLM-4.5 uses.

    Args:
      routed: of one layer, `expert_idx` int32 [..., S, K] and `logits` f32 [..., S, E]; entries of -1 are padding.
      score: "softmax", or "sigmoid" normalised over the experts.
      over: tokens that share a balance: those of the whole "batch", or of each "sequence", the axis before the last.

    Returns:
      f32 []: the mean over the sequences that hold a token; 0 where none does.
    """
    shares = _shares(routed, score, over)
    return _mean(shares, (shares.frequency * shares.probability).sum(axis=-1))


def device_loss(routed: Routed, *, num_groups: int, over: Over = "sequence") -> jax.Array:
    """The same for groups of neighbouring experts, those of a device: DeepSeek-V2's device-level loss (eq. 26).

    Args:
      routed: as in `expert_loss`.
      num_groups: D, a divisor of E.
      over: as in `expert_loss`.

    Returns:
      f32 [].

    Raises:
      ValueError: num_groups does not divide E.
    """
    shares = _shares(routed, "softmax", over)
    frequency = _grouped(shares.frequency, num_groups).mean(axis=-1)
    probability = _grouped(shares.probability, num_groups).sum(axis=-1)
    return _mean(shares, (frequency * probability).sum(axis=-1))


def communication_loss(routed: Routed, *, num_groups: int, topk_group: int, over: Over = "sequence") -> jax.Array:
    """The same for the tokens that a device receives, each counted once: DeepSeek-V2's communication loss (eq. 29).

    Args:
      routed: as in `expert_loss`.
      num_groups: D, a divisor of E.
      topk_group: M, the groups a token may use.
      over: as in `expert_loss`.

    Returns:
      f32 [].

    Raises:
      ValueError: num_groups does not divide E, or topk_group is out of range.
    """
    if not 1 <= topk_group <= num_groups:
        raise ValueError(f"topk_group={topk_group} must be within 1..{num_groups}, the number of groups")
    shares = _shares(routed, "softmax", over)
    visits = _grouped(shares.used, num_groups).any(axis=-1).sum(axis=shares.axes, dtype=jnp.int32)
    frequency = visits.astype(jnp.float32) * (num_groups / topk_group) / jnp.maximum(shares.tokens, 1)[..., None]
    probability = _grouped(shares.probability, num_groups).sum(axis=-1)
    return _mean(shares, (frequency * probability).sum(axis=-1))


def update_correction_bias(bias: jax.Array, expert_load: jax.Array, rate: float) -> jax.Array:
    """One step of the rule that moves a selection bias: up by `rate` below the mean load, down above it.

    The auxiliary-loss-free balancing of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2), which GLM-4.5 uses; to be
    applied once per optimizer step, with the load of its whole batch.

    Args:
      bias: float [..., E], `correction_bias` of one or more layers.
      expert_load: integers [..., E], as in `MoEMetrics.expert_load`, summed over the microbatches of the step.
      rate: the models' papers have 1e-3.

    Returns:
      The new bias, in its dtype; unchanged where the load is level.

    Raises:
      ValueError: the shapes differ, or the load is not of integers.
    """
    if not jnp.issubdtype(expert_load.dtype, jnp.integer):
        raise ValueError(f"expert_load is {expert_load.dtype}, but integers are needed: the sum over the microbatches")
    if bias.shape != expert_load.shape:
        raise ValueError(
            f"bias has shape {bias.shape}, but expert_load has {expert_load.shape}: give those of one layer"
        )
    # In integers: a mean in f32 is off where loads are large, or E is no power of two. It is mean + rest / E.
    num_experts = expert_load.shape[-1]
    rest = (expert_load % num_experts).sum(axis=-1, keepdims=True, dtype=jnp.int32)
    mean = (expert_load // num_experts).sum(axis=-1, keepdims=True, dtype=jnp.int32) + rest // num_experts
    below = (expert_load < mean) | ((expert_load == mean) & (rest % num_experts > 0))
    direction = jnp.where(below, 1, jnp.where(expert_load > mean, -1, 0))
    return bias + (rate * direction.astype(jnp.float32)).astype(bias.dtype)


def _shares(routed: Routed, score: Score, over: Over) -> _Shares:
    for name, value, known in (("score", score, get_args(Score)), ("over", over, get_args(Over))):
        if value not in known:
            raise ValueError(f"{name}={value!r} is unknown: choose one of {list(known)}")
    top_k, num_experts = routed.expert_idx.shape[-1], routed.logits.shape[-1]
    logits = routed.logits.astype(jnp.float32)
    scores = jax.nn.softmax(logits, axis=-1) if score == "softmax" else jax.nn.sigmoid(logits)
    if score == "sigmoid":
        scores = scores / (scores.sum(axis=-1, keepdims=True) + 1e-20)
    valid = (routed.expert_idx >= 0).any(axis=-1, keepdims=True)
    used = jax.nn.one_hot(routed.expert_idx, num_experts, dtype=jnp.bool_).any(axis=-2)
    axes = tuple(range(logits.ndim - 1)) if over == "batch" else (logits.ndim - 2,)
    tokens = valid.sum(axis=axes, dtype=jnp.int32).astype(jnp.float32)
    some = jnp.maximum(tokens, 1)
    return _Shares(
        used=used,
        axes=axes,
        frequency=used.sum(axis=axes, dtype=jnp.int32).astype(jnp.float32) * (num_experts / top_k) / some,
        probability=jnp.where(valid, scores, 0.0).sum(axis=axes) / some,
        tokens=tokens[..., 0],
    )


def _mean(shares: _Shares, loss: jax.Array) -> jax.Array:
    """The mean over the groups of tokens that hold one."""
    held = shares.tokens > 0
    return jnp.where(held, loss, 0.0).sum() / jnp.maximum(held.sum(dtype=jnp.int32), 1).astype(jnp.float32)


def _grouped(values: jax.Array, num_groups: int) -> jax.Array:
    num_experts = values.shape[-1]
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"num_groups={num_groups} does not divide the {num_experts} experts: choose a divisor")
    return values.reshape(*values.shape[:-1], num_groups, num_experts // num_groups)
