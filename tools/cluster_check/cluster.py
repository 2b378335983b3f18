"""Which processes a check is made by, and how they find each other."""

import dataclasses
import json

import jax
import numpy as np
from jax.sharding import Mesh

from tools.gpu_check.runner import Setting
from topoep_jax import launch

FILE = "cluster.json"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """One process for each node with all its GPUs, or one for each GPU.

    Attributes:
      nodes: processes.
      node: which of them this is.
      coordinator: "host:port" of process 0; "" for one process.
      shared: folder that every node sees.
    """

    nodes: int
    node: int
    coordinator: str
    shared: str

    def save(self, setting: Setting) -> None:
        """Saves it for the processes of the checks."""
        (setting.folder / FILE).write_text(json.dumps(dataclasses.asdict(self)))


def load(setting: Setting) -> Cluster:
    """What `save` wrote."""
    return Cluster(**json.loads((setting.folder / FILE).read_text()))


def connect(setting: Setting) -> Mesh:
    """Joins the other nodes; all devices along axis "ep", node by node."""
    cluster = load(setting)
    job = launch.Job(cluster.nodes, cluster.node, cluster.coordinator)
    launch.connect(job)
    machines = launch.check_devices(job)
    assert len(set(machines.values())) == 1, f"the check needs as many GPUs on each machine, and there are {machines}"
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    assert len(devices) >= 2, f"transfers need two devices, and there is {devices}"
    assert setting.dry_run or devices[0].platform == "gpu", f"JAX does not use GPUs: {devices}"
    return Mesh(np.array(devices), ("ep",))
