"""How XLA's compiler is told to run the layer's collectives: under GEMMs, one at a time, started by the device."""

from typing import NamedTuple

import jax

_OPTIONS: dict[str, bool | int] = {
    # Without it collectives start where they are written and end at once. It is not effective by default.
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # The layer puts each collective under one GEMM; more of them in flight share the links and gain nothing.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 1,
}

_SAFE: dict[str, bool | int] = {
    # Collectives start where they are written and end at once, one after the other.
    "xla_gpu_enable_latency_hiding_scheduler": False,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 1,
    # Exchanges fall back to sends and receives, which the host posts between nodes.
    "xla_gpu_experimental_ragged_all_to_all_use_device_kernel": False,
    "xla_gpu_experimental_enable_nccl_symmetric_buffers": False,
    "xla_gpu_unsupported_use_ragged_all_to_all_one_shot_kernel": False,
}

OLDEST_JAX = (0, 12)
"""Older versions have no device-initiated ragged_all_to_all."""
_DEVICE_KERNEL: dict[str, bool | int] = {
    # One launch by LSA and GIN instead of sends and receives that the host posts.
    "xla_gpu_experimental_ragged_all_to_all_use_device_kernel": True,
    # Without buffers in NCCL's symmetric memory that kernel is silently left out.
    "xla_gpu_experimental_enable_nccl_symmetric_buffers": True,
    # The kernel that works inside one node only would win there, and hide that the other is missing.
    "xla_gpu_unsupported_use_ragged_all_to_all_one_shot_kernel": False,
}


class XlaOptions(NamedTuple):
    """The same choice in two forms: use one of them."""

    compiler_options: dict[str, bool | int]
    """For `jax.jit(f, compiler_options=...)` or `lowered.compile(...)`: for one program. All of its collectives use
    symmetric buffers, for XLA takes the finer choice only from its flags."""
    flags: str
    """For the environment variable XLA_FLAGS, before JAX starts: for all programs. Only ragged_all_to_all uses
    symmetric buffers."""
    missing: tuple[str, ...]
    """What this JAX cannot do, a sentence each; empty on jax 0.12 or newer."""


def xla_options(*, safe: bool = False) -> XlaOptions:
    """Options for GPU programs that hold the layer: overlap by the latency-hiding scheduler, and the device's exchange.

    The exchange of rows (transport "xla") is then XLA's device-initiated ragged_all_to_all, where jax is 0.12 or newer.
    It needs NCCL 2.29 or newer with symmetric memory; between nodes also GIN. XLA calls it experimental.

        step = jax.jit(step, compiler_options=transport.xla_options().compiler_options)

    Args:
      safe: leave out what users report faults of (docs/device.md): no latency hiding, one collective at a time, and no
        symmetric buffers or kernels of the device for the exchange. Slow; for when `check_exchange` finds a fault, or
        to find out whether a fault comes from there.
    """
    options = dict(_SAFE if safe else _OPTIONS)
    missing: tuple[str, ...] = ()
    if safe:
        if jax.__version_info__[:2] < OLDEST_JAX:  # which do not know the kernel, nor its options
            options = {name: value for name, value in options.items() if name in _OPTIONS}
    elif jax.__version_info__[:2] >= OLDEST_JAX:
        options |= _DEVICE_KERNEL
    else:
        missing = (
            f"jax {jax.__version__} has no device-initiated ragged_all_to_all: each call blocks the host between nodes"
            f" (jax {'.'.join(map(str, OLDEST_JAX))} or newer has it, on Python 3.12)",
        )
    flags: dict[str, bool | int | str] = dict(options)
    if flags.pop("xla_gpu_experimental_enable_nccl_symmetric_buffers", False):
        flags["xla_enable_nccl_symmetric_buffers_for_collectives"] = "raggedalltoall"
    return XlaOptions(options, " ".join(f"--{name}={str(value).lower()}" for name, value in flags.items()), missing)
