"""Records routing, microbatch by microbatch, without ever holding more than one of them."""

import math
import operator
import os
import pathlib
import zipfile
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from topoep_jax.config import LayerConfig
from topoep_jax.routing import Routed
from topoep_jax.topology import Topology
from topoep_jax.traces import container
from topoep_jax.traces.info import TraceInfo
from topoep_jax.traces.layout import HEAD, encode, microbatch_of, name_of, read_head


class PlacedLayer(Protocol):
    """What a `topoep_jax.MoE` says of itself."""

    @property
    def config(self) -> LayerConfig:
        """The layer without its mesh."""

    @property
    def mesh(self) -> Mesh:
        """The device mesh."""

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Its axes that split tokens among groups of ranks."""


class TraceWriter:
    """Writes a trace file; close it, or use it in a `with`, so that the file ends as NumPy expects it.

    Each `append` hands whole microbatches to the operating system: of a process that dies, the file holds all that were
    appended, and `open_trace` reads them.

    Args:
      path: the new file, ending in .npz. A file that is there is never overwritten.
      num_experts: E.
      num_ranks: R, the expert-parallel ranks among which tokens are divided, in order.
      num_groups: groups of R ranks that plan on their own (the product of a layer's data axes); each gets microbatches
        of its own.
      layers: number of each recorded layer in its model; 0, 1, .. where None.
      topology: domain of each rank. model: name of the model. hidden, ffn: widths of a token and of an expert. What
        is given here, `topoep plan` need not be told.
      resume_after: go on with a file that is there after the microbatches of this step, and drop those of later steps;
        without such a file, begin one.

    Raises:
      ValueError: a value out of range, or a file to go on with that was recorded of something else.
      OSError: the file is there (FileExistsError) or cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        num_experts: int,
        num_ranks: int,
        num_groups: int = 1,
        layers: Sequence[int] | None = None,
        topology: Topology | None = None,
        model: str | None = None,
        hidden: int | None = None,
        ffn: int | None = None,
        resume_after: int | None = None,
    ) -> None:
        self.path = pathlib.Path(path)
        self._fields: dict[str, Any] = {
            "num_experts": num_experts,
            "num_ranks": num_ranks,
            "topology": topology,
            "model": model,
            "hidden": hidden,
            "ffn": ffn,
            "num_groups": num_groups,
        }
        self._infos: list[zipfile.ZipInfo] = []
        self._head: TraceInfo | None = None
        self._last = (-1, 0)
        self._end = 0
        checked = TraceInfo(layers=(0,) if layers is None else tuple(layers), **self._fields)
        if self.path.suffix != ".npz":
            raise ValueError(f"{self.path} must end in .npz")
        self._num_groups = num_groups
        self._layers = None if layers is None else checked.layers
        if resume_after is not None and self.path.exists():
            self._file: IO[bytes] = self.path.open("r+b")
            self._resume(resume_after)
        else:
            self._file = self.path.open("xb")

    @classmethod
    def for_layer(
        cls,
        path: str | os.PathLike[str],
        layer: PlacedLayer,
        *,
        layers: Sequence[int] | None = None,
        model: str | None = None,
        resume_after: int | None = None,
    ) -> "TraceWriter":
        """A writer for layers like this `topoep_jax.MoE`, which knows sizes, domains and groups."""
        config = layer.config
        return cls(
            path,
            num_experts=config.num_experts,
            num_ranks=config.num_ranks,
            num_groups=math.prod(layer.mesh.shape[axis] for axis in layer.data_axes),
            layers=layers,
            topology=config.topology,
            model=model,
            hidden=config.hidden,
            ffn=config.ffn,
            resume_after=resume_after,
        )

    def append(self, routing: Any, *, step: int | None = None) -> None:
        """Records a microbatch, or one of each group.

        Args:
          routing: integers [layers, ..., K], below 0 for padding: [layers, R, T, K], or [layers, batch, length, K] as
            a model returns it. The axes between are tokens, of which every rank has an equal part, in order. Also a
            `Routed` of such arrays, or a list with one `Routed` or array [..., K] for each layer.
          step: of training; by default the one after the last. Several microbatches may have one step.

        Raises:
          ValueError: the writer is closed; shapes, experts or steps that do not fit; an array of which other processes
            hold a part: return it replicated from your compiled step, or use `multihost_utils.process_allgather`, and
            append in one process.
          TypeError: a step that is no integer.
          OSError: the disk is full, or the like; what was appended before is unharmed.
        """
        if self._file.closed:
            raise ValueError(f"the writer of {self.path} is closed: append before close(), inside its `with`")
        expert_idx = _as_numpy(routing)
        num_layers, top_k = expert_idx.shape[0], expert_idx.shape[-1]
        head = self._head or TraceInfo(layers=self._layers or tuple(range(num_layers)), **self._fields)
        if num_layers != len(head.layers):
            raise ValueError(f"expert_idx of shape {expert_idx.shape} has {num_layers} layers, not {len(head.layers)}")
        ranks = self._num_groups * head.num_ranks
        num_tokens = expert_idx.size // (num_layers * top_k)
        if num_tokens % ranks:
            raise ValueError(f"expert_idx of shape {expert_idx.shape} has {num_tokens} tokens for {ranks} ranks")
        if expert_idx.max() >= head.num_experts:
            raise ValueError(f"expert_idx names expert {expert_idx.max()}, but there are {head.num_experts}")
        step = self._last[0] + 1 if step is None else operator.index(step)
        if step < max(self._last[0], 0):
            raise ValueError(f"step={step} must be at least {max(self._last[0], 0)}: steps are recorded in order")
        part = self._last[1] + 1 if step == self._last[0] else 0
        shape = num_layers, self._num_groups, head.num_ranks, num_tokens // ranks, top_k
        groups = encode(expert_idx, head.num_experts).reshape(shape)
        if self._head is None:
            self._write(HEAD, np.array(head.to_json()))
            self._head = head
        for group in range(self._num_groups):
            self._write(name_of(step, part + group), groups[:, group])
            self._last = step, part + group

    def close(self) -> None:
        """Ends the file. One to which nothing was appended is removed."""
        if self._file.closed:
            return
        if not self._infos:
            self._file.close()
            self.path.unlink()
            return
        with self._file:
            # What a write that failed left behind goes.
            self._file.seek(self._end)
            self._file.truncate()
            container.finish(self._file, self._infos)

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, name: str, array: np.ndarray) -> None:
        self._file.seek(self._end)
        info = container.write(self._file, name, array)
        self._end = self._file.tell()
        self._infos.append(info)

    def _resume(self, after: int) -> None:
        """Cuts the file behind the microbatches to keep."""
        try:
            infos = container.walk(self._file)
            if not infos:
                return  # Its writer died before the first microbatch was whole.
            head = read_head(self._file, infos)
            wanted = {**self._fields, "layers": self._layers or head.layers}
            if head.num_groups is None:
                del wanted["num_groups"]  # The first files of version 1 do not tell.
            differing = [name for name, value in wanted.items() if getattr(head, name) != value]
            if differing:
                name = differing[0]
                raise ValueError(f"it was recorded with {name}={getattr(head, name)}, but this is {wanted[name]}")
            kept = [info for info in infos[1:] if microbatch_of(info.filename)[0] <= after]
        except ValueError as error:
            self._file.close()
            raise ValueError(f"{self.path} cannot be continued: {error}; move it away to begin anew") from error
        self._infos = [infos[0], *kept]
        self._head = head
        self._last = microbatch_of(kept[-1].filename) if kept else self._last
        self._end = container.end_of(self._file, self._infos[-1])
        self._file.seek(self._end)
        self._file.truncate()


