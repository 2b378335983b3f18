"""What the processes of a run settle before they build anything: that all can read the data, and train on the same.

Otherwise one that stops leaves the others waiting in a collective, and ones that differ train on a mixture of both.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from topoep_jax import launch
from topoep_jax.transport import agree
from train import supervise
from train.config import TrainConfig
from train.data import DataError, Tokens, read_tokens
from train.parent_io import Place

_DIGEST_BYTES = 16
_OF_A_PROCESS = ("process_id", "coordinator", "data")
"""Settings that may differ between processes; what `data` names must hold the same."""


def meet(config: TrainConfig, resume: str) -> None:
    """Makes this process one of those of the run, which `resume` goes on with.

    Raises:
      ValueError: their devices do not add up.
    """
    process, processes = config.process_id, config.num_processes
    print(f"process {process} of {processes}: waiting for the others at {config.coordinator}", flush=True)
    place = Place(process, processes, config.coordinator, config.run_dir, resume)
    job = launch.Job(processes, process, supervise.meet(place))
    launch.connect(job)
    launch.check_devices(job)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """What fails on one process fails on all, which say why: none waits for one that has left. Collective.

    Raises:
      ValueError: the reason of another process.
    """
    fault: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001
        # Whatever it is: the others do not have it.
        fault = error
    reason = agree.first_reason(None if fault is None else f"{fault}" or type(fault).__name__)
    if fault is not None:
        raise fault
    if reason is not None:
        raise ValueError(reason)


def lead_finds(fact: bool) -> bool:
    """What process 0 finds, on all: others may see its files earlier or later. Collective."""
    return bool(multihost_utils.broadcast_one_to_all(np.array(fact))) if jax.process_count() > 1 else fact


def load_same_tokens(config: TrainConfig) -> Tokens:
    """Reads the data of `config` on all processes of the program. Collective.

    Raises:
      DataError: on all processes, if they read other data than process 0, or than the run began with.
      ValueError: on all processes, if one could not read its data, or their settings differ.
    """
    with together():
        tokens = read_tokens(config.data)
    if jax.process_count() > 1:
        if others := _unlike_process_0(_digest_of_settings(config)):
            raise ValueError(f"{others} other settings than process 0: give all the same flags, but for --process_id")
        if others := _unlike_process_0(tokens.digest):
            raise DataError(f"{others} other data than process 0: --data must name files of the same content on all")
    if config.of_data not in ("", tokens.digest.hex()):
        raise DataError(
            "the data are no longer those that this run began with, so it cannot go on as it would have: bring them"
            " back, name with --data what it is to go on with, or start a new run"
        )
    return tokens


def _digest_of_settings(config: TrainConfig) -> bytes:
    shared = {k: v for k, v in dataclasses.asdict(config).items() if k not in _OF_A_PROCESS}
    text = json.dumps(shared, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()


def _unlike_process_0(mine: bytes) -> str:
    """Which processes have another digest than process 0, as the start of a sentence; empty if none. Collective."""
    gathered = multihost_utils.process_allgather(np.frombuffer(mine, np.uint8))
    everyone = np.asarray(gathered).reshape(jax.process_count(), len(mine))
    differing = np.flatnonzero((everyone != everyone[0]).any(axis=1))
    if not differing.size:
        return ""
    names = ", ".join(map(str, differing))
    return f"process {names} has" if differing.size == 1 else f"processes {names} have"
