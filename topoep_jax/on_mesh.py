"""The layer on a device mesh: the options, the checks and the call that both Flax forms have in common."""

import dataclasses
from collections.abc import Collection
from functools import partial
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from topoep_jax._integers import is_integer
from topoep_jax.config import LayerConfig
from topoep_jax.knobs import Layer, knob, told
from topoep_jax.metrics import MoEMetrics, merge_over
from topoep_jax.moe import Params, holds_rows, moe_layer
from topoep_jax.plan import Status
from topoep_jax.routing import Routed, as_expert_idx
from topoep_jax.topology import Topology, check_mesh
from topoep_jax.transport import Group, group

CORRECTION_BIAS = "correction_bias"
"""The parameter that no gradient trains: a rule moves it, as `topoep_jax.balance.update_correction_bias`."""
_EMULATED = "xla_force_host_platform_device_count"


class Place(NamedTuple):
    """All of a layer that a program is traced for."""

    config: LayerConfig
    mesh: Mesh
    axis: str
    data_axes: tuple[str, ...]
    dtype: Any

    @property
    def axes(self) -> tuple[str, ...]:
        """Over which tokens are sharded."""
        return (*self.data_axes, self.axis)

    def names(self, parameter: str, ndim: int) -> tuple[str | None, ...]:
        """The mesh axis, if any, over which each axis of a parameter is spread: its experts, and nothing else."""
        return (self.axis, None) if parameter == "w" else (None,) * ndim


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class Options(Layer):
    """The options of a layer on a mesh: its own (`topoep_jax.knobs`), and where it lies."""

    mesh: Mesh = dataclasses.field(
        metadata=told(
            "x is sharded over its axes (data_axes..., axis) on its flattened token axes; best with Auto axes, as"
            " jax.sharding.Mesh(devices, names) makes them: jax.make_mesh makes Explicit ones, with which JAX wants to"
            " be told the sharding of every product in the rest of the model"
        )
    )
    axis: str = knob("ep", "the expert-parallel mesh axis")
    data_axes: tuple[str, ...] = knob(
        (), "mesh axes over which tokens are sharded as well; each group of them plans on its own"
    )
    dtype: Any = knob(jnp.float32, "of rows, activations and products; sums are f32")
    param_dtype: Any = knob(jnp.float32, "of the parameters and of their gradients")

    def place(self) -> Place:
        """The layer, checked.

        Raises:
          ValueError: see `topoep_jax.MoE`.
        """
        check_mesh(self.mesh)
        filled: dict[str, Any] = {
            "topology": _topology_on_mesh(self.mesh, self.axis, self.data_axes, self.topology),
            "chunks": _chunks_on_mesh(self.mesh) if self.chunks is None else self.chunks,
        }
        names = [field.name for field in dataclasses.fields(LayerConfig)]
        config = LayerConfig(**{name: filled.get(name, getattr(self, name)) for name in names})
        for name in ("dtype", "param_dtype"):
            kind = getattr(self, name)
            if not holds_rows(kind):
                raise ValueError(f"{name}={kind} must be a float dtype of 16 bits or more, as in jnp.bfloat16")
        return Place(config, self.mesh, self.axis, tuple(self.data_axes), self.dtype)


class OnMesh:
    """The call of both forms, which say where the layer is placed and what its parameters are."""

    def _placed(self) -> tuple[Place, Params]:
        raise NotImplementedError

    @overload
    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None = None,
        replay: jax.Array | None = None,
        *,
        layer: jax.Array | int = 0,
        step: jax.Array | int = 0,
        return_routing: Literal[False] = False,
    ) -> tuple[jax.Array, MoEMetrics]: ...

    @overload
    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None = None,
        replay: jax.Array | None = None,
        *,
        layer: jax.Array | int = 0,
        step: jax.Array | int = 0,
        return_routing: Literal[True],
    ) -> tuple[jax.Array, MoEMetrics, Routed]: ...

    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None = None,
        replay: jax.Array | None = None,
        *,
        layer: jax.Array | int = 0,
        step: jax.Array | int = 0,
        return_routing: bool = False,
    ) -> tuple[jax.Array, MoEMetrics] | tuple[jax.Array, MoEMetrics, Routed]:
        """Routes, plans and runs the experts.

        Args:
          x: [..., H] tokens; their number must be a multiple of the ranks they are sharded over.
          mask: bool [...], false for padding.
          replay: int32 [..., K], recorded experts instead of the router's choice; negative entries are padding.
          layer: index of this layer; for forced routing and for what `check_exchange` finds.
          step: index of this call; only forced routing reads it.
          return_routing: also return what the router chose, to record it or for a balance loss.

        Returns:
          [..., H] in the module's dtype, `MoEMetrics` and, if asked for, `Routed`.

        Raises:
          ValueError: shapes; outside jit also arrays that live elsewhere than the layer, logits that no token can be
            routed by, and overflow that is only flagged.
        """
        if not holds_rows(getattr(x, "dtype", None)):
            raise ValueError(f"x is {getattr(x, 'dtype', type(x).__name__)}, but an array of floats is needed")
        if not isinstance(return_routing, bool):
            raise ValueError(
                f"return_routing={return_routing} must be True or False: where a transformation of the layer alone"
                " makes it an array, as nn.remat does, transform a module of yours that calls the layer with it"
            )
        place, params = self._placed()
        arrays = {"x": x, "mask": mask, "replay": replay} | {f"params[{name!r}]": params[name] for name in params}
        for name, value in arrays.items():
            _check_devices(name, value, place.mesh)
        y, metrics, routed = _apply(
            place, params, x.astype(place.dtype), mask, replay, {"layer": layer, "step": step}, return_routing
        )
        return (y, metrics) if routed is None else (y, metrics, routed)