def _as_numpy(routing: Any) -> np.ndarray:
    """Integers [layers, ..., K] of what a model returned."""
    layers = routing if isinstance(routing, list | tuple) and not isinstance(routing, Routed) else None
    if layers is None:
        expert_idx = _local(routing)
    else:
        arrays = [_local(layer) for layer in layers]
        shapes = {array.shape for array in arrays}
        if len(shapes) != 1:
            raise ValueError(f"the layers have shapes {sorted(shapes)}: give at least one, all of the same tokens")
        expert_idx = np.stack(arrays)
    if expert_idx.ndim < 3 or 0 in expert_idx.shape:
        raise ValueError(f"expert_idx has shape {expert_idx.shape}, expected [layers, ..., K], no axis 0")
    if not np.issubdtype(expert_idx.dtype, np.integer):
        raise ValueError(f"expert_idx has dtype {expert_idx.dtype}, but experts are integers")
    return expert_idx


def _local(routing: Any) -> np.ndarray:
    array = routing.expert_idx if isinstance(routing, Routed) else routing
    if isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated):
        raise ValueError(
            "this process holds only a part of expert_idx: return it replicated from the compiled step, or call"
            " jax.experimental.multihost_utils.process_allgather(expert_idx, tiled=True) in all processes; then append"
            " in one of them"
        )
    return np.asarray(array)
