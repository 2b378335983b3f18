"""How much is run: a subset in minutes, or everything in hours."""

import dataclasses

MODELS = ("qwen3-30b-a3b", "glm-4.5-air", "deepseek-v2")
"""Of the paper."""
SKEWS = (0.0, -0.5, -1.0, -2.0, -4.0)
"""Of its Figure 12."""
SLOTS = 2
"""Per rank: the paper's choice after its Figure 10."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides the records of all figures, and nothing else does.

    Attributes:
      full: everything, instead of a subset.
      seeds: of forced routing, for figures of means and spreads.
    """

    full: bool = False
    seeds: int | None = None

    @property
    def draws(self) -> range:
        """Seeds of the paper's three models."""
        return range(self.seeds or (20 if self.full else 5))

    @property
    def wide_draws(self) -> range:
        """Seeds of wide layers, which take seconds to draw and to plan each."""
        return range(self.seeds or (10 if self.full else 2))

    @property
    def grid_draws(self) -> range:
        """Seeds of sweeps over many settings."""
        return range(self.seeds or (10 if self.full else 2))
