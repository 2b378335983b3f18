"""The MoE layer: routing -> demand -> plan -> transfer | dispatch -> experts -> combine, in this order.

`moe_layer` is the function for your own shard_map or pmap; `topoep_jax.module` places it on a mesh as a Flax module.
"""

import contextlib
import contextvars
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from topoep_jax import routing
from topoep_jax._compat import on_stream, vary_like
from topoep_jax._native_ids import PLANNER_IDS
from topoep_jax.config import LayerConfig
from topoep_jax.demand import gather_demand
from topoep_jax.dispatch import Rails, extent_of, gather_places, send_order
from topoep_jax.metrics import MoEMetrics, metrics_of
from topoep_jax.pipeline import Inputs, planned_experts
from topoep_jax.plan import Plan, solve_plan
from topoep_jax.plan.mains import mains_only
from topoep_jax.topology import Topology

Params = dict[str, Any]
Initializer = Callable[[jax.Array], jax.Array]

_PLANNER_STREAM = 1
_log = logging.getLogger("topoep_jax")
_NOTED: contextvars.ContextVar[list[tuple[LayerConfig, int]] | None] = contextvars.ContextVar("noted", default=None)


@overload
def moe_layer(
    params: Params,
    x: jax.Array,
    *,
    axis_name: str,
    config: LayerConfig,
    mask: jax.Array | None = None,
    replay: jax.Array | None = None,
    layer: jax.Array | int = 0,
    step: jax.Array | int = 0,
    return_routing: Literal[False] = False,
) -> tuple[jax.Array, MoEMetrics]: ...


@overload
def moe_layer(
    params: Params,
    x: jax.Array,
    *,
    axis_name: str,
    config: LayerConfig,
    mask: jax.Array | None = None,
    replay: jax.Array | None = None,
    layer: jax.Array | int = 0,
    step: jax.Array | int = 0,
    return_routing: Literal[True],
) -> tuple[jax.Array, MoEMetrics, routing.Routed]: ...


