"""What a GPU's clock would say, in constants: the forecast of compiled programs and the simulator both take them here.

None was timed by this project. Each has a source and a range, from what would make a layer quickest to what would make
it slowest; `Rates.read` replaces them by what was measured on a GPU.
"""

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

REVIEW = "estimated from the compiled kernels' instructions"
PAPER = "TopoEP, Figure 11: 337 to 455 us on 32 ranks"
ASSUMED = "assumed: what profiles of other programs show"


def _rate(value: float, quickest: float, slowest: float, unit: str, meaning: str, source: str) -> Any:
    about = {"quickest": quickest, "slowest": slowest, "unit": unit, "meaning": meaning, "source": source}
    return dataclasses.field(default=value, metadata=about)


@dataclasses.dataclass(frozen=True)
class Rates:
    """Constants of one GPU beside the rates of its links (`plan.hardware.Hardware`).

    Raises:
      ValueError: a value that is not a positive number.
    """

    multiprocessors: float = _rate(132, 132, 132, "", "of the GPU", "the SXM boards of H100, H200 and H800")
    clock_ghz: float = _rate(1.6, 1.755, 1.4, "GHz", "under load", "between the base and the boost clock")
    rows_efficiency: float = _rate(0.6, 0.75, 0.5, "", "of the tensor cores, rows times weights", REVIEW)
    wgrad_efficiency: float = _rate(0.6, 0.75, 0.5, "", "of the tensor cores, weight gradients", REVIEW)
    medium_tile: float = _rate(0.9, 1, 0.8, "", "of that, in tiles of half of 128 x 256", REVIEW)
    small_tile: float = _rate(0.7, 0.9, 0.5, "", "of that, in smaller tiles", REVIEW)
    tile_cycles: float = _rate(3500, 2500, 5000, "cycles", "of a tile beside its products", REVIEW)
    sustained_tflops: float = _rate(600, 700, 500, "TFLOP/s", "of the best products", "what vendors' libraries reach")
    memory_share: float = _rate(0.84, 0.9, 0.72, "", "of the memory's bandwidth that kernels reach", ASSUMED)
    kernel_us: float = _rate(2.5, 2, 5, "us", "least time of a kernel that the host launches", ASSUMED)
    graph_kernel_us: float = _rate(2.5, 1.5, 3, "us", "least time of a kernel in a CUDA graph", ASSUMED)
    sort_us: float = _rate(20, 10, 40, "us", "of a sort of a few ten thousand keys", ASSUMED)
    collective_us: float = _rate(20, 8, 30, "us", "fixed time of a collective", ASSUMED)
    call_us: float = _rate(20, 8, 30, "us", "fixed time of a call that pulls or pushes", ASSUMED)
    plan_us: float = _rate(400, 337, 455, "us", "of the planner", PAPER)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{field.name}={value!r} must be a positive number")

    def end(self, quick: bool) -> "Rates":
        """These at one end of their ranges: the one that makes a layer quick, or slow. What was measured stays."""
        which = "quickest" if quick else "slowest"
        ends = {
            field.name: field.metadata[which]
            for field in dataclasses.fields(self)
            if getattr(self, field.name) == field.default
        }
        return dataclasses.replace(self, **ends)

    def with_products(self, gflops: int) -> "Rates":
        """These with a measured rate of products; a multiprocessor's tensor cores do 4,096 FLOPs a cycle."""
        efficiency = min(gflops / (self.multiprocessors * self.clock_ghz * 4096), 1.0)
        return self.measured({"rows_efficiency": efficiency, "wgrad_efficiency": efficiency})

    def measured(self, found: dict[str, float]) -> "Rates":
        """These, but for what was measured.

        Raises:
          ValueError: a name that is no constant's.
        """
        if unknown := sorted(found.keys() - {field.name for field in dataclasses.fields(self)}):
            raise ValueError(f"{unknown} are no constants of topoep_jax.rates")
        return dataclasses.replace(self, **found)


def read(path: str | os.PathLike[str]) -> dict[str, float]:
    """Constants that were measured on a GPU, by name, from a JSON object in a file: for `Rates.measured`.

    Raises:
      ValueError: no such file, or no object of constants.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        Rates().measured(found)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} cannot be read as rates ({error}): it must be a JSON object of names and values, such as"
            ' {"memory_share": 0.87, "kernel_us": 2.1}'
        ) from error
    return dict(found)
