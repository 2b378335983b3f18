"""XLA's own device-initiated exchange of rows: the options that turn it on."""

from typing import NamedTuple

import jax

OLDEST_JAX = (0, 12)
"""Older versions have no such kernel: across nodes their ragged_all_to_all blocks the host."""

_OPTIONS: dict[str, bool | str] = {
    # One launch by LSA and GIN instead of sends and receives that the host posts.
    "xla_gpu_experimental_ragged_all_to_all_use_device_kernel": True,
    # Without buffers in NCCL's symmetric memory that kernel is silently left out.
    "xla_gpu_experimental_enable_nccl_symmetric_buffers": True,
    # The kernel that works inside one node only would win there, and hide that the other is missing.
    "xla_gpu_unsupported_use_ragged_all_to_all_one_shot_kernel": False,
}


class XlaOptions(NamedTuple):
    """The same choice in two forms: use one of them."""

    compiler_options: dict[str, bool | str]
    """For `jax.jit(f, compiler_options=...)` or `lowered.compile(...)`: for one program. All of its collectives use
    symmetric buffers, for XLA takes the finer choice only from its flags."""
    flags: str
    """For the environment variable XLA_FLAGS, before JAX starts: for all programs. Only ragged_all_to_all uses
    symmetric buffers."""


def xla_options() -> XlaOptions:
    """Options by which token dispatch and combine (transport "xla") use XLA's device-initiated ragged_all_to_all.

    They need jax 0.12 or newer, and NCCL 2.29 or newer with symmetric memory; between nodes also GIN. XLA calls the
    kernel experimental.

        step = jax.jit(step, compiler_options=transport.xla_options().compiler_options)

    Raises:
      RuntimeError: this JAX is too old.
    """
    if jax.__version_info__[:2] < OLDEST_JAX:
        raise RuntimeError(
            f"jax {jax.__version__} has no device-initiated ragged_all_to_all: it needs"
            f" {'.'.join(map(str, OLDEST_JAX))} or newer (Python 3.12)"
        )
    flags = dict(_OPTIONS)
    del flags["xla_gpu_experimental_enable_nccl_symmetric_buffers"]
    flags["xla_enable_nccl_symmetric_buffers_for_collectives"] = "raggedalltoall"
    return XlaOptions(dict(_OPTIONS), " ".join(f"--{name}={str(value).lower()}" for name, value in flags.items()))
