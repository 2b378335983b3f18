"""The parameters of a model as a checkpoint sees them: blocks, each made of one or a few tensors of the files."""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

import models
from models.weights import Weight

Index = tuple[int, ...]
"""Of a block: (), (layer,) or (layer, expert), counted within the parameter."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of the whole model. Its block is what one layer, or one expert, has of it."""

    weight: Weight
    shape: tuple[int, ...]
    """With the stacked axes in front."""
    first_layer: int
    """Number in the checkpoint of the first layer stacked in it."""

    @property
    def path(self) -> str:
        return self.weight.path

    @property
    def stacked(self) -> int:
        """How many leading axes tell blocks apart: layers, and experts."""
        return ("{layer}" in self.weight.names[0]) + ("{expert}" in self.weight.names[0])

    @property
    def block_shape(self) -> tuple[int, ...]:
        return self.shape[self.stacked :]

    def blocks(self) -> list[Index]:
        """The index of every block, layer by layer."""
        return list(itertools.product(*map(range, self.shape[: self.stacked])))

    def names(self, index: Index) -> list[str]:
        """The tensors of one block, in the order of the layout's views."""
        numbers: dict[str, int] = {}
        if index:
            numbers = {"layer": self.first_layer + index[0], "expert": index[-1]}
        return [name.format(**numbers) for name in self.weight.names]

    def tensor_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the tensors of a block, in the same order."""
        strides = (0,) * len(self.block_shape)  # An array that takes no memory.
        block = np.lib.stride_tricks.as_strided(np.zeros((), np.int8), self.block_shape, strides)
        return [view.shape for view in self.weight.layout(block)]


@functools.lru_cache
def parameters(config: Any) -> tuple[Parameter, ...]:
    """The parameters of the model of `config`, in the order of its table.

    Raises:
      ValueError: `config` is of no model that is known, or its table and its model differ.
    """
    shapes = {path: leaf.shape for path, leaf in flat(abstract(config)).items()}
    table = _module(config).weights(config)
    paths = [weight.path for weight in table]
    if sorted(paths) != sorted(shapes):
        odd = set(paths) ^ set(shapes)
        raise ValueError(f"the table of {type(config).__name__} and its model differ in {', '.join(sorted(odd))}")
    dense = config.num_layers - config.num_moe_layers
    return tuple(
        Parameter(weight, shapes[weight.path], dense if weight.path.startswith("layers/") else 0) for weight in table
    )


def ignored(config: Any) -> tuple[str, ...]:
    """Regular expressions of the names of tensors that may be there and are not read."""
    # Tied embeddings are often stored twice; as in transformers, the table is what counts.
    tied = (r"lm_head\.weight",) if config.tied_embeddings else ()
    return (*_module(config).ignored(config), *tied)


def abstract(config: Any, *, dtype: DTypeLike = jnp.float32, stage: tuple[int, int] | None = None) -> Any:
    """Shapes and dtypes of the parameters of a model, allocating nothing.

    Args:
      config: of the model.
      dtype: `param_dtype` of the model, which keeps routers in f32.
      stage: first and last layer of a stage; None: the whole model.

    Returns:
      Nested dict of `jax.ShapeDtypeStruct`.

    Raises:
      ValueError: `config` is of no model, or the model refuses the stage.
    """
    return jax.tree.map(lambda leaf: leaf, _abstract(config, jnp.dtype(dtype), stage))  # Not the cache's own dicts.


@functools.lru_cache
def _abstract(config: Any, dtype: np.dtype, stage: tuple[int, int] | None) -> Any:
    model: Any = next((model for kind, model in models.MODEL_TYPES.values() if type(config) is kind), None)
    if model is None:
        known = ", ".join(kind.__name__ for kind, _ in models.MODEL_TYPES.values())
        raise ValueError(f"{type(config).__name__} is the config of no model: take one of {known}")
    mesh = Mesh(np.asarray(jax.local_devices()[:1]), ("ep",))

    def make() -> Any:
        options = {"planner": "none", "num_slots": 0}
        return model(config, mesh=mesh, moe_options=options, param_dtype=dtype, stage=stage, rngs=nnx.Rngs(0))

    return nnx.to_pure_dict(nnx.state(nnx.eval_shape(make)))


def flat(tree: Any) -> dict[str, Any]:
    """The leaves of a nested dict under their paths, as in "layers/moe/w"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def nested(leaves: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `flat`."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *groups, name = path.split("/")
        branch = tree
        for group in groups:
            branch = branch.setdefault(group, {})
        branch[name] = leaf
    return tree


def tensors(table: Sequence[Parameter]) -> Iterator[tuple[str, Parameter, Index, tuple[int, ...]]]:
    """Every tensor of a released folder: name, its place and its shape. Those of no layer come first, then by layer."""
    entries = []
    for number, parameter in enumerate(table):
        shapes = parameter.tensor_shapes()
        for index in parameter.blocks():
            layer = parameter.first_layer + index[0] if index else -1
            for part, name in enumerate(parameter.names(index)):
                entries.append(((layer, number, index, part), name, parameter, index, shapes[part]))
    for _, name, parameter, index, shape in sorted(entries, key=lambda entry: entry[0]):
        yield name, parameter, index, shape


def _module(config: Any) -> Any:
    # A model's file ends with its table: it is the one that defines the config.
    return sys.modules[type(config).__module__]
