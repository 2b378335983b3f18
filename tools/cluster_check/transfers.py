"""The device transport among all GPUs: that it comes up, gives what lax collectives give, and how fast it is."""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tools.cluster_check.cluster import connect
from tools.gpu_check.runner import Setting
from topoep_jax import transport
from topoep_jax.config import STAGING_BYTES
from topoep_jax.plan.problem import PULLS, CostModel
from topoep_jax.transfer import device_pull, device_push, pull, push
from topoep_jax.transport import Group, LayerSizes

MAINS, SLOTS = 4, 2
COLUMNS = 10_007
"""Of an expert in the comparison: no multiple of anything."""
EPOCHS = 12
LITTLE_STAGING = 2**16
"""Bytes: gradients then arrive in many pieces."""
LARGE = (16, 3 * 2048 * 768)
"""Mains of a rank and parameters of an expert, where time is measured: those of Qwen3-30B-A3B on 8 ranks."""
WARMUPS, RUNS = 3, 20
OCCUPIED = 0.7


def bring_up(setting: Setting) -> dict[str, object]:
    """transport.init on every node; what it holds on every rank."""
    mesh = connect(setting)
    group = _init(setting, mesh, MAINS, COLUMNS * 4, LITTLE_STAGING)
    return {
        "devices": mesh.size,
        "kind": group.kind,
        "reasons": group.reasons,
        "domain_of_rank": group.topology.domain_of_rank,
        "bytes": group.report(),
    }


def exact(setting: Setting) -> dict[str, object]:
    """Pulls by every schedule and pushes, bit for bit against lax collectives and against NumPy."""
    mesh = connect(setting)
    group = _init(setting, mesh, MAINS, COLUMNS * 4, LITTLE_STAGING)
    modes = PULLS if group.kind == "device" else ("direct",)
    compared = 0
    for mode in modes:
        programs = [_programs(mesh, group, kind, mode) for kind in dict.fromkeys((group.kind, "xla"))]
        for epoch in range(EPOCHS):
            rng = np.random.default_rng([epoch, modes.index(mode)])
            plan = random_placement(rng, mesh.size, MAINS, SLOTS)
            # Magnitudes far apart, so that another order of a sum gives other bits.
            scale = 10.0 ** rng.integers(-6, 6, (mesh.size * SLOTS, 1))
            mains = rng.normal(size=(mesh.size * MAINS, COLUMNS)).astype(np.float32)
            main_grads = rng.normal(size=mains.shape).astype(np.float32)
            slot_grads = (rng.normal(size=(mesh.size * SLOTS, COLUMNS)) * scale).astype(np.float32)
            sums = main_grads.copy()
            for row, expert in enumerate(plan.ravel()):
                if expert >= 0:
                    sums[expert] += slot_grads[row]
            if setting.plant == "exact":
                sums[:, 0] += 1
            held = plan.ravel() >= 0
            for pulls, pushes in programs:
                _assert_same(pulls(_place(mesh, mains), plan), mains[np.maximum(plan.ravel(), 0)], held)
                _assert_same(pushes(_place(mesh, slot_grads), _place(mesh, main_grads), plan), sums, None)
                compared += 1
    return {"kind": group.kind, "modes": modes, "plans": compared}


