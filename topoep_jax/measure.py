"""Measures the links and the matrix units of the devices at hand: what `topoep measure` writes for the cost model.

`Hardware.from_measurement` reads the file. In a program of several processes each of them calls `measure`.
"""

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from topoep_jax._integers import is_integer
from topoep_jax.plan.hardware import MEASUREMENT_VERSION, NOMINAL_SPEED
from topoep_jax.topology import Topology

GROUPS = 4
"""Matrix products of one grouped GEMM, as of four experts."""
CHAIN = 8
"""Messages or products in one timed program, so that the time to start it hardly counts."""
EQUAL_WITHIN = 50
"""Permille: devices whose speed differs less from the median are taken as equal, since measurements vary too."""


def measure(
    out_path: str | os.PathLike[str],
    *,
    topology: Topology | None = None,
    message_bytes: int | None = None,
    gemm_size: int | None = None,
    repeats: int = 5,
) -> dict[str, Any]:
    """Measures all devices of the program and writes the rates to `out_path` as JSON, integers only.

    Links: every rank sends to another at the same time, in rings inside the domains and then in rings across them; the
    rate is that of one rank and direction while all links work. GEMM: groups of square bf16 products on each device.
    Each figure is the median of `repeats` runs after one that is not counted.

    Args:
      out_path: file to write; process 0 writes it.
      topology: the domains of `jax.devices()`, in their order. None asks the devices (`Topology.from_mesh`).
      message_bytes: size of a message; None takes 64 MiB, and 1 MiB on CPU.
      gemm_size: width of the square products, 4096 if None, and 256 on CPU.
      repeats: timed runs of each measurement.

    Returns:
      What the file holds: `version`, `platform`, `device_kind`, `num_devices`, `num_domains`, `domain_of_rank`,
      `inter_fs_per_byte` and `intra_fs_per_byte` (None where no two ranks have such a link), `gflops` (median device),
      `rank_speed` (permille of it, one per device, or None if all are within 5 % or emulated), `message_bytes`,
      `gemm_size`, `note`.

    Raises:
      ValueError: the topology has another number of ranks, or a size is not a positive integer.
    """
    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("ep",))
    topology = Topology.from_mesh(mesh) if topology is None else topology
    if topology.num_ranks != len(devices):
        raise ValueError(f"the topology has {topology.num_ranks} ranks, but there are {len(devices)} devices")
    platform = devices[0].platform
    on_cpu = platform == "cpu"
    message_bytes = (2**20 if on_cpu else 2**26) if message_bytes is None else message_bytes
    gemm_size = (256 if on_cpu else 4096) if gemm_size is None else gemm_size
    for name, value in (("message_bytes", message_bytes), ("gemm_size", gemm_size), ("repeats", repeats)):
        if not is_integer(value, 1):
            raise ValueError(f"{name}={value!r} must be an integer of at least 1")

    links = {
        "inter_fs_per_byte": _link_fs_per_byte(mesh, _rings(topology, across=True), message_bytes, repeats),
        "intra_fs_per_byte": _link_fs_per_byte(mesh, _rings(topology, across=False), message_bytes, repeats),
    }
    device_gflops = _from_all_processes(
        [_gflops(device, gemm_size, repeats) if _is_local(device) else 0 for device in devices]
    )
    gflops = sorted(device_gflops)[(len(devices) - 1) // 2]
    speeds = [rate * NOMINAL_SPEED // gflops for rate in device_gflops]
    unequal = any(abs(speed - NOMINAL_SPEED) > EQUAL_WITHIN for speed in speeds)
    found = {
        "version": MEASUREMENT_VERSION,
        "platform": platform,
        "device_kind": ", ".join(sorted({device.device_kind for device in devices})),
        "num_devices": len(devices),
        "num_domains": topology.num_domains,
        "domain_of_rank": list(topology.domain_of_rank),
        **links,
        "gflops": gflops,
        "rank_speed": speeds if unequal and not on_cpu else None,
        "message_bytes": int(message_bytes),
        "gemm_size": int(gemm_size),
        "note": _note(platform, devices[0].device_kind, links),
    }
    if jax.process_index() == 0:
        Path(out_path).write_text(json.dumps(found, indent=2) + "\n")
    return found


def _rings(topology: Topology, *, across: bool) -> list[tuple[int, int]]:
    """(source, target) of a ppermute: each rank has at most one of each. Empty where there is no such link."""
    domains = [topology.ranks_of_domain(domain) for domain in range(topology.num_domains)]
    if across:  # ranks of the same position in every domain that has one
        longest = max(map(len, domains))
        groups = [tuple(ranks[at] for ranks in domains if at < len(ranks)) for at in range(longest)]
    else:
        groups = domains
    return [pair for ring in groups if len(ring) > 1 for pair in zip(ring, (*ring[1:], ring[0]), strict=True)]


def _link_fs_per_byte(mesh: Mesh, pairs: list[tuple[int, int]], message_bytes: int, repeats: int) -> int | None:
    """Femtoseconds per byte of one rank and direction while all pairs send; None without pairs."""
    if not pairs:
        return None
    spec = PartitionSpec("ep")

    def send(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, CHAIN, lambda _, y: jax.lax.ppermute(y, "ep", pairs), x)

    shape = (mesh.size, math.ceil(message_bytes / 4))
    program = jax.jit(jax.shard_map(send, mesh=mesh, in_specs=spec, out_specs=spec))
    ones = jax.jit(lambda: jnp.ones(shape, jnp.float32), out_shardings=NamedSharding(mesh, spec))()
    nanoseconds = max(_from_all_processes([_median_ns(lambda: program(ones), repeats)]))
    return max(nanoseconds * 1_000_000 // (CHAIN * shape[1] * 4), 1)


def _gflops(device: jax.Device, size: int, repeats: int) -> int:
    """GFLOP/s of grouped bf16 products of [size, size] on one device."""
    # Random operands: a chip draws less power on zeros, and then runs faster than it would on data.
    rows, weights = np.random.default_rng(0).standard_normal((2, GROUPS, size, size), np.float32)
    x = jax.device_put(rows.astype(jnp.bfloat16), device)
    w = jax.device_put((weights / math.sqrt(size)).astype(jnp.bfloat16), device)
    flops = 2 * size**3 * GROUPS * CHAIN
    return max(flops // _median_ns(lambda: _multiply(x, w), repeats), 1)


@jax.jit
def _multiply(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, CHAIN, lambda _, y: jnp.einsum("gij,gjk->gik", y, w), x)


def _median_ns(run: Callable[[], jax.Array], repeats: int) -> int:
    run().block_until_ready()
    times = []
    for _ in range(repeats):
        started = time.perf_counter_ns()
        run().block_until_ready()
        times.append(time.perf_counter_ns() - started)
    return max(sorted(times)[(repeats - 1) // 2], 1)


def _is_local(device: jax.Device) -> bool:
    return bool(device.process_index == jax.process_index())


def _from_all_processes(values: list[int]) -> list[int]:
    """The elementwise maximum over processes, so that all of them return the same figures."""
    if jax.process_count() == 1:
        return values
    # As two words: without x64 JAX has no 64-bit integers.
    words = np.array([[value >> 31, value & (2**31 - 1)] for value in values], np.int32)
    gathered = np.asarray(multihost_utils.process_allgather(words)).astype(np.int64)
    return [int(value) for value in ((gathered[..., 0] << 31) | gathered[..., 1]).max(axis=0)]


def _note(platform: str, device_kind: str, links: dict[str, int | None]) -> str:
    notes = [f"measured on {platform} devices of kind {device_kind}"]
    if platform == "cpu":
        notes.append("emulated devices share cores and memory, so these are not the rates of any cluster")
    for name, rate in links.items():
        if rate is None:
            link = name.removesuffix("_fs_per_byte")
            notes.append(f"{name} was not measured: no two devices have such a link, so give --{link}_gbps")
    return "; ".join(notes)
