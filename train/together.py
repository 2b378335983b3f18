"""What the processes of a run settle before they build anything: that all can read the data, and train on the same.

Otherwise one that stops leaves the others waiting in a collective, and ones that differ train on a mixture of both.
"""

import dataclasses
import hashlib
import json

import jax
import numpy as np
from jax.experimental import multihost_utils

from topoep_jax.transport import agree
from train.config import TrainConfig
from train.data import DataError, load_tokens

_DIGEST_BYTES = 16
_BLOCK = 1 << 24
_OF_A_PROCESS = ("process_id", "coordinator", "data")
"""Settings that may differ between processes; what `data` names must hold the same."""


def load_same_tokens(config: TrainConfig) -> np.ndarray:
    """Reads the data of `config` on all processes of the program. Collective.

    Returns:
      Integers [n], as of `load_tokens`.

    Raises:
      DataError: on all processes, if one could not read its data, or read something else than process 0.
      ValueError: on all processes, if their settings differ.
    """
    fault: DataError | None = None
    tokens = np.empty(0, np.uint16)
    try:
        tokens = load_tokens(config.data)
    except DataError as error:
        fault = error
    reason = agree.first_reason(None if fault is None else str(fault))
    if fault is not None:
        raise fault
    if reason is not None:
        raise DataError(reason)
    if jax.process_count() > 1:
        if others := _unlike_process_0(_digest_of_settings(config)):
            raise ValueError(f"{others} other settings than process 0: give all the same flags, but for --process_id")
        if others := _unlike_process_0(_digest_of(tokens)):
            raise DataError(f"{others} other data than process 0: --data must name files of the same content on all")
    return tokens


def _digest_of_settings(config: TrainConfig) -> bytes:
    shared = {k: v for k, v in dataclasses.asdict(config).items() if k not in _OF_A_PROCESS}
    text = json.dumps(shared, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()


def _digest_of(tokens: np.ndarray) -> bytes:
    digest = hashlib.blake2b(tokens.dtype.str.encode(), digest_size=_DIGEST_BYTES)
    for start in range(0, len(tokens), _BLOCK):  # of a file that is larger than memory, perhaps
        digest.update(np.ascontiguousarray(tokens[start : start + _BLOCK]).data)
    return digest.digest()


def _unlike_process_0(mine: bytes) -> str:
    """Which processes have another digest than process 0, as the start of a sentence; empty if none. Collective."""
    gathered = multihost_utils.process_allgather(np.frombuffer(mine, np.uint8))
    everyone = np.asarray(gathered).reshape(jax.process_count(), len(mine))
    differing = np.flatnonzero((everyone != everyone[0]).any(axis=1))
    if not differing.size:
        return ""
    names = ", ".join(map(str, differing))
    return f"process {names} has" if differing.size == 1 else f"processes {names} have"
