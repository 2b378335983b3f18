"""How XLA compiles the programs of the tests. Imports no JAX, which reads its flags once."""

import importlib.metadata


def xla_flags(num_devices: int) -> str:
    """The flags for emulated CPU devices, quick compiles and slow machines.

    Compiling is most of the time, and what is compiled runs for milliseconds: without optimization it takes a third.
    Programs for GPUs stay the same, to the byte. Devices are threads: on few and busy cores, the last of them may come
    to a collective long after XLA would give up waiting (40 s).
    """
    # Later ones have no other emitters, and end at a flag that they do not know (seen on jaxlib 0.11.2).
    old = importlib.metadata.version("jaxlib").startswith("0.10.")
    emitters = ["--xla_cpu_use_fusion_emitters=false"] if old else []
    devices = f"--xla_force_host_platform_device_count={num_devices}"
    patience = "--xla_cpu_collective_call_terminate_timeout_seconds=300"
    return " ".join(["--xla_backend_optimization_level=0", *emitters, devices, patience])