def moe_layer(
    params: Params,
    x: jax.Array,
    *,
    axis_name: str,
    config: LayerConfig,
    mask: jax.Array | None = None,
    replay: jax.Array | None = None,
    layer: jax.Array | int = 0,
    step: jax.Array | int = 0,
    return_routing: bool = False,
) -> tuple[jax.Array, MoEMetrics] | tuple[jax.Array, MoEMetrics, routing.Routed]:
    """One MoE layer on one rank; call it inside shard_map or pmap over `axis_name`.

    In your own shard_map, `jax.jit(jax.shard_map(f, mesh=mesh, in_specs=({"w": P("ep"), "router": P()}, P("ep")),
    out_specs=(P("ep"), P()), check_vma=False))` gives y and metrics; the metrics are equal on every rank, which
    `check_vma` cannot see. Without jit it gives the same, but shard_map then compiles some hundreds of operations one
    by one, which takes a minute and more whatever the planner. Differentiate outside of shard_map and all gradients
    are right. Inside it, or inside pmap, each rank has the gradient of its own loss: that of `w` already holds the
    tokens of all ranks, those of the other parameters only this rank's, so for a mean over ranks divide the first by R
    and `lax.pmean` the others.

    Args:
      params: `w` [E/R, 3 H I] this rank's packed experts (gate and up as [H, 2 I], then down as [I, H]);
        `router` [H, E]; `correction_bias` f32 [E] for the "glm4" router; `shared_gate_up` [H, 2 S] and `shared_down`
        [S, H] where `config.shared_ffn` = S > 0. All but `w` are the same on every rank. `init_params` makes them.
      x: [T, H] this rank's tokens; T is at least 1, and the same on every rank.
      axis_name: the expert-parallel axis, of `config.num_ranks` ranks.
      config: the layer.
      mask: bool [T], false for padding, which is routed nowhere and yields zeros; None where every token counts.
      replay: int32 [T, K], recorded experts to use instead of the router's choice; negative entries are padding.
      layer: index of this layer, for forced routing and for what `check_exchange` finds.
      step: index of this call; only forced routing reads it.
      return_routing: also return what the router chose, to record it or for a balance loss.

    Returns:
      [T, H] in the dtype of `x`; the metrics, equal on every rank; if asked for, this rank's `Routed`. Where
      `metrics.status` holds `Status.BAD_INPUT` (a NaN among the logits of any rank, say) nothing was routed and y is
      that of the shared experts alone: stop. With `config.overflow` = "flag", y is incomplete where `metrics.passes` >
      1: run the batch again with "loop".

    Raises:
      ValueError: shapes that disagree with `config`, or an axis of another size.
    """
    _check_shapes(params, x, axis_name, config)
    if (noted := _NOTED.get()) is not None:
        noted.append((config, x.shape[0]))
    with jax.named_scope("topoep_route"):
        if mask is not None:
            x = jnp.where(routing.token_mask(mask, x.shape[0]), x, jnp.zeros((), x.dtype))
        # The gradient of the router needs x in f32: made again from x, or layers in a scan would keep both.
        logits = jax.checkpoint(_logits)(x, params["router"])
        bad = routing.has_bad_logits(logits, mask)
        if config.router == "glm4":
            bad |= ~jnp.isfinite(params["correction_bias"]).all()
        if config.forced is not None:
            rank = lax.axis_index(axis_name)
            logits = routing.forced_logits(config.forced, logits, layer=layer, step=step, rank=rank)
        chosen = _route(config, params, logits, replay)
        if mask is not None:
            chosen = routing.apply_mask(chosen, mask)
    omega = gather_demand(chosen.expert_idx, config.num_experts, axis_name, bad=bad)
    places = _places(config, chosen.expert_idx, axis_name)
    num_assignments = chosen.expert_idx.size
    plan = _plan(config, omega, num_assignments)
    inputs = Inputs(
        x=x,
        weight=vary_like(chosen.weight, x),
        params=vary_like(params["w"], x),
        expert_idx=chosen.expert_idx,
        omega=omega,
        slot_expert=jnp.asarray(plan.slot_expert),
        quota=jnp.asarray(plan.quota),
        places=places,
        layer=vary_like(jnp.asarray(layer, jnp.int32), omega) if config.check_exchange else None,
    )
    y = planned_experts(config, axis_name, inputs)
    if config.shared_ffn:
        y = y + _shared_experts(params, x)
    metrics = _measure(config, omega, plan, num_assignments)
    return (y, metrics, routing.Routed(chosen.expert_idx, logits)) if return_routing else (y, metrics)


@contextlib.contextmanager
def noting_layers() -> Iterator[list[tuple[LayerConfig, int]]]:
    """Yields a list that gets the configuration and T of every layer that is traced inside: for tools."""
    noted: list[tuple[LayerConfig, int]] = []
    token = _NOTED.set(noted)
    try:
        yield noted
    finally:
        _NOTED.reset(token)


def solve_layer_plan(config: LayerConfig, omega: jax.Array | np.ndarray, num_assignments: int) -> Plan:
    """`solve_plan` as a layer calls it, for demand omega int32 [R, E] and A = `num_assignments` of one rank."""
    return solve_plan(
        omega,
        config.topology,
        config.cost,
        num_slots=config.num_slots,
        cap_rows=config.cap_rows(num_assignments),
        block_rows=config.block_rows,
        planner=config.planner,
        effort=config.effort,
        implementation=config.planner_implementation,
    )


def init_params(key: jax.Array, config: LayerConfig, dtype: Any = jnp.float32) -> Params:
    """Fresh global parameters of a layer, as `moe_layer` takes them, with `w` of all E experts: [E, 3 H I].

    Every matrix is normal with variance 1 / fan-in. The router and the correction bias are f32.
    """
    _check_config(config)
    if not isinstance(key, jax.Array):
        raise ValueError(f"key={key!r} must be a key, as jax.random.key(0)")
    return {name: draw(key) for name, draw in initializers(config, dtype).items()}


