"""What processes settle with each other before they enter collectives, which would wait for one that has left."""

import jax
import numpy as np
from jax.experimental import multihost_utils

_REASON_BYTES = 512


def first_reason(reason: str | None) -> str | None:
    """The reason of the lowest process that has one, the same on all; None if no process has. Collective."""
    if jax.process_count() == 1:
        return reason
    mine = np.zeros(_REASON_BYTES, np.uint8)
    text = (reason or "").encode(errors="replace")[:_REASON_BYTES]  # a path may hold what is no Unicode
    mine[: len(text)] = np.frombuffer(text, np.uint8)
    everyone = np.asarray(multihost_utils.process_allgather(mine)).reshape(jax.process_count(), _REASON_BYTES)
    for process, row in enumerate(everyone):
        said = row.tobytes().rstrip(b"\0").decode(errors="replace")
        if said:
            return f"{said} (process {process})"
    return None


def from_process_0(texts: list[bytes], size: int) -> list[bytes]:
    """The texts of process 0, each of `size` bytes; other processes pass as many of any content. Collective."""
    if jax.process_count() == 1:
        return texts
    mine = np.frombuffer(b"".join(texts), np.uint8).reshape(len(texts), size)
    return [row.tobytes() for row in np.asarray(multihost_utils.broadcast_one_to_all(mine), np.uint8)]
