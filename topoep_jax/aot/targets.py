"""GPUs as XLA's compiler sees them, so that programs for them compile where there is none."""

import dataclasses
from typing import Any

import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from topoep_jax.plan.hardware import Hardware


@dataclasses.dataclass(frozen=True)
class Target:
    """One kind of GPU.

    Attributes:
      kind: the device kind, which has to be the driver's name for it: Pallas looks its limits up by it.
      memory_bytes: of device memory.
      memory_bandwidth: bytes per second.
      hardware: link and compute rates that times are predicted from.
      note: what a reader of a report has to know about it.
    """

    kind: str
    memory_bytes: int
    memory_bandwidth: int
    hardware: Hardware
    note: str = ""

    def mesh(self, nodes: int, gpus: int, axis: str = "ep", *, slices: int = 1) -> Mesh:
        """`slices` times `nodes` nodes with `gpus` GPUs each, on one axis, node by node.

        Raises:
          ValueError: a count below 1.
          RuntimeError: JAX's CUDA plugin is missing.
        """
        if min(slices, nodes, gpus) < 1:
            raise ValueError(f"{slices} slices of {nodes} nodes of {gpus} GPUs: all must be at least 1")
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=self.config(), topology=f"{slices}x{nodes}x{gpus}"
        )
        devices: Any = topology.devices
        return Mesh(np.array(devices), (axis,))

    def config(self) -> str:
        """A GpuTargetConfigProto as text, cut down to what the compiler asks for; limits of compute capability 9.0."""
        return _CONFIG.format(kind=self.kind, memory=self.memory_bytes, bandwidth=self.memory_bandwidth)


_CONFIG = """
platform_name: "CUDA"
device_description_str: "{kind}"
dnn_version_info {{ major: 9 minor: 12 }}
gpu_device_info {{
  name: "{kind}"
  model_str: "sm_9.0a"
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability 9.0a"
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.12.0"
  core_count: 132
  clock_rate_ghz: 1.98
  fpus_per_core: 128
  device_memory_size: {memory}
  memory_bandwidth: {bandwidth}
  l2_cache_size: 52428800
  ecc_enabled: true
  device_address_bits: 64
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
}}
"""

_H100_BYTES = 80 * 2**30

TARGETS: dict[str, Target] = {
    "h100": Target("NVIDIA H100", _H100_BYTES, 3_350_000_000_000, Hardware.h100()),
    "h200": Target("NVIDIA H200", 141 * 2**30, 4_800_000_000_000, Hardware.h100()),
    # An H800 has the chip and memory of an H100, and slower NVLink, which no compiler sees. Pallas knows no such name.
    "h800": Target(
        "NVIDIA H100",
        _H100_BYTES,
        3_350_000_000_000,
        Hardware.h800(),
        "compiled for an H100, whose chip and memory it has; links at the rates of an H800",
    ),
}
"""By the name that the command line takes. The rates of an H200 are those of an H100: the same chip and links."""
