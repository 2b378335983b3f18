"""Which experts each token goes to, and with what weight: the routers of three model families as plain f32 functions.

Selection and weight are separate on purpose: a recorded selection can be replayed, padding can be masked, and logits
can be forced into a known imbalance (`forced_routing`), all without touching a router.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from topoep_jax._integers import is_integer
from topoep_jax.forced_routing import Forced as Forced
from topoep_jax.forced_routing import forced_logits as forced_logits

_GLM4_EPSILON = 1e-20


class Routing(NamedTuple):
    """The chosen experts of T tokens."""

    expert_idx: jax.Array
    """int32 [T, K]: expert of each assignment; -1 is padding and goes nowhere."""
    weight: jax.Array
    """f32 [T, K]: factor of the expert's output; 0 where `expert_idx` is -1."""


class Routed(NamedTuple):
    """What a layer did with its tokens: to record, to replay, and to make a loss of.

    The leading axes are those of the layer's x.
    """

    expert_idx: jax.Array
    """int32 [..., K]: expert of each assignment; -1 is padding. What `replay` takes."""
    logits: jax.Array
    """f32 [..., E]: the router's logits that the choice was made from, forced ones where routing is forced."""


def qwen3(logits: jax.Array, top_k: int, *, expert_idx: jax.Array | None = None, renormalize: bool = True) -> Routing:
    """Softmax over the experts, top-k, weights renormalised over the k (Qwen3-MoE).

    Args:
      logits: float [T, E]. -inf disables an expert for a token.
      top_k: K, experts per token.
      expert_idx: int32 [T, K], a recorded selection to use instead of the k best; negative entries are padding.
      renormalize: whether the k weights of a token sum to 1 (`norm_topk_prob` in published configurations).

    Returns:
      The `Routing`. Equal scores go to the lowest expert index.

    Raises:
      ValueError: top_k outside 1..E, logits that are not 2-D, a replay of another shape or with experts >= E.
      TypeError: logits that are not float, a replay that is not int32.
    """
    logits = _checked(logits, top_k)
    expert_idx = _select(logits, top_k) if expert_idx is None else _replayed(expert_idx, logits, top_k)
    if renormalize:
        # Equal to the renormalised probabilities, and finite where a replayed expert's probability underflows.
        return Routing(expert_idx, _softmax(_take(logits, expert_idx), _served(expert_idx, logits)))
    return Routing(expert_idx, _probability(logits, expert_idx))


def glm4(
    logits: jax.Array,
    top_k: int,
    *,
    correction_bias: jax.Array,
    expert_idx: jax.Array | None = None,
    renormalize: bool = True,
    scale: float = 1.0,
) -> Routing:
    """Sigmoid scores; a bias that steers the selection only; weights normalised over the k, times `scale` (GLM-4.5).

    Args:
      logits: float [T, E]. -inf disables an expert for a token, whatever its bias.
      top_k: K, experts per token.
      correction_bias: float [E], added to the sigmoid for the selection; never part of a weight, and without gradient.
      expert_idx: int32 [T, K], a recorded selection to use instead of the k best; negative entries are padding.
      renormalize: whether weights are sigmoid / (sum of the token's k sigmoids + 1e-20) or the bare sigmoid.
      scale: factor on every weight.

    Returns:
      The `Routing`. Equal scores go to the lowest expert index.

    Raises:
      As `qwen3`; ValueError also for a bias that is not [E], TypeError for one that is not float.
    """
    logits = _checked(logits, top_k)
    num_experts = logits.shape[1]
    if jnp.shape(correction_bias) != (num_experts,):
        raise ValueError(
            f"correction_bias has shape {jnp.shape(correction_bias)}, but the logits have {num_experts} experts:"
            f" pass shape ({num_experts},)"
        )
    bias = jnp.asarray(correction_bias)
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(f"correction_bias has dtype {bias.dtype}, but it is added to scores: pass floats")
    if expert_idx is None:
        score = jax.nn.sigmoid(logits) + bias.astype(jnp.float32)[None, :]
        expert_idx = _select(jnp.where(logits == -jnp.inf, -jnp.inf, score), top_k)
    else:
        expert_idx = _replayed(expert_idx, logits, top_k)
    served = _served(expert_idx, logits)
    chosen = _take(logits, expert_idx)
    if renormalize:
        # The same quotient in logarithms: squares of 1e-20 in its gradient would underflow to 0 / 0.
        weight = _softmax(jax.nn.log_sigmoid(chosen), served, floor=math.log(_GLM4_EPSILON))
    else:
        weight = jnp.where(served, jax.nn.sigmoid(chosen), 0.0)
    return Routing(expert_idx, weight * jnp.float32(scale))


