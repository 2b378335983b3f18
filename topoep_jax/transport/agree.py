"""What processes settle with each other before they enter collectives, which would wait for one that has left."""

import itertools

import jax
import numpy as np
from jax.experimental import multihost_utils

from topoep_jax import _compat

TIMEOUT_S = 600.0
"""Default of how long a process, or a kernel, waits for another: longer than compile times differ."""

_REASON_BYTES = 512
_meetings = itertools.count()  # processes meet in the same order, so they agree


def meet(task: str, timeout_s: float = TIMEOUT_S) -> None:
    """Returns once all processes have called it, as each should between compiling a program and running it. Collective.

    Kernels that wait for a peer give up after their `timeout_s`, however busy that peer's compiler still is. No device
    takes part here, so nothing gives up but this call.

    Args:
      task: what the processes have done before, in the infinitive, for the message.
      timeout_s: how long to wait.

    Raises:
      TimeoutError: some did not come; the message names them.
    """
    if jax.process_count() == 1:
        return
    missing = _compat.meet(f"meeting/{next(_meetings)}", timeout_s)
    if missing:
        who = f"process{'es' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        raise TimeoutError(f"{who} did not {task} within {timeout_s:g} s: look for the end of that log")


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