def initializers(config: LayerConfig, dtype: Any = jnp.float32) -> dict[str, Initializer]:
    """How `init_params` draws each parameter: from a key, of which each takes a share of its own."""
    hidden, ffn, experts, shared = config.hidden, config.ffn, config.num_experts, config.shared_ffn

    def normal(key: jax.Array, share: int, shape: tuple[int, ...], fan_in: int, dtype: Any) -> jax.Array:
        key = jax.random.split(jax.random.clone(key), 5)[share]  # A share of its own is no second use.
        return (jax.random.normal(key, shape, jnp.float32) * fan_in**-0.5).astype(dtype)

    def packed(key: jax.Array) -> jax.Array:
        gate_up = normal(key, 0, (experts, 2 * hidden * ffn), hidden, dtype)
        down = normal(key, 1, (experts, hidden * ffn), ffn, dtype)
        return jnp.concatenate([gate_up, down], axis=1)

    draws: dict[str, Initializer] = {"w": packed}
    draws["router"] = lambda key: normal(key, 2, (hidden, experts), hidden, jnp.float32)
    if config.router == "glm4":
        draws["correction_bias"] = lambda _: jnp.zeros((experts,), jnp.float32)
    if shared:
        draws["shared_gate_up"] = lambda key: normal(key, 3, (hidden, 2 * shared), hidden, dtype)
        draws["shared_down"] = lambda key: normal(key, 4, (shared, hidden), shared, dtype)
    return draws


def holds_rows(dtype: Any) -> bool:
    """Whether rows can be multiplied in this dtype: a float one of 16 bits or more."""
    try:
        return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize >= 2
    except TypeError:  # no dtype at all
        return False


def _logits(x: jax.Array, router: jax.Array) -> jax.Array:
    return lax.dot_general(x.astype(jnp.float32), router.astype(jnp.float32), (((1,), (0,)), ((), ())))


def _route(config: LayerConfig, params: Params, logits: jax.Array, replay: jax.Array | None) -> routing.Routing:
    options = dict(config.router_options)
    if config.router == "glm4":
        options["correction_bias"] = params["correction_bias"]
    return routing.get_router(config.router)(logits, config.top_k, expert_idx=replay, **options)


@jax.named_scope("topoep_demand")
def _places(config: LayerConfig, expert_idx: jax.Array, axis_name: str) -> jax.Array | None:
    """What a gateway has to know of its sources, [M - 1, T, K]; None where rows travel as they are."""
    if config.exchange == "direct":
        return None
    rails = Rails.of(config.topology)
    if rails is None:
        _say_direct(config.topology)
        return None
    place = send_order(expert_idx, config.num_experts)[1].reshape(expert_idx.shape)
    return gather_places(rails, place, axis_name)


@functools.lru_cache
def _say_direct(topology: Topology) -> None:
    """Once for each topology."""
    _log.warning("rows travel directly: two hops need two domains or more, of one size, and this is %s", topology)


@jax.named_scope("topoep_plan")
def _plan(config: LayerConfig, omega: jax.Array, num_assignments: int) -> Plan:
    """The plan, made beside what does not need it: the order of the tokens, and shared experts."""
    if config.planner == "none" or not config.num_slots:
        cap_rows = config.cap_rows(num_assignments)
        empty = mains_only(omega, num_slots=config.num_slots, cap_rows=cap_rows, block_rows=config.block_rows)
        return vary_like(empty, omega)

    def solve(omega: jax.Array) -> Plan:
        return solve_layer_plan(config, omega, num_assignments)

    # A host callback, as the reference and the baselines are, must not be moved: XLA's partitioner fails on it.
    is_native = config.planner in PLANNER_IDS and config.planner_implementation != "reference"
    return (on_stream(_PLANNER_STREAM, solve) if is_native else solve)(omega)


