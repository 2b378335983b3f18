"""The transfer kernels' own bodies on host threads, all ranks in one call: to test and study their memory protocol.

`make setup` builds the extension; the wheel does not hold it.
"""

from typing import Literal, get_args

import _topoep_tests
import jax
import jax.numpy as jnp
import numpy as np

from topoep_jax._native import PULL_IDS
from topoep_jax.config import STAGING_BYTES
from topoep_jax.plan.problem import CostModel
from topoep_jax.topology import Topology

Gets = Literal["none", "domain", "all"]
"""Between which ranks one-sided reads work; elsewhere the main's rank pushes its parameters."""

TIMEOUT_MS = 60_000
"""How long a rank waits for another one by default."""

for _name, _handler in _topoep_tests.registrations().items():
    jax.ffi.register_ffi_target(_name, _handler, platform="cpu")


def host_pull(
    mains: jax.Array,
    slot_expert: jax.Array,
    topology: Topology,
    cost: CostModel,
    *,
    workers: int = 2,
    gets: Gets = "all",
    timeout_ms: int = TIMEOUT_MS,
) -> jax.Array:
    """`transfer.pull` of all R ranks, as the device does it: by the schedule that `cost.pulls` names.

    Args:
      mains: [R, Em, D] parameters of every rank's experts.
      slot_expert: int32 [R, N] of a plan, -1 where empty.
      topology: domain of each rank.
      cost: its `pulls` and rates; they choose among the schedules where `pulls` is "best".
      workers: threads of each rank, which share every copy.
      gets: see `Gets`.
      timeout_ms: milliseconds after which a wait fails.

    Returns:
      [R, N, D]; zeros in empty slots. It does not depend on `workers`, `gets` or the schedule.

    Raises:
      ValueError: `gets` is unknown.
      jax.errors.JaxRuntimeError: when it runs, if shapes do not fit, `slot_expert` is no legal placement, or a rank
        waited too long: the text names both ranks and what one waited for.
    """
    if gets not in get_args(Gets):
        raise ValueError(f"gets={gets!r} is unknown: choose one of {get_args(Gets)}")
    shape = (*slot_expert.shape, mains.shape[-1])
    call = jax.ffi.ffi_call("topoep_host_pull", jax.ShapeDtypeStruct(shape, mains.dtype))
    return call(
        mains,
        slot_expert,
        domain_of_rank=np.array(topology.domain_of_rank, np.int32),
        pulls=PULL_IDS[cost.pulls],
        expert_bytes=cost.expert_bytes,
        inter_fs_per_byte=cost.inter_fs_per_byte,
        intra_fs_per_byte=cost.intra_fs_per_byte,
        gets=get_args(Gets).index(gets),
        workers=workers,
        timeout_ms=timeout_ms,
    )


def host_push(
    slot_grads: jax.Array,
    main_grads: jax.Array,
    slot_expert: jax.Array,
    topology: Topology,
    *,
    workers: int = 2,
    staging_bytes: int = STAGING_BYTES,
    timeout_ms: int = TIMEOUT_MS,
) -> jax.Array:
    """`transfer.push` of all R ranks, as the device does it: in pieces through each owner's staging.

    Args:
      slot_grads: f32 [R, N, D] gradients of every rank's slots; those of empty slots are not read.
      main_grads: f32 [R, Em, D] gradients of every rank's mains.
      slot_expert: int32 [R, N] of a plan, -1 where empty.
      topology: domain of each rank.
      workers: threads of each rank.
      staging_bytes: of each owner; at least 16 for every slot of every rank, twice.
      timeout_ms: milliseconds after which a wait fails.

    Returns:
      f32 [R, Em, D]: `main_grads` with the gradients of all replicas added in ascending (rank, slot).

    Raises:
      jax.errors.JaxRuntimeError: as in `host_pull`, or if the staging is too small.
    """
    call = jax.ffi.ffi_call("topoep_host_push", jax.ShapeDtypeStruct(main_grads.shape, jnp.float32))
    return call(
        slot_grads,
        main_grads,
        slot_expert,
        domain_of_rank=np.array(topology.domain_of_rank, np.int32),
        staging_bytes=staging_bytes,
        workers=workers,
        timeout_ms=timeout_ms,
    )
