"""Rates of one GPU and its links: presets, or what `topoep measure` found on the machine at hand."""

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from topoep_jax._integers import is_integer

NOMINAL_SPEED = 1000
"""Permille: a rank of this speed computes at the rate of `Hardware.gflops`."""
MAX_SPEED = 1_000_000
MEASUREMENT_VERSION = 1
"""Of the file that `topoep_jax.measure` writes and `Hardware.from_measurement` reads."""
_GBPS_FS_PER_BYTE = 8_000_000
"""Femtoseconds per byte of 1 Gb/s."""


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Sustained rates of one GPU and its links, as integers.

    Attributes:
      inter_fs_per_byte: femtoseconds per byte between domains, per direction and GPU (50 GB/s = 20000).
      intra_fs_per_byte: the same inside a domain (200 GB/s = 5000).
      gflops: sustained grouped-GEMM rate in GFLOP/s (400 TFLOP/s = 400000).
      rank_speed: speed of each rank in permille of `gflops` (1000 = nominal), or None: all are nominal. GPUs of one
        kind differ in speed, and a straggler sets the pace (GEM, arXiv 2605.19945).

    Raises:
      ValueError: a value is not an integer, or not positive.
    """

    inter_fs_per_byte: int
    intra_fs_per_byte: int
    gflops: int
    rank_speed: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        set_integers(self, ("inter_fs_per_byte", "intra_fs_per_byte", "gflops"), minimum=1)
        object.__setattr__(self, "rank_speed", checked_speeds(self.rank_speed))

    @classmethod
    def h800(cls) -> "Hardware":
        """One 400 Gb/s NIC per GPU, NVLink at 200 GB/s per direction, 400 TFLOP/s sustained in bf16."""
        return cls(inter_fs_per_byte=20_000, intra_fs_per_byte=5_000, gflops=400_000)

    @classmethod
    def h100(cls) -> "Hardware":
        """The rates of `h800`, with the full NVLink of the SXM board: 450 GB/s per direction."""
        return cls(inter_fs_per_byte=20_000, intra_fs_per_byte=2_222, gflops=400_000)

    @classmethod
    def h800_fitted(cls) -> "Hardware":
        """What the paper's figures imply of its cluster: for `topoep_jax.simulate`, which adds the other constants.

        Effective rates, with whatever disturbs what: GEMMs at 0.46 of 989 TFLOP/s, NVLink at 84 GB/s. They fit no
        other cluster, and no other model of a step.
        """
        return cls(inter_fs_per_byte=20_000, intra_fs_per_byte=11_905, gflops=454_940)

    @classmethod
    def from_measurement(
        cls, path: str | os.PathLike[str], *, inter_gbps: int | None = None, intra_gbps: int | None = None
    ) -> "Hardware":
        """Reads the file that `topoep measure` wrote (`topoep_jax.measure`).

        Args:
          path: the JSON file.
          inter_gbps: Gb/s per direction and GPU between domains, in place of the file's. A measurement on one domain
            has no such rate, and then this is needed.
          intra_gbps: the same inside a domain; needed where each domain had one device.

        Raises:
          ValueError: no such file, not a measurement, another version, a key that is missing, or a rate that was not
            measured and is not given.
        """
        found = _read_measurement(Path(path))
        given = {"inter": inter_gbps, "intra": intra_gbps}
        missing = [link for link in unmeasured_links(found) if given[link] is None]
        if missing:
            raise ValueError(
                f"{path}: {' and '.join(f'{link}_fs_per_byte' for link in missing)} not measured, since the machine"
                f" (num_devices {found['num_devices']}, num_domains {found['num_domains']}) has no such link: give"
                f" {rate_flags(missing)}, in Gb/s per direction and GPU (in Python without the dashes)"
            )
        rates = {
            f"{link}_fs_per_byte": found[f"{link}_fs_per_byte"] if gbps is None else _fs_per_byte(f"{link}_gbps", gbps)
            for link, gbps in given.items()
        }
        return cls(**rates, gflops=found["gflops"], rank_speed=found["rank_speed"])


def unmeasured_links(found: dict[str, Any]) -> list[str]:
    """Links without a rate in a measurement: "inter", "intra", both or none."""
    return [link for link in ("inter", "intra") if found[f"{link}_fs_per_byte"] is None]


def rate_flags(links: Iterable[str]) -> str:
    """The flags of `topoep plan` that give the rates of links."""
    return " ".join(f"--{link}_gbps=.." for link in links)


def set_integers(instance: Any, names: Iterable[str], minimum: int) -> None:
    """Checks fields of a frozen dataclass and turns NumPy integers into Python's, which do not overflow."""
    for name in names:
        value = getattr(instance, name)
        if not is_integer(value, minimum):
            raise ValueError(f"{name}={value!r} must be an integer of at least {minimum}: round it")
        object.__setattr__(instance, name, int(value))


def checked_speeds(rank_speed: Any) -> tuple[int, ...] | None:
    """`rank_speed` as a tuple of Python integers.

    Raises:
      ValueError: empty, or a speed is no integer in 1..MAX_SPEED.
    """
    if rank_speed is None:
        return None
    speeds = rank_speed.tolist() if isinstance(rank_speed, np.ndarray) else rank_speed
    if not isinstance(speeds, tuple | list) or not speeds:
        raise ValueError(f"rank_speed={rank_speed!r} must hold one integer per rank (permille), or be None")
    for rank, speed in enumerate(speeds):
        if not is_integer(speed, 1) or speed > MAX_SPEED:
            raise ValueError(
                f"rank_speed[{rank}]={speed!r} must be an integer in 1..{MAX_SPEED}: permille of nominal speed, 1000 is"
                " nominal"
            )
    return tuple(int(speed) for speed in speeds)


def _fs_per_byte(name: str, gbps: Any) -> int:
    if not is_integer(gbps, 1) or gbps > _GBPS_FS_PER_BYTE:
        raise ValueError(f"{name}={gbps!r} must be an integer of at least 1, in Gb/s per direction and GPU")
    return _GBPS_FS_PER_BYTE // int(gbps)


def _read_measurement(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as a measurement ({error}): write it with `topoep measure`") from error
    version = found.get("version") if isinstance(found, dict) else None
    if not is_integer(version) or version != MEASUREMENT_VERSION:
        raise ValueError(f"{path} has version {version!r}, expected {MEASUREMENT_VERSION}: measure again")
    expected = {"inter_fs_per_byte", "intra_fs_per_byte", "gflops", "rank_speed", "num_devices", "num_domains"}
    missing = sorted(expected - set(found))
    if missing:
        raise ValueError(f"{path} lacks {missing}: measure again")
    for name in ("num_devices", "num_domains"):
        if not is_integer(found[name], 1):
            raise ValueError(
                f"{path} has {name}={found[name]!r}, which must be an integer of at least 1: measure again"
            )
    return found