def times(setting: Setting) -> dict[str, object]:
    """Milliseconds of a pull and of a push of a model's layer, by each transport; medians of whole calls.

    A push here copies the mains' gradients first, as its caller keeps them; inside a layer it does not.
    """
    mesh = connect(setting)
    num_mains, columns = (2, 1000) if setting.dry_run else LARGE
    group = _init(setting, mesh, num_mains, columns * 2, STAGING_BYTES)
    plan = random_placement(np.random.default_rng(0), mesh.size, num_mains, SLOTS)
    copies = int((plan >= 0).sum())
    rows: dict[str, object] = {"ranks": mesh.size, "copies": copies, "bytes_of_a_copy": 2 * columns}
    sharding = NamedSharding(mesh, P("ep"))
    make = jax.jit(lambda n, dtype: jnp.ones((n, columns), dtype), static_argnums=(0, 1), out_shardings=sharding)
    mains = make(mesh.size * num_mains, jnp.bfloat16)
    slot_grads, main_grads = make(mesh.size * SLOTS, jnp.float32), make(mesh.size * num_mains, jnp.float32)
    for mode in PULLS if group.kind == "device" else ("direct",):
        pulls, pushes = _programs(mesh, group, group.kind, mode)
        rows[f"{group.kind} {mode} pull ms"] = _milliseconds(lambda pulls=pulls: pulls(mains, plan))
    rows[f"{group.kind} push ms"] = _milliseconds(lambda: pushes(slot_grads, main_grads, plan))
    pulls, pushes = _programs(mesh, group, "xla", "direct")
    rows["xla pull ms"] = _milliseconds(lambda: pulls(mains, plan))
    rows["xla push ms"] = _milliseconds(lambda: pushes(slot_grads, main_grads, plan))
    return rows


def random_placement(rng: np.random.Generator, ranks: int, mains: int, slots: int) -> np.ndarray:
    """int32 [R, N]: ascending experts that are not the rank's own, then -1; low experts are hot."""
    plan = np.full((ranks, slots), -1, np.int32)
    for rank in range(ranks):
        drawn = (rng.random(slots) * rng.random(slots) * ranks * mains).astype(int)
        held = np.unique(drawn[(drawn // mains != rank) & (rng.random(slots) < OCCUPIED)])
        plan[rank, : held.size] = held
    return plan


def _init(setting: Setting, mesh: Mesh, mains: int, expert_bytes: int, staging_bytes: int) -> Group:
    """The group of the mesh; a machine with GPUs must have kernels."""
    layers = [LayerSizes(mains, SLOTS, expert_bytes, mode) for mode in PULLS]
    group = transport.init(mesh, sizes=layers, staging_bytes=staging_bytes, require=not setting.dry_run)
    assert group.kind == ("xla" if setting.dry_run else "device")
    return group


def _programs(mesh: Mesh, group: Group, kind: str, mode: str) -> tuple[Callable, Callable]:
    """(mains, plan) -> slots and (slot_grads, main_grads, plan) -> sums, over all ranks."""
    cost = CostModel(1 << 20, 1, 0, inter_fs_per_byte=20_000, intra_fs_per_byte=5_000, pulls=mode)
    first = jnp.zeros(1, jnp.int32)

    def pull_here(mains: jax.Array, plan: jax.Array) -> jax.Array:
        if kind == "xla":
            return pull(mains, plan, "ep")
        return device_pull(mains, plan, first, group, cost)[0]

    def push_here(slot_grads: jax.Array, main_grads: jax.Array, plan: jax.Array) -> jax.Array:
        if kind == "xla":
            return push(slot_grads, main_grads, plan, "ep")
        return device_push(slot_grads, main_grads, plan, first, group)[0]

    def program(function: Callable, arrays: int) -> Callable:
        specs = (*[P("ep")] * arrays, P())
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P("ep"), check_vma=False))

    return program(pull_here, 1), program(push_here, 2)


def _place(mesh: Mesh, values: np.ndarray) -> jax.Array:
    sharding = NamedSharding(mesh, P("ep"))
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def _assert_same(got: jax.Array, want: np.ndarray, rows: np.ndarray | None) -> None:
    """Bit for bit on the ranks of this process, in the given rows."""
    for shard in got.addressable_shards:
        own = slice(None) if rows is None else rows[shard.index[0]]
        a, b = np.asarray(shard.data)[own], want[shard.index][own]
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def _milliseconds(call: Callable[[], object]) -> float:
    taken = []
    for _ in range(WARMUPS + RUNS):
        start = time.perf_counter()
        jax.block_until_ready(call())
        taken.append(1e3 * (time.perf_counter() - start))
    return round(statistics.median(taken[WARMUPS:]), 4)
