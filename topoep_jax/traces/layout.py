"""How a trace lies in its file: names of the entries, and indices in as few bits as the experts need.

`topoep_trace` is the head, JSON as a string; `expert_idx/STEP/PART` with eight and more digits for the step is a
microbatch: uint8 [layers, R, T, K] for up to 255 experts, else uint16, in which the largest value is padding.
"""

import re
import zipfile
from typing import IO

import numpy as np

from topoep_jax.traces import container
from topoep_jax.traces.info import TraceInfo

HEAD = "topoep_trace"
_MICROBATCH = re.compile(r"expert_idx/(\d+)/(\d+)\.npy")


def name_of(step: int, part: int) -> str:
    """Name of a microbatch: `part` counts those of one step."""
    return f"expert_idx/{step:08d}/{part}"


def microbatch_of(filename: str) -> tuple[int, int]:
    """Step and part of the entry of a microbatch.

    Raises:
      ValueError: it is the name of something else.
    """
    match = _MICROBATCH.fullmatch(filename)
    if match is None:
        raise ValueError(f"{filename!r} is no microbatch")
    return int(match[1]), int(match[2])


def read_head(file: IO[bytes], infos: list[zipfile.ZipInfo]) -> TraceInfo:
    """The head of a file with these entries.

    Raises:
      ValueError: it has none, or one that is damaged or of another version.
    """
    heads = [info for info in infos if info.filename == f"{HEAD}.npy"]
    if not heads:
        raise ValueError(f"it has no {HEAD}, with which a trace begins")
    head = container.read(file, heads[0])
    if head.shape or head.dtype.kind != "U":
        raise ValueError(f"{HEAD} is {head.dtype}{list(head.shape)}, not a string")
    return TraceInfo.from_json(str(head))


def encode(expert_idx: np.ndarray, num_experts: int) -> np.ndarray:
    """Experts below `num_experts`, or below 0 for padding, as a file holds them."""
    dtype = np.uint8 if num_experts <= np.iinfo(np.uint8).max else np.uint16
    return np.where(expert_idx < 0, np.iinfo(dtype).max, expert_idx).astype(dtype)


def decode(stored: np.ndarray, info: TraceInfo) -> np.ndarray:
    """int32 [layers, R, T, K] of a file's array, -1 for padding.

    Raises:
      ValueError: another dtype or shape than `info` says, or an expert beyond `info.num_experts`.
    """
    wanted = len(info.layers), info.num_ranks
    if stored.dtype not in (np.uint8, np.uint16) or stored.ndim != 4 or stored.shape[:2] != wanted or not stored.size:
        raise ValueError(
            f"it is {stored.dtype}{list(stored.shape)}, not uint8 or uint16 [{wanted[0]}, {wanted[1]}, T, K]"
        )
    expert_idx = np.where(stored == np.iinfo(stored.dtype).max, -1, stored.astype(np.int32))
    if expert_idx.max() >= info.num_experts:
        raise ValueError(f"it names expert {expert_idx.max()}, but there are {info.num_experts}")
    return expert_idx
