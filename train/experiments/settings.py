"""How much is run: a subset in minutes, or everything in hours."""

import dataclasses
from pathlib import Path

MODELS = ("qwen3-30b-a3b", "glm-4.5-air", "deepseek-v2")
"""Of the paper."""
SKEWS = (0.0, -0.5, -1.0, -2.0, -4.0)
"""Of its Figure 12."""
SLOTS = 2
"""Per rank: the paper's choice after its Figure 10."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What was asked for; a figure's records depend on it, and beside it on code, versions (`store`) and its inputs.

    Attributes:
      full: everything, instead of a subset.
      seeds: of forced routing, for figures of means and spreads.
      folder: where training runs leave their files; it decides nothing.
      resume: whether training runs go on where they stopped; it decides nothing, since they do so exactly.
    """

    full: bool = False
    seeds: int | None = None
    folder: Path = dataclasses.field(default=Path("runs/experiments"), repr=False, compare=False)
    resume: bool = dataclasses.field(default=False, repr=False, compare=False)

    @property
    def draws(self) -> range:
        """Seeds of the paper's three models."""
        return range(self.seeds or (40 if self.full else 10))

    @property
    def few_draws(self) -> range:
        """Seeds of sweeps over many settings, and of wide layers, which take seconds to draw and to plan each."""
        return range(self.seeds or (10 if self.full else 3))

    @property
    def steps(self) -> int:
        """Steps of the training runs whose losses are compared; the paper's in the full set."""
        return 10_000 if self.full else 500

    @property
    def recorded_steps(self) -> int:
        """Steps of the training runs whose routing is looked at."""
        return 2_000 if self.full else 500