def deepseek_v2(
    logits: jax.Array,
    top_k: int,
    *,
    num_groups: int,
    topk_group: int,
    expert_idx: jax.Array | None = None,
    renormalize: bool = False,
    scale: float = 1.0,
) -> Routing:
    """Softmax; the best groups by their best expert; top-k inside those; full softmax times `scale` (DeepSeek-V2).

    Args:
      logits: float [T, E]. -inf disables an expert for a token.
      top_k: K, experts per token.
      num_groups: groups of E / num_groups neighbouring experts.
      topk_group: groups a token may use. An expert of another group is never selected.
      expert_idx: int32 [T, K], a recorded selection to use instead (groups then play no role); negative entries pad.
      renormalize: whether the k weights of a token sum to `scale`.
      scale: factor on every weight (`routed_scaling_factor` in published configurations).

    Returns:
      The `Routing`. Equal scores go to the lowest group, then to the lowest expert index.

    Raises:
      As `qwen3`; ValueError also where num_groups does not divide E, topk_group lies outside 1..num_groups, or the kept
      groups hold fewer than top_k experts.
    """
    logits = _checked(logits, top_k)
    num_experts = logits.shape[1]
    _check_groups(num_experts, top_k, num_groups, topk_group)
    if expert_idx is None:
        # Disabled experts stay above the -inf of other groups: a token keeps to its groups even when short of experts.
        enabled_first = jnp.maximum(logits, jnp.finfo(jnp.float32).min)
        grouped = enabled_first.reshape(-1, num_groups, num_experts // num_groups)
        kept = _select(grouped.max(axis=2), topk_group)
        keep = (kept[:, :, None] == jnp.arange(num_groups, dtype=jnp.int32)[None, None, :]).any(axis=1)
        within = jnp.where(keep[:, :, None], grouped, -jnp.inf).reshape(-1, num_experts)
        expert_idx = _select(within, top_k)
    else:
        expert_idx = _replayed(expert_idx, logits, top_k)
    if renormalize:
        weight = _softmax(_take(logits, expert_idx), _served(expert_idx, logits))
    else:
        weight = _probability(logits, expert_idx)
    return Routing(expert_idx, weight * jnp.float32(scale))


ROUTERS: dict[str, Callable[..., Routing]] = {"qwen3": qwen3, "glm4": glm4, "deepseek_v2": deepseek_v2}


def get_router(name: str) -> Callable[..., Routing]:
    """The router called `name`. Raises ValueError, listing the known names, where there is none."""
    if not isinstance(name, str) or name not in ROUTERS:
        raise ValueError(f"router={name!r} is unknown: choose one of {sorted(ROUTERS)}")
    return ROUTERS[name]


def apply_mask(routing: Routing, mask: jax.Array) -> Routing:
    """Takes padding tokens out: expert -1, weight 0, gradient 0.

    The logits of padding must be finite, since a gradient of 0 times NaN is NaN: zero the tokens before the router.

    Args:
      routing: of T tokens.
      mask: bool [T], true for valid tokens.
    """
    valid = token_mask(mask, routing.expert_idx.shape[0])
    return Routing(jnp.where(valid, routing.expert_idx, -1), jnp.where(valid, routing.weight, 0.0))


def has_bad_logits(logits: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Whether any valid token cannot be routed: a NaN or +inf logit, or every expert disabled by -inf.

    Args:
      logits: float [T, E].
      mask: bool [T], true for valid tokens; None where all are.

    Returns:
      bool [].
    """
    bad = (jnp.isnan(logits) | (logits == jnp.inf)).any(axis=1) | (logits == -jnp.inf).all(axis=1)
    return bad.any() if mask is None else (bad[:, None] & token_mask(mask, logits.shape[0])).any()


def as_expert_idx(expert_idx: jax.Array | np.ndarray, num_experts: int) -> jax.Array:
    """Expert indices as int32 with every padding entry at -1.

    Args:
      expert_idx: int32 of any shape; entries below 0 are padding. NumPy arrays may be any signed integer.
      num_experts: E.

    Raises:
      TypeError: another dtype.
      ValueError: outside traced code, an entry >= E. In traced code such entries pass, for `demand` to report.
    """
    if not jnp.issubdtype(expert_idx.dtype, jnp.signedinteger):
        raise TypeError(f"expert_idx has dtype {expert_idx.dtype}, but int32 is needed (-1 is padding)")
    concrete = isinstance(expert_idx, np.ndarray) or (
        not isinstance(expert_idx, jax.core.Tracer) and expert_idx.is_fully_addressable
    )
    if concrete:
        # In NumPy before JAX sees it: without x64, JAX would wrap 64-bit values around to valid experts.
        expert_idx = np.maximum(np.asarray(expert_idx), -1)
        if np.max(expert_idx, initial=-1) >= num_experts:
            raise ValueError(
                f"expert_idx holds expert {np.max(expert_idx)}, but there are experts 0..{num_experts - 1}"
                " (negative entries are padding): was it recorded on another model?"
            )
        return jnp.asarray(expert_idx.astype(np.int32))
    if expert_idx.dtype.itemsize > 4:
        raise TypeError(f"expert_idx has dtype {expert_idx.dtype}, which int32 cannot hold: record int32 indices")
    return jnp.maximum(expert_idx.astype(jnp.int32), -1)


def _checked(logits: jax.Array, top_k: int) -> jax.Array:
    """The logits in f32, after the checks that every router shares."""
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"logits have dtype {logits.dtype}, but routers need floats: cast them to float32")
    if logits.ndim != 2:
        raise ValueError(f"logits have shape {logits.shape}, but routers need [tokens, experts]: flatten first")
    if not is_integer(top_k):
        raise TypeError(f"top_k={top_k!r} must be a Python integer: it is a shape")
    if not 1 <= top_k <= logits.shape[1]:
        raise ValueError(
            f"top_k={top_k} must lie in 1..{logits.shape[1]}: a token takes at least one and at most all of the"
            f" {logits.shape[1]} experts"
        )
    return logits.astype(jnp.float32)


def _check_groups(num_experts: int, top_k: int, num_groups: int, topk_group: int) -> None:
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"num_groups={num_groups} does not divide the {num_experts} experts: choose a divisor")
    if not 1 <= topk_group <= num_groups:
        raise ValueError(f"topk_group={topk_group} must lie in 1..num_groups={num_groups}")
    reachable = topk_group * (num_experts // num_groups)
    if reachable < top_k:
        raise ValueError(
            f"topk_group={topk_group} groups of {num_experts // num_groups} hold {reachable} experts, fewer than"
            f" top_k={top_k}: keep more groups or select fewer experts"
        )


def _replayed(expert_idx: jax.Array, logits: jax.Array, top_k: int) -> jax.Array:
    """A recorded selection, checked against the logits it is replayed on."""
    shape = (logits.shape[0], top_k)
    if jnp.shape(expert_idx) != shape:
        raise ValueError(f"the replayed expert_idx has shape {jnp.shape(expert_idx)}, not (tokens, top_k) = {shape}")
    return as_expert_idx(expert_idx, logits.shape[1])


def token_mask(mask: jax.Array, num_tokens: int) -> jax.Array:
    """The mask as bool [T, 1], ready to broadcast over experts or assignments."""
    if mask.dtype != jnp.bool_:
        raise ValueError(f"mask is {mask.dtype}, but bool is needed: true = valid")
    if mask.shape != (num_tokens,):
        raise ValueError(f"mask has shape {mask.shape}, but ({num_tokens},) is needed: one entry for each token")
    return mask[:, None]


def _select(score: jax.Array, count: int) -> jax.Array:
    """int32 [T, count]: columns of the highest scores, best first, the lowest column first among equals."""
    # top_k puts +0 before -0; as scores they are equal.
    score = jnp.where(score == 0, 0.0, lax.stop_gradient(score))
    return lax.top_k(score, count)[1].astype(jnp.int32)


def _served(expert_idx: jax.Array, logits: jax.Array) -> jax.Array:
    """True where an entry is an expert: neither padding nor, in traced code, out of range (which `demand` reports)."""
    return (expert_idx >= 0) & (expert_idx < logits.shape[1])


def _take(values: jax.Array, expert_idx: jax.Array) -> jax.Array:
    """f32 [T, K]: the values at the chosen experts, of an arbitrary expert where the index is no expert."""
    return jnp.take_along_axis(values, jnp.clip(expert_idx, 0, values.shape[1] - 1), axis=1, mode="promise_in_bounds")


def _probability(logits: jax.Array, expert_idx: jax.Array) -> jax.Array:
    """f32 [T, K]: the chosen experts' share of the softmax over all experts, 0 on padding."""
    probability = _softmax(logits, jnp.ones(logits.shape, jnp.bool_))
    return jnp.where(_served(expert_idx, logits), _take(probability, expert_idx), 0.0)


def _softmax(x: jax.Array, valid: jax.Array, floor: float = -math.inf) -> jax.Array:
    """Softmax along the rows over valid entries and, in the denominator only, one more entry `floor`.

    Invalid and -inf entries get 0 with zero gradient, also where a whole row is so. NaN stays NaN.
    """
    peak = lax.stop_gradient(jnp.max(jnp.where(valid, x, -jnp.inf), axis=1, keepdims=True))
    peak = jnp.maximum(peak, floor)
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)
    # The inner where keeps exp away from what the outer one drops: 0 x inf in its gradient would be NaN.
    share = jnp.where(valid, jnp.exp(jnp.where(valid, x - peak, 0.0)), 0.0)
    total = share.sum(axis=1, keepdims=True) + jnp.exp(floor - peak)
    return share / jnp.where(total == 0, 1.0, total)
