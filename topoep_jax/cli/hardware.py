"""The flags that say at which rates links and products run."""

import dataclasses
import pathlib
from collections.abc import Callable

from topoep_jax.cli.flags import Flags
from topoep_jax.plan.hardware import Hardware

HARDWARE: dict[str, Callable[[], Hardware]] = {"h800": Hardware.h800, "h100": Hardware.h100}


def add_hardware(values: Flags, default: str | None) -> None:
    """Adds --hardware and what completes a measurement; None stands for rates of the command's own."""
    values.add("hardware", str, f"rates: {', '.join(HARDWARE)}, or a file of `topoep measure`", default)
    gbps = "with a --hardware file: Gb/s per rank and direction between domains, in place of the file's"
    values.add("inter_gbps", int, gbps, least=1)
    values.add("intra_gbps", int, "the same inside a domain", least=1)


def hardware_of(values: Flags, num_ranks: int) -> Hardware:
    """The rates of --hardware, which is given, for R ranks."""
    name = values.hardware
    if name in HARDWARE:
        values.refuse(("inter_gbps", "intra_gbps"), f"completes a measurement, but --hardware={name} is a preset")
        return HARDWARE[name]()
    if not pathlib.Path(name).is_file():
        raise ValueError(f"--hardware={name} is neither a file nor one of {', '.join(HARDWARE)}")
    hardware = Hardware.from_measurement(name, inter_gbps=values.inter_gbps, intra_gbps=values.intra_gbps)
    if hardware.rank_speed is not None and len(hardware.rank_speed) != num_ranks:
        # The rates of one node also serve a study of many; the speeds are of ranks that the study does not have.
        hardware = dataclasses.replace(hardware, rank_speed=None)
    return hardware
