"""Replica transfer by our own kernels: `pull` and `push` of `transfer.api` as two FFI calls on CUDA.

The kernels wait for each other across ranks, so all ranks must run a program's calls in one order, whatever XLA's
scheduler does. Data dependencies see to that: `turn`, an int32 [1] of any value, comes from what must be over before
the call, and `carried` goes on to what must wait for it. (Optimization barriers would not do: not every XLA keeps them
until it schedules.) So the calls need no side effect of their own, which `jax.checkpoint` refuses on jax 0.10. The
protocol's own counters are the group's. Operands and attributes are described in xla_ffi/transfer/transfer_cuda.h.
"""

import jax
import jax.numpy as jnp
import numpy as np

from topoep_jax._compat import vary_like
from topoep_jax._native_ids import PULL_IDS
from topoep_jax.plan.problem import CostModel
from topoep_jax.transport import Group, LayerSizes, group_sizes


def device_pull(
    mains: jax.Array, slot_expert: jax.Array, turn: jax.Array, group: Group, cost: CostModel
) -> tuple[jax.Array, jax.Array]:
    """Copies the packed parameters of replicated experts from their main ranks into this rank's slots.

    Args:
      mains: [Em, D] this rank's experts.
      slot_expert: int32 [R, N] of the plan, -1 where empty.
      turn: int32 [1] of any value, from the call before this one.
      group: of `transport.init`, of kind "device".
      cost: the layer's; `cost.pulls` and its rates say by which schedule.

    Returns:
      ([N, D], turn). Rows of empty slots hold anything: no instance reads them.

    Raises:
      ValueError: shapes that do not fit each other or the group, or a group without kernels.
    """
    _check(mains, slot_expert, group)
    _check_windows(mains, slot_expert.shape[1], group, cost.pulls)
    slots = jax.ShapeDtypeStruct((slot_expert.shape[1], mains.shape[1]), mains.dtype)
    call = jax.ffi.ffi_call("topoep_pull", (slots, _turn_like(turn)), input_output_aliases={2: 1})
    results = call(
        mains,
        slot_expert,
        turn,
        group=group.ident,
        **_topology(group),
        pulls=PULL_IDS[cost.pulls],
        expert_bytes=cost.expert_bytes,
        inter_fs_per_byte=cost.inter_fs_per_byte,
        intra_fs_per_byte=cost.intra_fs_per_byte,
    )
    return vary_like(tuple(results), mains)


def device_push(
    slot_grads: jax.Array,
    main_grads: jax.Array,
    slot_expert: jax.Array,
    turn: jax.Array,
    carried: jax.Array,
    group: Group,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sends replica gradients to their main ranks and adds them there, in ascending (rank, slot), in f32.

    Args:
      slot_grads: f32 [N, D] gradients of this rank's slots; those of empty slots are not read.
      main_grads: f32 [Em, D] gradients of this rank's mains.
      slot_expert: int32 [R, N] of the plan.
      turn: int32 [1] of any value, from the call before this one.
      carried: any array; later calls that depend on what is returned of it follow this one on every rank.
      group: of `transport.init`, of kind "device".

    Returns:
      (f32 [Em, D], turn, carried): `main_grads`, in its own memory, with the gradients of all replicas added.

    Raises:
      ValueError: as in `device_pull`, or gradients that are not f32.
    """
    _check(main_grads, slot_expert, group)
    if slot_grads.shape != (slot_expert.shape[1], main_grads.shape[1]):
        raise ValueError(
            f"slot_grads have shape {slot_grads.shape}, expected [N, D] of {main_grads.shape} and the plan"
        )
    if slot_grads.dtype != jnp.float32 or main_grads.dtype != jnp.float32:
        raise ValueError(f"gradients are added in float32, not in {slot_grads.dtype} and {main_grads.dtype}")
    sums = jax.ShapeDtypeStruct(main_grads.shape, jnp.float32)
    call = jax.ffi.ffi_call(
        "topoep_push",
        (sums, _turn_like(turn), jax.ShapeDtypeStruct(carried.shape, carried.dtype)),
        input_output_aliases={1: 0, 3: 1, 4: 2},
    )
    results = call(slot_grads, main_grads, slot_expert, turn, carried, group=group.ident, **_topology(group))
    added, turn, carried = vary_like(tuple(results), main_grads)
    return added, turn, carried


def _topology(group: Group) -> dict[str, np.ndarray]:
    return {"domain_of_rank": np.array(group.topology.domain_of_rank, np.int32)}


def _turn_like(turn: jax.Array) -> jax.ShapeDtypeStruct:
    if turn.shape != (1,) or turn.dtype != jnp.int32:
        raise ValueError(f"turn is {turn.dtype} {turn.shape}, expected int32 (1,): the first call may take zeros")
    return jax.ShapeDtypeStruct((1,), jnp.int32)


def _check(mains: jax.Array, slot_expert: jax.Array, group: Group) -> None:
    if group.kind != "device":
        raise ValueError(
            f"the group of axis {group.axis!r} has no kernels ({'; '.join(group.reasons)}): use transfer.pull and push"
        )
    ranks = group.topology.num_ranks
    if mains.ndim != 2 or slot_expert.ndim != 2 or slot_expert.shape[0] != ranks or slot_expert.shape[1] == 0:
        raise ValueError(
            f"an expert array {mains.shape} and slot_expert {slot_expert.shape} must be [Em, D] and [R, N] with"
            f" R={ranks} ranks of the group and at least one slot"
        )
    if slot_expert.dtype != jnp.int32:
        raise ValueError(f"slot_expert is {slot_expert.dtype}, expected the int32 array of a plan")


def _check_windows(mains: jax.Array, num_slots: int, group: Group, pulls: str) -> None:
    """The group's windows may have been made for other layers, or for a narrower dtype."""
    layer = LayerSizes(mains.shape[0], num_slots, mains.shape[1] * mains.dtype.itemsize, pulls)
    needed = group_sizes([layer], group.topology)
    for name in ("mains", "slots", "stripes"):
        there, wanted = getattr(group.sizes, name), getattr(needed, name)
        if wanted > there:
            raise ValueError(
                f"the group of axis {group.axis!r} has {there} bytes for {name}, and a layer with parameters"
                f" {mains.dtype}{list(mains.shape)}, {num_slots} slots and pulls={pulls!r} needs {wanted}: name the"
                f" config of that layer in topoep_jax.transport.init, with dtype={mains.dtype} or a wider one"
            )