@jax.named_scope("topoep_metrics")
def _measure(config: LayerConfig, omega: jax.Array, plan: Plan, num_assignments: int) -> MoEMetrics:
    extent = extent_of(config, jnp.asarray(plan.quota), num_assignments)
    one, drops = jnp.ones_like(extent.passes), config.overflow == "drop"
    return metrics_of(
        omega,
        plan,
        config.topology,
        passes=one if drops else extent.passes,
        passes_run=extent.passes if config.overflow == "loop" else one,
        overflow_rows=extent.overflow_rows,
        dropped_rows=extent.overflow_rows if drops else jnp.zeros_like(extent.overflow_rows),
    )


@jax.named_scope("topoep_shared_experts")
def _shared_experts(params: Params, x: jax.Array) -> jax.Array:
    """SwiGLU that every token visits: no routing, no parallelism over experts."""
    gate, up = jnp.split((x @ params["shared_gate_up"].astype(x.dtype)).astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(x.dtype) @ params["shared_down"].astype(x.dtype)


def _check_shapes(params: Params, x: jax.Array, axis_name: str, config: LayerConfig) -> None:
    _check_config(config)
    if not isinstance(params, Mapping):
        raise ValueError(f"params is {type(params).__name__}, but a dict of arrays is needed: see init_params")
    ranks = _axis_size(axis_name)
    if ranks != config.num_ranks:
        raise ValueError(
            f"axis {axis_name!r} has {ranks} ranks, but the layer's topology describes {config.num_ranks}: build the"
            " LayerConfig for this mesh"
        )
    wanted: dict[str, tuple[int, ...]] = {
        "w": (config.num_mains, config.expert_size),
        "router": (config.hidden, config.num_experts),
    }
    if config.router == "glm4":
        wanted["correction_bias"] = (config.num_experts,)
    if config.shared_ffn:
        wanted["shared_gate_up"] = (config.hidden, 2 * config.shared_ffn)
        wanted["shared_down"] = (config.shared_ffn, config.hidden)
    for name, shape in wanted.items():
        value: Any = params.get(name)
        if getattr(value, "shape", None) != shape:
            got = "nothing" if value is None else getattr(value, "shape", type(value).__name__)
            raise ValueError(f"params[{name!r}] must have shape {shape} on each rank, got {got}: see init_params")
        if not holds_rows(value.dtype):
            raise ValueError(
                f"params[{name!r}] has dtype {value.dtype}, but a float dtype of 16 bits or more is needed"
            )
    if x.ndim != 2 or x.shape[1] != config.hidden or x.shape[0] == 0:
        raise ValueError(f"x has shape {x.shape}, but [tokens, {config.hidden}] is needed: flatten the token axes")
    if not holds_rows(x.dtype):
        raise ValueError(
            f"x has dtype {x.dtype}, but rows are multiplied in it: cast it to a float dtype of 16 bits or more"
        )
    if ranks * x.shape[0] * config.top_k >= 2**31:
        raise ValueError(
            f"{ranks} ranks x {x.shape[0]} tokens x top_k={config.top_k} is 2^31 assignments or more, which no plan can"
            " count: use smaller microbatches"
        )


def _check_config(config: Any) -> None:
    if not isinstance(config, LayerConfig):
        raise ValueError(f"config is {type(config).__name__}, but a LayerConfig is needed: of a module, its .config")


def _axis_size(axis_name: str) -> int:
    try:
        return lax.axis_size(axis_name)
    except NameError as error:
        raise ValueError(
            f"there is no axis {axis_name!r} here: call moe_layer inside jax.shard_map or jax.pmap over the"
            " expert-parallel axis, and pass that axis as axis_name; topoep_jax.MoE does both"
        ) from error
