"""What a modelled gain allows to say: the model of the paper's cluster misses most of its points by 3 to 7 %."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from topoep_jax.simulate.calibration import R
from topoep_jax.simulate.pipeline import LayerRates

MEANINGLESS = 3.0
"""Percent of throughput: a smaller difference means nothing."""
NEEDS_AGREEMENT = 7.0
"""Percent: a difference below this counts only if all variations agree in its sign, and is never called certain."""
PAPER_HOT_PERMILLE = round(1000 * R.hot_share)

Answer = Literal["faster", "slower", "no difference", "undecided"]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What one planner does to throughput against no balancing; percent.

    Attributes:
      gain: as modelled.
      low: the least over all variations of the constants.
      high: the most.
      answer: what may be said of it.
    """

    gain: float
    low: float
    high: float
    answer: Answer

    def __str__(self) -> str:
        band = f"{self.gain:+.1f} % ({self.low:+.1f} to {self.high:+.1f} % as the constants vary)"
        if self.answer == "no difference":
            return f"no difference that means anything: {band}, under {MEANINGLESS:g} %"
        if self.answer == "undecided":
            return f"undecided: {band}, the variations do not agree in sign"
        faint = ", a small difference: the variations agree in sign, no more" * (abs(self.gain) < NEEDS_AGREEMENT)
        return f"{self.answer}: {band}{faint}"


def judge(gain: float, variations: Sequence[float]) -> Verdict:
    """The verdict on a gain in percent, and on what it is under other constants."""
    gains = [gain, *variations]
    low, high = min(gains), max(gains)
    answer: Answer
    if abs(gain) < MEANINGLESS:
        answer = "no difference"
    elif low < 0 < high:
        answer = "undecided"
    else:
        answer = "faster" if gain > 0 else "slower"
    return Verdict(gain, low, high, answer)


def gain_percent(before_ms: float, after_ms: float) -> float:
    """Gain of throughput, when a step takes another time."""
    return 100 * (before_ms / after_ms - 1) if after_ms else 0.0


def variations(rates: LayerRates, top_k: int) -> dict[str, tuple[LayerRates, bool]]:
    """Other constants, and whether there are two streams: how far a verdict depends on what nobody measured.

    The plans stay as they are, since a planner does not know either how wrong its rates are.

    Args:
      rates: what is varied.
      top_k: experts per token.
    """
    hardware = rates.hardware

    def scaled(links: float = 1, gemms: float = 1) -> LayerRates:
        return dataclasses.replace(
            rates,
            hardware=dataclasses.replace(
                hardware,
                inter_fs_per_byte=max(round(hardware.inter_fs_per_byte * links), 1),
                intra_fs_per_byte=max(round(hardware.intra_fs_per_byte * links), 1),
                gflops=max(round(hardware.gflops * gemms), 1),
            ),
        )

    return {
        "links 4/5": (scaled(links=1.25), True),
        "links 5/4": (scaled(links=0.8), True),
        "GEMMs 4/5": (scaled(gemms=0.8), True),
        "GEMMs 5/4": (scaled(gemms=1.25), True),
        "launches x 3": (dataclasses.replace(rates, launch_us=3 * rates.launch_us), True),
        "busiest link as in the paper": (dataclasses.replace(rates, hot_permille=PAPER_HOT_PERMILLE), True),
        "a token crosses once": (dataclasses.replace(rates, once_of=top_k), True),
        "planner x 2": (dataclasses.replace(rates, plan_us=2 * rates.plan_us), True),
        "nothing overlaps": (rates, False),
    }
