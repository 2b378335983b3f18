"""An exchange that is checked: every segment is summed as integers where it leaves and where it lands.

XLA's symmetric ragged exchange is experimental, and users report gradients that were wrong without an error. So where
`check_exchange` asks for it, ranks tell each other sums of the bits that they send, by a collective of another kind,
and compare. A difference becomes a `Fault`, which the host fetches; it changes no result.
"""

import contextlib
import contextvars
import threading
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
_lock = threading.Lock()
_faults: set["Fault"] = set()
_layer: contextvars.ContextVar[jax.Array | None] = contextvars.ContextVar("layer", default=None)
_phase: contextvars.ContextVar[str] = contextvars.ContextVar("phase", default="rows")


class Fault(NamedTuple):
    """Rows that did not arrive as they were sent."""

    layer: int
    phase: str
    """As docs/layer.md names them."""
    source: int
    """Rank."""
    destination: int
    """Rank."""

    def __str__(self) -> str:
        return (
            f"layer {self.layer}, {self.phase}: what rank {self.source} sent is not what rank {self.destination} got;"
            " this version of XLA moves rows wrongly here: compile with topoep_jax.transport.xla_options(safe=True)"
        )


@contextlib.contextmanager
def checking(layer: jax.Array | None) -> Iterator[None]:
    """Checks the exchanges that are traced inside, on behalf of layer int32 []; None checks nothing."""
    token = _layer.set(layer)
    try:
        yield
    finally:
        _layer.reset(token)


@contextlib.contextmanager
def named(phase: str) -> Iterator[None]:
    """What exchanges that are traced inside are called."""
    token = _phase.set(phase)
    try:
        yield
    finally:
        _phase.reset(token)


def exchange_faults() -> list[Fault]:
    """The faults that this process's devices have found so far, in order; it waits for what runs, and forgets them."""
    jax.effects_barrier()
    with _lock:
        found = sorted(_faults)
        _faults.clear()
    return found


def compare(
    rows: jax.Array,
    landed: jax.Array,
    segments: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    axis_name: str,
    groups: list[list[int]] | None,
) -> jax.Array:
    """Compares what left with what landed, where `checking` asks for it, and returns what landed.

    Args:
      rows: [n, ...] this rank's rows.
      landed: [m, ...] the result of the exchange.
      segments: as `exchange` takes them, each int32 [P U] for P peers.
      axis_name: of the exchange.
      groups: of the exchange.
    """
    layer = _layer.get()
    if layer is None:
        return landed
    ranks = np.arange(lax.axis_size(axis_name))[None] if groups is None else np.array(groups)
    me, size = lax.axis_index(axis_name), ranks.shape[1]
    place = np.array([np.argwhere(ranks == rank)[0] for rank in range(ranks.size)], np.int32)
    mine, here = jnp.asarray(place)[me]  # its group, and its place there
    first, sizes, lands, expected = (table.reshape(size, -1) for table in segments)
    sent = jnp.stack([_sums(rows, first, sizes), sizes.astype(jnp.uint32), lands.astype(jnp.uint32)])
    # After this exchange and before the next one: one collective at a time.
    landed, sent = lax.optimization_barrier((landed, sent))
    told = lax.all_gather(sent, axis_name, axis_index_groups=groups)  # [source, 3, destination, U]
    landed, told = lax.optimization_barrier((landed, told))
    sums, sizes, lands = jnp.moveaxis(lax.dynamic_index_in_dim(told, here, 2, keepdims=False), 1, 0)
    sizes = sizes.astype(jnp.int32)
    differ = (_sums(landed, lands.astype(jnp.int32), sizes) != sums) | (sizes != expected)
    bad = differ.any(1)
    note = partial(_note, _phase.get())
    sources = jnp.asarray(ranks, jnp.int32)[mine]
    lax.cond(bad.any(), lambda *found: jax.debug.callback(note, *found), lambda *_: None, layer, sources, me, bad)
    return landed


def _sums(rows: jax.Array, first: jax.Array, sizes: jax.Array) -> jax.Array:
    """uint32 like `first`: the sum of the bits of each segment, each row times its odd place, so that order counts."""
    wide = rows.reshape(rows.shape[0], -1)
    bits = lax.bitcast_convert_type(wide, _UNSIGNED[rows.dtype.itemsize]).astype(jnp.uint32)
    # Scrambled, or changes that are alike in all columns could add up to nothing.
    mixed = (bits + jnp.arange(bits.shape[1], dtype=jnp.uint32)[None]) * jnp.uint32(0x9E3779B1)
    here = (mixed ^ (mixed >> 15)).sum(1, dtype=jnp.uint32)
    row = jnp.arange(rows.shape[0], dtype=jnp.uint32)
    before, weighted = (
        jnp.concatenate([jnp.zeros(1, jnp.uint32), jnp.cumsum(value, dtype=jnp.uint32)]) for value in (here, here * row)
    )
    end = first + sizes
    begin = first.astype(jnp.uint32)
    return 2 * (weighted[end] - weighted[first]) - (2 * begin - 1) * (before[end] - before[first])


def _note(phase: str, layer: np.ndarray, sources: np.ndarray, destination: np.ndarray, bad: np.ndarray) -> None:
    found = {Fault(int(layer), phase, int(source), int(destination)) for source in np.asarray(sources)[np.asarray(bad)]}
    with _lock:
        _faults.update(found)
