"""AdamW on f32 masters: what a step does to parameters once the gradient and its norm are known."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from topoep_jax.balance import update_correction_bias
from train.config import TrainConfig
from train.state import TrainState

BIAS = "correction_bias"
BIAS_RATE = 1e-3
"""Of GLM-4.5 and DeepSeek-V3."""


class WithMasters(NamedTuple):
    """State of the optimizer where parameters are narrower than f32."""

    masters: Any
    """The trained parameters in f32; `TrainState.params` are these, rounded."""
    inner: optax.OptState


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """The update of a state, as functions to be jitted.

    Attributes:
      inner: from gradient, masters and the norm of all gradients to updates.
      has_masters: whether `params` are rounded copies of masters that its state holds.
      moves_bias: whether a selection bias follows its rule; otherwise it stays as it is.
    """

    inner: optax.GradientTransformationExtraArgs
    has_masters: bool
    moves_bias: bool

    def start(self, weights: Any, like: Any = None) -> TrainState:
        """The state before the first step.

        Args:
          weights: the parameters, or what they are to be before they are rounded: masters keep it.
          like: the parameters' dtypes, as a tree of arrays or shapes; None for those of `weights`.
        """
        params = weights if like is None else jax.tree.map(lambda leaf, model: leaf.astype(model.dtype), weights, like)
        return TrainState(jnp.zeros((), jnp.int32), params, self.init(weights))

    def init(self, params: Any) -> Any:
        """State of the optimizer for `params`."""
        trained = without_bias(params)
        if not self.has_masters:
            return self.inner.init(trained)
        masters = wide(trained)
        return WithMasters(masters, self.inner.init(masters))

    def like_params(self, opt_state: Any, params: Any, other: Any) -> Any:
        """The tree of `opt_state` with the leaf of `params` wherever a parameter has one of its own, else `other`."""
        trained = without_bias(params)
        inner = opt_state.inner if self.has_masters else opt_state
        inner = optax.tree.map_params(
            self.inner, lambda _, leaf: leaf, inner, trained, transform_non_params=lambda _: other
        )
        return WithMasters(trained, inner) if self.has_masters else inner

    def advance(
        self, state: TrainState, grads: Any, norm: jax.Array, expert_load: jax.Array, valid: jax.Array
    ) -> TrainState:
        """One step.

        Args:
          state: before it.
          grads: f32, of the trained parameters: the tree of `without_bias(state.params)`.
          norm: f32 [], of the gradient of the whole model, of which `state` may be a part.
          expert_load: int32 [moe layers, E], over the batch of the step.
          valid: bool [], false to leave everything as it is.
        """
        bias, trained = state.params.get("layers", {}).get("moe", {}).get(BIAS), without_bias(state.params)
        masters, inner = state.opt_state if self.has_masters else (trained, state.opt_state)
        updates, inner = self.inner.update(grads, inner, masters, norm=norm)
        masters = optax.apply_updates(masters, updates)
        params = jax.tree.map(lambda master, old: master.astype(old.dtype), masters, trained)
        if bias is not None:
            moved = update_correction_bias(bias, expert_load, BIAS_RATE) if self.moves_bias else bias
            params["layers"]["moe"][BIAS] = moved
        opt_state = WithMasters(masters, inner) if self.has_masters else inner
        new = TrainState(state.step + 1, params, opt_state)
        return jax.tree.map(lambda new, old: jnp.where(valid, new, old), new, state)


def make_optimizer(config: TrainConfig, *, has_masters: bool) -> Optimizer:
    """AdamW with warm-up, cosine decay and clipping by global norm; norm scales and biases do not decay."""
    warmup = min(config.warmup, config.steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(
        config.lr / (warmup + 1), config.lr, warmup, max(config.steps, warmup + 1), end_value=config.lr / 10
    )

    def decays(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in ("scale", "bias"), params)

    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=decays)
    return Optimizer(optax.chain(_clip(config.clip), adamw), has_masters, config.balance_loss)


def without_bias(params: Any) -> Any:
    """The parameters that have a gradient: all but the selection bias of the layers, which a rule moves."""
    layers = params.get("layers", {})
    if BIAS not in layers.get("moe", {}):
        return params
    moe = {name: value for name, value in layers["moe"].items() if name != BIAS}
    return {**params, "layers": {**layers, "moe": moe}}


def with_bias(trained: Any, params: Any) -> Any:
    """`trained` and the selection bias of `params`, where there is one."""
    bias = params.get("layers", {}).get("moe", {}).get(BIAS)
    if bias is None:
        return trained
    layers = trained["layers"]
    return {**trained, "layers": {**layers, "moe": {**layers["moe"], BIAS: bias}}}


def wide(tree: Any) -> Any:
    """The tree in f32."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)


def _clip(limit: float) -> optax.GradientTransformationExtraArgs:
    """Clipping by a norm that the caller knows: the gradient at hand may be that of one stage of several."""

    def update(updates: Any, state: Any, params: Any = None, *, norm: jax.Array, **_: Any) -> tuple[Any, Any]:
        factor = jnp.where(norm < limit, 1.0, limit / norm)
        return jax.tree.map(lambda leaf: leaf * factor, updates), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
