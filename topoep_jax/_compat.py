"""The one place that knows what differs between the supported JAX versions (0.10.2 and 0.12)."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax._src import clusters, distributed
from jax.experimental import compute_on


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


def silence_triton() -> None:
    """Keeps JAX 0.12's notice that Pallas will stop using Triton from users, who cannot do anything about it."""
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)


def platform_dependent(*operands: jax.Array, default: Callable[..., Any], **branches: Callable[..., Any]) -> Any:
    """`lax.platform_dependent`, decided at once where the mesh around the call knows its devices.

    Left to JAX it is a conditional on an index that is constant once the platform is known. But differentiation moves
    the index out of a scan, and inside the loop XLA does not see that it is constant: it keeps the conditional, which
    the host has to decide at every turn.
    """
    platform = _platform_of_mesh()
    if platform is None:
        return jax.lax.platform_dependent(*operands, default=default, **branches)
    return branches.get(platform, default)(*operands)


def _platform_of_mesh() -> str | None:
    """The platform as JAX names it when it lowers; None where no mesh is around, or one without devices."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return None
    if device.platform == "gpu":
        return "cuda" if device.device_kind.startswith("NVIDIA") else None
    return device.platform


def on_stream(stream: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` on a stream of its own where the platform is a GPU: beside all that does not need its results."""
    # The new form has another name in jax 0.10.
    place: Any = getattr(compute_on, "compute_on2", None) or compute_on.compute_on
    return place(function, compute_type=f"gpu_stream:{stream}", out_memory_spaces=jax.memory.Space.Device)


def detect_processes(
    address: str | None, method: str | None, timeout_s: int
) -> tuple[str | None, int | None, int | None]:
    """What JAX's detection of launchers says: address of process 0 unless given, how many there are, which this is.

    `jax.distributed.initialize` uses it, too, but only while it starts, and then also chooses devices.
    """
    found = clusters.ClusterEnv.auto_detect_unset_distributed_params(address, None, None, [], method, timeout_s)
    return found[:3]


def exchange(key: str, text: str, timeout_s: int = 300) -> list[str]:
    """The texts that all processes give under a key that is used once, in order. Collective; needs no devices."""
    state: Any = distributed.global_state
    state.client.key_value_set(f"topoep_jax/{key}/{state.process_id}", text)
    names = (f"topoep_jax/{key}/{process}" for process in range(state.num_processes))
    return [state.client.blocking_key_value_get(name, 1000 * timeout_s) for name in names]


def meet(key: str, timeout_s: float) -> list[int]:
    """Waits until all processes are here, without their devices, under a key that is used once. Collective.

    Returns:
      The processes that did not come in time: none, if all did.
    """
    state: Any = distributed.global_state
    folder = f"topoep_jax/{key}/"
    state.client.key_value_set(f"{folder}{state.process_id}", "")
    try:
        state.client.wait_at_barrier(f"topoep_jax/{key}", math.ceil(1000 * timeout_s))
    except jax.errors.JaxRuntimeError:
        came = {int(name.rpartition("/")[2]) for name, _ in state.client.key_value_dir_get(folder)}
        missing = sorted(set(range(state.num_processes)) - came)
        if not missing:  # it was something else, such as a process that is lost
            raise
        return missing
    return []
