"""The devices of a run: their mesh, the domains the planner sees, and the transport's group."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from topoep_jax import Topology, transport
from train.config import TrainConfig, how_to_emulate

AXIS = "ep"
DATA_AXIS = "data"


def make_mesh(config: TrainConfig) -> Mesh:
    """A mesh of this machine's devices: axis "ep", behind axis "data" where `config.dp` > 1.

    Raises:
      ValueError: too few devices, or devices without work in a run of several processes.
    """
    devices, wanted = jax.devices(), config.num_devices
    if len(devices) < wanted:
        raise ValueError(
            f"{config.sizes} needs {wanted} devices, but JAX sees {len(devices)} ({devices[0].platform}):"
            f" {how_to_emulate(config)}"
        )
    if len(devices) > wanted and config.num_processes > 1:
        raise ValueError(
            f"{config.sizes} leaves devices unused: {config.num_processes} processes have {len(devices)} together;"
            f" pass sizes whose product is {len(devices)}"
        )
    return arrange(np.asarray(devices[:wanted]), config)


def arrange(devices: np.ndarray, config: TrainConfig) -> Mesh:
    """A mesh of dp x ep given devices; one of several expert-parallel groups lies along "data"."""
    if config.dp == 1:
        return Mesh(devices.reshape(config.ep), (AXIS,))
    return Mesh(devices.reshape(config.dp, config.ep), (DATA_AXIS, AXIS))


def over_ranks(mesh: Mesh, lead: int = 0) -> NamedSharding:
    """Sequences divided among all ranks, on the axis behind `lead` others."""
    return NamedSharding(mesh, PartitionSpec(*(None for _ in range(lead)), mesh.axis_names))


def is_cpu(mesh: Mesh) -> bool:
    """Whether the mesh is of CPUs: emulated, unless there are several processes."""
    return bool(mesh.devices.flat[0].platform == "cpu")


def make_topology(config: TrainConfig, mesh: Mesh) -> Topology:
    """The domains the planner sees: those asked for, else two halves of an emulated mesh, else the mesh's own."""
    emulated = config.num_processes == 1 and is_cpu(mesh)
    domains = config.domains or (2 if emulated and config.ep % 2 == 0 else 0)
    return Topology.uniform(domains, config.ep // domains) if domains else Topology.from_mesh(mesh, AXIS)


def connect(config: TrainConfig, mesh: Mesh, *, compile_only: bool) -> None:
    """Makes the transport's group for the run, in place of one that an earlier run of this process made."""
    transport.shutdown(AXIS)
    if config.transport == "xla" or not num_slots(config):
        return
    shapes = config.shapes()
    dtype = jnp.dtype(config.dtype)
    layer = transport.LayerSizes(
        num_mains=shapes.num_experts // config.ep,
        num_slots=config.num_slots,
        expert_bytes=3 * shapes.hidden * shapes.ffn * dtype.itemsize,
        pulls=config.pulls,
    )
    transport.init(
        mesh,
        AXIS,
        sizes=layer,
        topology=make_topology(config, mesh),
        dtype=dtype,
        staging_bytes=config.staging_bytes,
        timeout_s=config.peer_timeout_s,
        compile_only=compile_only,
    )


def num_slots(config: TrainConfig) -> int:
    """Replica slots of a rank; one alone has no one to replicate."""
    return config.num_slots if config.ep > 1 else 0
