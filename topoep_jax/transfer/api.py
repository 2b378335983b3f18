"""Parameters from main ranks to replica slots, and replica gradients home: the plan names both ends, nothing is asked.

Only occupied slots move. The optimizer and checkpoints never see a replica.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from topoep_jax.config import STAGING_BYTES
from topoep_jax.transfer.accumulate import accumulate
from topoep_jax.transport import Segments, exchange, receive_buffer

Beside = Callable[[jax.Array, int, jax.Array], jax.Array]


def pull(mains: jax.Array, slot_expert: jax.Array, axis_name: str) -> jax.Array:
    """Copies the packed parameters of replicated experts from their main ranks into this rank's slots.

    Args:
      mains: [Em, D] this rank's experts.
      slot_expert: int32 [R, N] of the plan, -1 where empty.
      axis_name: the expert-parallel axis.

    Returns:
      [N, D]; zeros in empty slots.
    """
    me, num_mains = lax.axis_index(axis_name), mains.shape[0]
    num_ranks, num_slots = slot_expert.shape
    owner = _owner(slot_expert, num_mains)
    mine = owner == me
    wanted = owner[me][None] == jnp.arange(num_ranks, dtype=jnp.int32)[:, None]  # [R, N]: my slots, by owner
    segments = Segments(
        input_offsets=jnp.where(mine, slot_expert % num_mains, 0).reshape(-1),
        send_sizes=mine.astype(jnp.int32).reshape(-1),
        output_offsets=jnp.where(mine, jnp.arange(num_slots, dtype=jnp.int32), 0).reshape(-1),
        recv_sizes=wanted.astype(jnp.int32).reshape(-1),
    )
    return exchange(mains, receive_buffer(num_slots, mains), segments, axis_name)


def push(
    slot_grads: jax.Array,
    main_grads: jax.Array,
    slot_expert: jax.Array,
    axis_name: str,
    *,
    staging_bytes: int = STAGING_BYTES,
    beside: Beside | None = None,
) -> jax.Array:
    """Sends replica gradients to their main ranks and adds them there, in ascending (rank, slot), in f32.

    The fixed order makes the sum repeatable bit by bit. The gradient travels in slices, so that an owner never stages
    more than `staging_bytes` (or one column of it). They are the steps of a loop, not unrolled: XLA would then
    receive all slices first, and add them in the end.

    Args:
      slot_grads: f32 [N, D] gradients of this rank's slots; those of empty slots are not sent.
      main_grads: f32 [Em, D] gradients of this rank's mains.
      slot_expert: int32 [R, N] of the plan.
      axis_name: the expert-parallel axis.
      staging_bytes: bound on the receive buffer.
      beside: work to do while a slice is on its way: (index, number of slices, main_grads) -> main_grads adds that
        share of the mains' own gradients. A slice is added after its step's share.

    Returns:
      f32 [Em, D]: `main_grads` with the gradients of all replicas added.
    """
    me, num_mains = lax.axis_index(axis_name), main_grads.shape[0]
    num_ranks, num_slots = slot_expert.shape
    size = slot_grads.shape[1]
    owner = _owner(slot_expert, num_mains)
    sent = owner[me][None] == jnp.arange(num_ranks, dtype=jnp.int32)[:, None]  # [R, N]
    slot = jnp.arange(num_slots, dtype=jnp.int32)[None]
    segments = Segments(
        input_offsets=jnp.where(sent, slot, 0).reshape(-1),
        send_sizes=sent.astype(jnp.int32).reshape(-1),
        output_offsets=jnp.where(sent, me * num_slots + slot, 0).reshape(-1),
        recv_sizes=(owner == me).astype(jnp.int32).reshape(-1),
    )
    # [R * N]: the main that each staged row feeds, -1 for a row of another owner.
    target = jnp.where(owner == me, slot_expert % num_mains, -1).reshape(-1)
    num_pieces = num_slices(num_ranks * num_slots, size, staging_bytes)
    piece = size // num_pieces

    def add_piece(grads: jax.Array, p: jax.Array) -> tuple[jax.Array, None]:
        part = lax.dynamic_slice_in_dim(slot_grads, p * piece, piece, 1)
        staged = exchange(part, receive_buffer(num_ranks * num_slots, part), segments, axis_name)
        if beside is not None:
            grads = beside(p, num_pieces, grads)
        return accumulate(grads, staged, target, p * piece), None

    return lax.scan(add_piece, main_grads, jnp.arange(num_pieces, dtype=jnp.int32))[0]


def _owner(slot_expert: jax.Array, num_mains: int) -> jax.Array:
    """Main rank of the expert in each slot, -1 where the slot is empty."""
    return jnp.where(slot_expert >= 0, slot_expert // num_mains, -1)


def num_slices(num_rows: int, size: int, staging_bytes: int) -> int:
    """The fewest equal slices of `size` f32 columns that keep `num_rows` staged rows within `staging_bytes`."""
    fits = lambda columns: num_rows * columns * 4 <= staging_bytes or columns == 1  # noqa: E731
    return next(p for p in range(1, size + 1) if size % p == 0 and fits(size // p))