def _chunks_on_mesh(mesh: Mesh) -> int:
    return 1 if mesh.devices.flat[0].platform == "cpu" else 2


def _topology_on_mesh(mesh: Mesh, axis: str, data_axes: tuple[str, ...], topology: Topology | None) -> Topology:
    """The topology of `axis`: read from the devices, or the given one if it fits."""
    if not isinstance(data_axes, tuple | list) or axis in data_axes or len(set(data_axes)) < len(data_axes):
        raise ValueError(f"data_axes={data_axes!r} must be a tuple of mesh axes other than axis={axis!r}, each once")
    for name in (axis, *data_axes):
        if name not in mesh.axis_names:
            raise ValueError(
                f"the mesh has axes {tuple(mesh.axis_names)} but no axis {name!r}: add it to the mesh or name another"
            )
    if topology is None:
        return Topology.from_mesh(mesh, axis)
    if not isinstance(topology, Topology):
        raise ValueError(f"topology={topology!r} must be a Topology, as in Topology.uniform(2, 4), or None")
    if topology.num_ranks != mesh.shape[axis]:
        wanted = mesh.size // mesh.shape[axis] * topology.num_ranks
        emulate = f" To emulate {wanted} devices on CPU, set before JAX starts: XLA_FLAGS=--{_EMULATED}={wanted}"
        raise ValueError(
            f"the topology describes {topology.num_ranks} ranks, but axis {axis!r} of the mesh has {mesh.shape[axis]}:"
            f" give one domain per device of that axis.{emulate if wanted > mesh.size else ''}"
        )
    return topology


def _check_devices(name: str, value: Any, mesh: Mesh) -> None:
    """Raises for an array that was put on other devices than the mesh has, which JAX would report of a program."""
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer) or not value.committed:
        return
    held, wanted = value.sharding.device_set, set(mesh.devices.flat)
    if held != wanted:
        raise ValueError(
            f"{name} was put on {_some(held)}, but the mesh of the layer has {_some(wanted)}: leave it where JAX makes"
            f" it, or put it on the mesh, as in jax.device_put({name}, NamedSharding(mesh, P()))"
        )


def _some(devices: Collection[jax.Device]) -> str:
    first = min(devices, key=lambda device: device.id)
    return str(first) if len(devices) == 1 else f"{len(devices)} devices, {first} and others"


