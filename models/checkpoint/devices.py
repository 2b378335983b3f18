"""Parameters on devices: filled from a source block by block, and read back block by block for an export.

A process reads the blocks that its own devices hold a part of: of experts, those of its ranks, of a pipeline, its own
layers. Each goes to the devices at once, so that the host holds a block and its copy, whatever the model.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from models.checkpoint.cast import Cast
from models.checkpoint.faults import raise_faults
from models.checkpoint.parameters import Index, Parameter, flat, parameters
from models.checkpoint.source import Source

_Region = tuple[tuple[int, int], ...]


def place(
    source: Source, parameter: Parameter, leaf: jax.ShapeDtypeStruct, sharding: Sharding, first: int
) -> jax.Array:
    """One parameter as a global array, on the devices of this process.

    Args:
      source: where it is read.
      parameter: which.
      leaf: shape and dtype wanted; fewer layers than the parameter has are those of a stage.
      sharding: where it is to live.
      first: the first layer of them, counted within the parameter.
    """
    places = sharding.addressable_devices_indices_map(leaf.shape)
    regions = {device: _region(index, leaf.shape) for device, index in places.items()}
    stacked = parameter.stacked
    offset = (first, 0)[:stacked]
    # Each part of the parameter goes to one device, and from there to others that hold the same.
    first_with: dict[_Region, Any] = {}
    for device, region in regions.items():
        first_with.setdefault(region, device)
    wanted = {
        index for index in parameter.blocks() if any(_holds(region, _minus(index, offset)) for region in first_with)
    }
    bits = np.dtype(f"uint{8 * leaf.dtype.itemsize}")
    parts: dict[_Region, jax.Array] = {}
    for index, block in source.blocks(parameter, wanted, leaf.dtype):
        local = _minus(index, offset)
        for region, device in first_with.items():
            if _holds(region, local):
                piece = block[tuple(slice(*extent) for extent in region[stacked:])].view(bits)
                at = tuple(i - begin for i, (begin, _) in zip(local, region, strict=False))
                parts[region] = _put(parts.get(region), piece, at, region, device)
        # Otherwise blocks would queue up on the host faster than devices take them.
        jax.block_until_ready(list(parts.values()))
    parts = {region: _from_bits(part, leaf.dtype) for region, part in parts.items()}
    copies = [
        parts[region] if first_with[region] == device else jax.device_put(parts[region], device)
        for device, region in regions.items()
    ]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, copies, dtype=leaf.dtype)


def _put(part: jax.Array | None, piece: np.ndarray, at: Index, region: _Region, device: Any) -> jax.Array:
    """Writes a block's piece, as bits, into a device's part of the parameter, which the first piece makes."""
    shape = tuple(end - begin for begin, end in region)
    new = jax.device_put(piece.reshape((1,) * len(at) + piece.shape), device, may_alias=False)
    if new.shape == shape:
        return new
    if part is None:
        part = jnp.zeros(shape, new.dtype, device=device)
    return _update(part, new, np.asarray(at, np.int32))


# On CPU, XLA updates bfloat16 by turning the whole array into f32 and back; bits it updates in place.
@functools.partial(jax.jit, donate_argnums=0)
def _update(part: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
    starts = [at[axis] if axis < at.size else jnp.zeros((), jnp.int32) for axis in range(part.ndim)]
    return lax.dynamic_update_slice(part, new, starts)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=1)
def _from_bits(part: jax.Array, dtype: Any) -> jax.Array:
    return lax.bitcast_convert_type(part, dtype)


@functools.partial(jax.jit, static_argnums=2)
def _cut(part: jax.Array, at: jax.Array, stacked: int) -> jax.Array:
    starts = [at[axis] if axis < stacked else jnp.zeros((), jnp.int32) for axis in range(part.ndim)]
    return lax.dynamic_slice(part, starts, (1,) * stacked + part.shape[stacked:]).reshape(part.shape[stacked:])


def _region(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> _Region:
    assert index is not None  # Only devices that hold nothing have none.
    return tuple(extent.indices(size)[:2] for extent, size in zip(index, shape, strict=True))


def _holds(region: _Region, index: Index) -> bool:
    return all(begin <= i < end for i, (begin, end) in zip(index, region, strict=False))


def _minus(index: Index, offset: Index) -> Index:
    return tuple(i - o for i, o in zip(index, offset, strict=True))


class OnDevices:
    """Parameters of a program as a `Source`; in a run of several processes all of them read all blocks, in step.

    Args:
      config: of the model.
      params: nested dict of `jax.Array`, the whole model.

    Raises:
      CheckpointError: the parameters are not those of the model.
    """

    def __init__(self, config: Any, params: Any) -> None:
        self.config, self.parameters, self._params = config, parameters(config), flat(params)
        self.extra: dict[str, Any] = {}
        self.cast = Cast()
        wanted = {parameter.path: parameter.shape for parameter in self.parameters}
        given = {path: tuple(leaf.shape) for path, leaf in self._params.items()}
        faults = [f"missing parameter: {path} {list(shape)}" for path, shape in wanted.items() if path not in given]
        faults += [f"unknown parameter: {path} {list(shape)}" for path, shape in given.items() if path not in wanted]
        faults += [
            f"wrong shape: {path} is {list(given[path])}, the model has {list(shape)}"
            for path, shape in wanted.items()
            if given.get(path, shape) != shape
        ]
        raise_faults("parameters to save", faults)

    def dtype(self, parameter: Parameter) -> np.dtype:
        """The dtype of the array."""
        return np.dtype(self._params[parameter.path].dtype)

    def blocks(
        self, parameter: Parameter, wanted: Iterable[Index] | None = None, dtype: Any = None
    ) -> Iterator[tuple[Index, np.ndarray]]:
        """See `Source`. A block that lies on several processes is summed up by all of them, as bits."""
        leaf = self._params[parameter.path]
        shards = [(_region(shard.index, leaf.shape), shard) for shard in leaf.addressable_shards]
        # The same on every process: all take part in the sum, or none does.
        on_first = any(device.process_index == 0 for device in leaf.sharding.device_set)
        own = jax.process_count() == 1 or (leaf.is_fully_replicated and on_first)
        for index in parameter.blocks() if wanted is None else sorted(wanted):
            block = np.zeros(parameter.block_shape, leaf.dtype)
            done: set[_Region] = set()
            for region, shard in shards:
                if not _holds(region, index) or region in done or not (own or shard.replica_id == 0):
                    continue
                done.add(region)
                at = np.asarray([i - begin for i, (begin, _) in zip(index, region, strict=False)], np.int32)
                target = tuple(slice(*extent) for extent in region[parameter.stacked :])
                block[target] = np.asarray(_cut(shard.data, at, parameter.stacked))
            block = block if own else _union(block)
            yield index, block if dtype is None else self.cast(parameter.path, block, dtype)


def _union(block: np.ndarray) -> np.ndarray:
    """The block that the processes hold disjoint parts of, zero elsewhere.

    The sum is one of bytes, so that no bit changes: a float sum turns -0 into 0.
    """
    count = jax.process_count()
    firsts = [next(d for d in jax.devices() if d.process_index == process) for process in range(count)]
    mesh = Mesh(np.asarray(firsts), ("process",))
    mine = jax.device_put(block.reshape(-1).view(np.uint8)[None], firsts[jax.process_index()])
    shape = (count, block.nbytes)
    sharded = jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, PartitionSpec("process")), [mine])
    return np.asarray(_add_bytes(mesh)(sharded)).view(block.dtype).reshape(block.shape)


@functools.cache
def _add_bytes(mesh: Mesh) -> Any:
    return jax.jit(lambda rows: rows.sum(axis=0, dtype=jnp.uint8), out_shardings=NamedSharding(mesh, PartitionSpec()))
