"""Logical names for the axes of every parameter, and the one rule by which they become mesh axes."""

import itertools
import math
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_map_with_path

AXES: dict[tuple[str, str], tuple[str | None, ...]] = {
    ("embedding", "table"): ("vocab", "hidden"),
    ("head", "kernel"): ("hidden", "vocab"),
    # Attention.
    ("query", "kernel"): ("hidden", "heads"),
    ("key", "kernel"): ("hidden", "heads"),
    ("value", "kernel"): ("hidden", "heads"),
    ("query", "bias"): ("heads",),
    ("key", "bias"): ("heads",),
    ("value", "bias"): ("heads",),
    ("out", "kernel"): ("heads", "hidden"),
    ("query_down", "kernel"): ("hidden", "latent"),
    ("query_up", "kernel"): ("latent", "heads"),
    ("kv_down", "kernel"): ("hidden", "latent"),
    ("kv_up", "kernel"): ("latent", "heads"),
    # Dense block.
    ("gate", "kernel"): ("hidden", "ffn"),
    ("up", "kernel"): ("hidden", "ffn"),
    ("down", "kernel"): ("ffn", "hidden"),
    # MoE block: `w` holds gate, up and down of an expert in one row.
    ("moe", "w"): ("expert", None),
    ("moe", "router"): ("hidden", None),
    ("moe", "correction_bias"): (None,),
    ("moe", "shared_gate_up"): ("hidden", "ffn"),
    ("moe", "shared_down"): ("ffn", "hidden"),
}
"""Names of the axes of a parameter by the last two parts of its path. Norm scales, `scale`, have no named axis; stacked
layers have "layer" in front."""

_FSDP_AXES = ("hidden", "latent")


def logical_axes(path: tuple[Any, ...], ndim: int) -> tuple[str | None, ...]:
    """The axis names of the parameter at `path`, a path of `jax.tree_util`.

    Raises:
      ValueError: a parameter that `AXES` does not know.
    """
    names = [getattr(entry, "key", getattr(entry, "name", None)) for entry in path]
    axes = next((AXES[pair] for pair in itertools.pairwise(names) if pair in AXES), None)
    if axes is None and "scale" in names:
        axes = (None,)
    if axes is None or ndim - len(axes) not in (0, 1):
        raise ValueError(
            f"no axis names for the parameter {keystr(path)} of {ndim} axes: add it to models.sharding.AXES"
        )
    return ("layer",) * (ndim - len(axes)) + axes


def state_shardings(state: Any, mesh: Mesh, *, axis: str = "ep", fsdp: tuple[str, ...] = ()) -> Any:
    """Where every parameter lives: expert weights split by expert over `axis`, all else on every device or by `fsdp`.

    Args:
      state: parameters, or shapes of them, as nested dicts or an nnx state with the names of a
        `models.decoder.Decoder`, or a subtree from the name of a module on.
      mesh: the training mesh.
      axis: the expert-parallel axis.
      fsdp: mesh axes over which everything but experts is split along its "hidden" or "latent" axis where they divide
        it, as in ("data", "ep"); each layer gathers its own before use.

    Returns:
      The same tree with a NamedSharding for each array. Arrays keep their logical global shape: nothing depends on
      the number of ranks, so a checkpoint restores on any.

    Raises:
      ValueError: an unknown parameter.
    """
    ways = math.prod(mesh.shape[name] for name in fsdp)

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        spec: list[Any] = []
        for name, size in zip(logical_axes(path, leaf.ndim), leaf.shape, strict=True):
            if name == "expert":
                spec.append(axis)
            elif name in _FSDP_AXES and fsdp and size % ways == 0 and fsdp not in spec:
                spec.append(fsdp)
            else:
                spec.append(None)
        while spec and spec[-1] is None:
            spec.pop()
        return NamedSharding(mesh, PartitionSpec(*spec))

    return tree_map_with_path(place, state)