def _apply(
    place: Place,
    params: Params,
    x: jax.Array,
    mask: jax.Array | None,
    replay: jax.Array | None,
    index: dict[str, jax.Array | int],
    return_routing: bool,
) -> tuple[jax.Array, MoEMetrics, Routed | None]:
    """`moe_layer` on global arrays. x is [..., H]; mask [...]; replay [..., K]."""
    config, axes = place.config, place.axes
    if x.ndim == 0 or x.shape[-1] != config.hidden:
        raise ValueError(f"x has shape {x.shape}, but [..., {config.hidden}] is needed: its last axis is hidden")
    mask = _per_token("mask", mask, x.shape[:-1])
    replay = _per_token("replay", replay, (*x.shape[:-1], config.top_k))
    if replay is not None:
        replay = as_expert_idx(replay, config.num_experts)
    num_groups = int(np.prod([place.mesh.shape[axis] for axis in axes]))
    num_tokens = x.size // config.hidden
    if num_tokens % num_groups or not num_tokens:
        raise ValueError(
            f"x holds {num_tokens} tokens, which do not divide among the {num_groups} ranks of axes"
            f" {axes}: pad them and pass mask=, false on the padding"
        )
    numbers = {name: _number(name, value) for name, value in index.items()}
    # The traced layer holds its group's number, and the next group of the axis has another one.
    made = group(place.axis) if config.transport == "device" and config.num_slots else None
    y, metrics, routed = _sharded_layer(place, made, return_routing, params, x, mask, replay, numbers)
    if not isinstance(metrics.status, jax.core.Tracer) and int(metrics.status) & Status.BAD_INPUT:
        raise ValueError(
            "the router's logits hold NaN or +inf (or disable every expert of a token, or the correction bias is not"
            " finite), so no token was routed: look at x and the router's parameters. Under jit this does not raise but"
            " sets BAD_INPUT in metrics.status"
        )
    if config.overflow == "flag" and not isinstance(metrics.passes, jax.core.Tracer) and int(metrics.passes) > 1:
        raise ValueError(
            f"{int(metrics.overflow_rows)} assignments lie beyond the receive buffer, and overflow='flag' leaves them"
            " out: run this batch with a layer of overflow='loop', or raise cap_factor. Under jit this does not raise"
            " but sets metrics.passes above 1"
        )
    return y, metrics, routed


@partial(jax.jit, static_argnums=(0, 1, 2))
def _sharded_layer(
    place: Place,
    made: Group | None,
    return_routing: bool,
    params: Params,
    x: jax.Array,
    mask: jax.Array | None,
    replay: jax.Array | None,
    index: dict[str, jax.Array],
) -> tuple[jax.Array, MoEMetrics, Routed | None]:
    """The layer under shard_map, traced anew for each group `made` for the axis.

    Jitted, since eager shard_map runs one operation at a time.
    """
    config, mesh, axis, groups = place.config, place.mesh, place.axis, place.axes
    explicit = jax.sharding.AxisType.Explicit in mesh.axis_types

    def flat(value: jax.Array, *width: int) -> jax.Array:
        if not explicit:
            return value.reshape(-1, *width)
        # Joining token axes of which an inner one is sharded has no default sharding.
        shape = (value.size // int(np.prod(width)), *width)
        return lax.reshape(value, shape, out_sharding=NamedSharding(mesh, P(groups)))

    per_token = {
        "mask": None if mask is None else flat(mask),
        "replay": None if replay is None else flat(replay, config.top_k),
    }
    inputs = (params, flat(x, x.shape[-1]), per_token, index)
    specs = ({name: P(axis) if name == "w" else P() for name in params}, P(groups), P(groups), P())
    if explicit:
        # Here shard_map does not move its inputs by itself.
        inputs = jax.reshard(inputs, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))

    def on_rank(
        params: Params, x: jax.Array, per_token: dict[str, Any], index: dict[str, Any]
    ) -> tuple[jax.Array, MoEMetrics, Routed | None]:
        y, metrics, routed = moe_layer(
            params, x, axis_name=axis, config=config, **per_token, **index, return_routing=True
        )
        return y, merge_over(metrics, place.data_axes), routed if return_routing else None

    # Metrics are equal on all ranks by construction, which the type system cannot see: check_vma must be off.
    mapped = jax.shard_map(on_rank, mesh=mesh, in_specs=specs, out_specs=(P(groups), P(), P(groups)), check_vma=False)
    y, metrics, routed = mapped(*inputs)

    def unflat(value: jax.Array) -> jax.Array:
        # The sharding of x fits: it has as many axes, and its last one is whole.
        shape = (*x.shape[:-1], value.shape[-1])
        return lax.reshape(value, shape, out_sharding=jax.typeof(x).sharding if explicit else None)

    return unflat(y), metrics, jax.tree.map(unflat, routed)


def _number(name: str, value: Any) -> jax.Array:
    scalar = isinstance(value, jax.Array | np.ndarray) and not value.shape and jnp.issubdtype(value.dtype, jnp.integer)
    if not scalar and not is_integer(value):
        raise ValueError(f"{name}={value!r} must be one integer")
    return jnp.asarray(value, jnp.int32)


def _per_token(name: str, value: jax.Array | None, shape: tuple[int, ...]) -> jax.Array | None:
    """`value` if it has the token axes of x: it is flattened with them, so any other order would be silently wrong."""
    if value is None or getattr(value, "shape", None) == shape:
        return value
    got = getattr(value, "shape", type(value).__name__)
    raise ValueError(f"{name} has shape {got}, but {shape} is needed: the token axes of x in the same order")
