"""Parameters from main ranks to replica slots, and replica gradients home: the plan names both ends, nothing is asked.

Only occupied slots move. The optimizer and checkpoints never see a replica.
"""

import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from topoep_jax._arrays import empty_after
from topoep_jax.config import STAGING_BYTES
from topoep_jax.transfer.accumulate import accumulate
from topoep_jax.transfer.pack import pack
from topoep_jax.transport import Segments, exchange

State = TypeVar("State")
Receive = Callable[[jax.Array], jax.Array]

_LEAST_ROWS, _BEST_ROWS = 16, 128


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
    main = jnp.where(mine, slot_expert % num_mains, -1).reshape(-1, 1)
    pulled = (main == jnp.arange(num_mains, dtype=jnp.int32)[None]).any(0)
    sent = pack(mains, pulled)
    return exchange(sent, empty_after(sent, (num_slots, mains.shape[1]), mains.dtype), segments, axis_name)


def push(
    slot_grads: jax.Array,
    main_grads: jax.Array,
    slot_expert: jax.Array,
    axis_name: str,
    *,
    staging_bytes: int = STAGING_BYTES,
) -> jax.Array:
    """Sends replica gradients to their main ranks and adds them there, in ascending (rank, slot), in f32.

    The fixed order makes the sum repeatable bit by bit. An owner stages at most `staging_bytes` (or 16 columns).

    Args:
      slot_grads: f32 [N, D] gradients of this rank's slots; those of empty slots are not sent.
      main_grads: f32 [Em, D] gradients of this rank's mains.
      slot_expert: int32 [R, N] of the plan.
      axis_name: the expert-parallel axis.
      staging_bytes: bound on the receive buffer.

    Returns:
      f32 [Em, D]: `main_grads` with the gradients of all replicas added.
    """
    size = main_grads.shape[1]
    width = slice_rows(slot_expert.size, size, 1, staging_bytes)

    def add(index: jax.Array, state: jax.Array, receive: Receive) -> jax.Array:
        grads = receive(lax.dynamic_slice_in_dim(state, index * width, width, 1))
        return lax.dynamic_update_slice_in_dim(state, grads, index * width, 1)

    return push_slices(slot_grads, slot_expert, axis_name, main_grads.shape[0], size // width, add, main_grads)


def push_slices(
    slot_grads: jax.Array,
    slot_expert: jax.Array,
    axis_name: str,
    num_mains: int,
    num_slices: int,
    add: Callable[[jax.Array, State, Receive], State],
    state: State,
) -> State:
    """`push` in equal slices of columns, with the gradients of the mains made while a slice is on its way.

    The slices are turns of a loop. Unrolled, XLA would receive all of them first, and add them in the end.

    Args:
      slot_grads: f32 [N, W].
      slot_expert: int32 [R, N] of the plan.
      axis_name: the expert-parallel axis.
      num_mains: Em.
      num_slices: of W columns; what an owner stages is f32 [R * N, W / num_slices].
      add: (index of the slice, state, receive) -> state. It makes the slice of its own gradients, f32 [Em, width], and
        has `receive` add the replicas'.
      state: what `add` carries from slice to slice.

    Returns:
      The state after the last slice.
    """
    me = lax.axis_index(axis_name)
    num_ranks, num_slots = slot_expert.shape
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
    width = slot_grads.shape[1] // num_slices

    def turn(state: State, index: jax.Array) -> tuple[State, None]:
        part = lax.dynamic_slice_in_dim(slot_grads, index * width, width, 1)
        empty = empty_after(part, (num_ranks * num_slots, width), part.dtype)
        staged = exchange(part, empty, segments, axis_name)
        return add(index, state, lambda grads: accumulate(grads, staged, target)), None

    return lax.scan(turn, state, jnp.arange(num_slices, dtype=jnp.int32))[0]


def slice_rows(num_staged: int, rows: int, cols: int, staging_bytes: int) -> int:
    """How many rows of a matrix travel at once, as f32 of `num_staged` replicas, within `staging_bytes`.

    Equal shares of the rows; multiples of a large power of two before large ones, since products are made in tiles. At
    least 16 where that divides, which is the least that a kernel can multiply.
    """
    small = [n for n in range(1, math.isqrt(rows) + 1) if rows % n == 0]
    shares = {*small, *(rows // n for n in small)}
    least = math.gcd(rows, _LEAST_ROWS)
    fits = [n for n in shares if n % least == 0 and (num_staged * n * cols * 4 <= staging_bytes or n == least)]
    return max(fits, key=lambda n: (math.gcd(n, _BEST_ROWS), n))


def _owner(slot_expert: jax.Array, num_mains: int) -> jax.Array:
    """Main rank of the expert in each slot, -1 where the slot is empty."""
    return jnp.where(slot_expert >= 0, slot_expert // num_mains, -1)
