"""Runs of several processes: each has a parent, which ends it when another is lost and says which, and how to go on.

JAX alone would let a process that lost another wait for as long as its collectives do, or end it by signal 6 behind a
wall of C++. This is the side of the process that trains, and of the command that starts it; `train.parent` is the
parent, which imports no JAX.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence

from train import parent
from train.parent_io import CHANNEL, Place

_SIGNS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")
_FLAGS = ("--num_processes", "--coordinator", "--process_id", "--flagfile")
"""Flags of one of several processes, and that of absl which may name a file with them."""
_PR_SET_PDEATHSIG = 1


def maybe_one_of_several(arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether a command may be one of several processes; only the process itself finds out, and JAX knows how."""
    flags = ("-" + argument.lstrip("-").partition("=")[0] for argument in arguments if argument.startswith("-"))
    return any(f"-{flag}" in _FLAGS for flag in flags) or any(name in environ for name in _SIGNS)


def under_a_parent(module: str) -> None:
    """Makes this process the parent of `python -m module` where it may be one of several; returns in that one.

    Call it before the imports that cost: a parent needs none of them.
    """
    if CHANNEL in os.environ:
        _end_with_parent()
    elif maybe_one_of_several(sys.argv[1:], os.environ):
        sys.exit(parent.run([sys.executable, "-m", module, *sys.argv[1:]]))


def has_parent() -> bool:
    """Whether a parent passes signals on: its first asks, and it kills at the second."""
    return CHANNEL in os.environ


def meet(place: Place) -> str:
    """Waits until the parents of all processes know each other; where JAX's own service is to be then.

    Without a parent that is the coordinator.
    """
    if not has_parent():
        return place.coordinator
    _send(dataclasses.asdict(place))
    with _channel() as channel, channel.makefile() as lines:
        said = json.loads(lines.readline() or "{}")
    if "port" not in said:
        sys.exit(1)  # The parent has said why.
    host = place.coordinator.rpartition(":")[0]
    bound = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    if bound is not None:
        os.environ["JAX_COORDINATOR_BIND_ADDRESS"] = f"{bound.rpartition(':')[0]}:{said['port']}"
    return f"{host}:{said['port']}"


@contextlib.contextmanager
def failures_told() -> Iterator[None]:
    """Tells the parent of an error at once: JAX's way out of a process waits for all others."""
    try:
        yield
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if code not in (None, 0) and has_parent():
            _send({"failed": "said" if isinstance(error, SystemExit) else "crashed"})
        raise


def _end_with_parent() -> None:
    """A parent that is killed takes this process with it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != int(os.environ[CHANNEL].split()[1]):
        sys.exit(1)


def _channel() -> socket.socket:
    return socket.socket(fileno=os.dup(int(os.environ[CHANNEL].split()[0])))


def _send(message: dict[str, object]) -> None:
    with contextlib.suppress(OSError), _channel() as channel:  # A parent that is gone needs no message.
        channel.sendall(json.dumps(message).encode() + b"\n")
