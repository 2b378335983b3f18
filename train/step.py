"""The compiled part of training: mesh, model, optimizer, and one step from state to state."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.qwen3_moe import Qwen3MoE, state_shardings
from topoep_jax import Forced, MoEMetrics, Status, Topology, transport
from train.config import TrainConfig, how_to_emulate

AXIS = "ep"


class TrainState(NamedTuple):
    """What a checkpoint holds. All arrays are logical and global; replicas never enter."""

    step: jax.Array
    """int32 []: steps done."""
    params: Any
    """Nested dict of f32 masters."""
    opt_state: optax.OptState


class StepMetrics(NamedTuple):
    """What one step measured."""

    loss: jax.Array
    """f32 []: mean cross-entropy in nats per token, before the update."""
    grad_norm: jax.Array
    """f32 []: global norm of the gradient before clipping."""
    moe: MoEMetrics
    """Each field [num_layers, ...]."""


@dataclasses.dataclass(frozen=True)
class Program:
    """The functions of a run, built by `build`."""

    mesh: Mesh
    shardings: Any
    """A NamedSharding for each array of the state, as a `TrainState`."""
    abstract: TrainState
    """Shapes and dtypes of the state."""
    init: Callable[[], TrainState]
    """The state before the first step."""
    step: jax.stages.Wrapped
    """One optimizer step, jitted: (state, tokens) -> (state, `StepMetrics`); the state passed in is donated.
    A step with a non-finite loss or gradient, or with demand the planner refuses, returns it unchanged: `is_sound`.
    With overflow="flag" so does a step that did not fit its receive buffers: `overflowed`."""
    exact_step: jax.stages.Wrapped | None
    """The step with overflow="loop", for batches with which `step` overflowed; None where `step` is that already."""

    def place(self, batch: np.ndarray) -> jax.Array:
        """Shards int32 [batch_size, seq_len + 1], equal on every process, over the ranks."""
        sharding = NamedSharding(self.mesh, PartitionSpec(AXIS))
        return jax.make_array_from_callback(batch.shape, sharding, lambda index: batch[index])


def make_mesh(config: TrainConfig) -> Mesh:
    """A mesh of `config.ep` devices along axis "ep".

    Raises:
      ValueError: too few devices, or devices without work in a run of several processes.
    """
    devices = jax.devices()
    if len(devices) < config.ep:
        raise ValueError(
            f"--ep={config.ep} needs {config.ep} devices, but JAX sees {len(devices)} ({devices[0].platform}):"
            f" {how_to_emulate(config)}"
        )
    if len(devices) > config.ep and config.num_processes > 1:
        raise ValueError(
            f"--ep={config.ep} leaves devices unused: {config.num_processes} processes have {len(devices)} together;"
            f" pass --ep={len(devices)}"
        )
    return Mesh(np.asarray(devices[: config.ep]), (AXIS,))


def make_topology(config: TrainConfig, mesh: Mesh) -> Topology:
    """The domains the planner sees: those asked for, else two halves of an emulated mesh, else the mesh's own."""
    emulated = config.num_processes == 1 and mesh.devices.flat[0].platform == "cpu"
    domains = config.domains or (2 if emulated and config.ep % 2 == 0 else 0)
    return Topology.uniform(domains, config.ep // domains) if domains else Topology.from_mesh(mesh, AXIS)


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW with warm-up, cosine decay and clipping by global norm; norm scales do not decay."""
    warmup = min(config.warmup, config.steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(
        config.lr / (warmup + 1), config.lr, warmup, max(config.steps, warmup + 1), end_value=config.lr / 10
    )

    def decays(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != "scale", params)

    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=decays),
    )


def build(config: TrainConfig, mesh: Mesh | None = None) -> Program:
    """Makes the functions of a run; nothing is compiled or allocated yet.

    Args:
      config: the run.
      mesh: devices to compile ahead of time for, none of which has to be there; None for those of this machine.

    Raises:
      ValueError: too few devices, or shapes that fit neither each other nor the mesh.
    """
    compile_only = mesh is not None
    mesh = mesh or make_mesh(config)
    _connect(config, mesh, compile_only=compile_only)
    optimizer = make_optimizer(config)
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    overflow = config.overflow or ("loop" if on_cpu else "flag")
    compiler_options = None if on_cpu or not config.xla_options else transport.xla_options().compiler_options
    moe_options: dict[str, Any] = {
        "planner": config.planner,
        "effort": config.effort,
        "num_slots": _num_slots(config),
        "block_rows": config.block_rows,
        "cap_factor": config.cap_factor,
        "chunks": config.chunks or None,
        "residuals": config.residuals,
        "topology": make_topology(config, mesh),
        "transport": config.transport,
        "pulls": config.pulls,
        "forced": None if config.skew is None else Forced(config.skew, config.seed),
    }

    def make_model(overflow: str) -> Qwen3MoE:
        return Qwen3MoE(
            config.shapes(),
            mesh=mesh,
            axis=AXIS,
            moe_options={**moe_options, "overflow": overflow},
            remat=config.remat,
            dtype=jnp.dtype(config.dtype),
            rngs=nnx.Rngs(config.seed),
        )

    def init() -> TrainState:
        params = nnx.to_pure_dict(nnx.state(make_model(overflow)))
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    abstract = jax.eval_shape(init)
    shardings = _shardings(abstract, mesh, optimizer)
    everywhere = NamedSharding(mesh, PartitionSpec())

    def make_step(overflow: str) -> jax.stages.Wrapped:
        graph = nnx.split(nnx.eval_shape(lambda: make_model(overflow)))[0]

        def loss_fn(params: Any, tokens: jax.Array, step: jax.Array) -> tuple[jax.Array, MoEMetrics]:
            logits, moe = nnx.merge(graph, params)(tokens[:, :-1], step=step)
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean(), moe

        def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, StepMetrics]:
            (loss, moe), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, tokens, state.step)
            metrics = StepMetrics(loss, optax.tree.norm(grads), moe)
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            updated = TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state)
            valid = is_sound(metrics)
            if overflow == "flag":
                valid &= ~overflowed(metrics)
            return jax.tree.map(lambda new, old: jnp.where(valid, new, old), updated, state), metrics

        out = shardings, everywhere
        return jax.jit(step, out_shardings=out, donate_argnums=0, compiler_options=compiler_options)

    return Program(
        mesh=mesh,
        shardings=shardings,
        abstract=abstract,
        init=jax.jit(init, out_shardings=shardings),
        step=make_step(overflow),
        exact_step=make_step("loop") if overflow == "flag" else None,
    )


def _num_slots(config: TrainConfig) -> int:
    return config.num_slots if config.ep > 1 else 0  # A rank alone has no one to replicate.


def _connect(config: TrainConfig, mesh: Mesh, *, compile_only: bool) -> None:
    """Makes the transport's group for the run, in place of one that an earlier run of this process made."""
    transport.shutdown(AXIS)
    if config.transport == "xla" or not _num_slots(config):
        return
    shapes = config.shapes()
    dtype = jnp.dtype(config.dtype)
    layer = transport.LayerSizes(
        num_mains=shapes.num_experts // config.ep,
        num_slots=config.num_slots,
        expert_bytes=3 * shapes.hidden * shapes.ffn * dtype.itemsize,
        pulls=config.pulls,
    )
    topology = make_topology(config, mesh)
    transport.init(mesh, AXIS, sizes=layer, topology=topology, dtype=dtype, compile_only=compile_only)


def is_sound(metrics: StepMetrics) -> jax.Array:
    """Whether loss and gradient are finite and every layer's demand was planned, bool []."""
    planned = jnp.all((metrics.moe.status & Status.BAD_INPUT.value) == 0)
    return jnp.isfinite(metrics.loss) & jnp.isfinite(metrics.grad_norm) & planned


def overflowed(metrics: StepMetrics) -> jax.Array:
    """Whether a layer had more rows than its receive buffers, bool []; every rank says the same."""
    return jnp.any(metrics.moe.passes > 1)


def _shardings(abstract: TrainState, mesh: Mesh, optimizer: optax.GradientTransformation) -> Any:
    """Moments live where their parameters live, counters everywhere."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    params = state_shardings(abstract.params, mesh, axis=AXIS)
    moments = optax.tree.map_params(
        optimizer, lambda _, place: place, abstract.opt_state, params, transform_non_params=lambda _: everywhere
    )
    places: Any = (everywhere, params, moments)
    return TrainState(*places)
