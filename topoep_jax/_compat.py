"""The one place that knows what differs between the supported JAX versions (0.10.2 and 0.12)."""

from typing import Any

import jax


def vary_like(y: Any, x: jax.Array) -> Any:
    """Gives every array of the pytree `y` the varying axes of `x`; the values are unchanged.

    Custom calls and callbacks lose the varying type inside `shard_map(check_vma=True)`, which would then accept
    a result that differs per device as replicated. Outside `shard_map` this does nothing.
    """
    wanted = jax.typeof(x).manual_axis_type.varying

    def cast(leaf: jax.Array) -> jax.Array:
        missing = tuple(sorted(wanted - jax.typeof(leaf).manual_axis_type.varying))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, y)


def result_like(x: jax.Array, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """What a Pallas kernel returns for an `x` of its operands: the same dtype and varying axes, and this shape."""
    return jax.ShapeDtypeStruct(shape, x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type)
