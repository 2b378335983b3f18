"""What one figure is to the command that runs it and to the report that shows it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from train.experiments.record import Record
from train.experiments.settings import Settings


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure of the paper, or one beyond it.

    Attributes:
      number: in the paper, or a letter.
      title: what it shows.
      needs: what it needs, and how long it takes.
      differs: one sentence: what differs from the paper, and why.
      run: computes the records.
      draw: makes a Matplotlib figure of them.
      inputs: what else than settings and versions its records come from, in words; `--resume` runs it again when these
        change.
      modelled: whether times in it are modelled, so that the limits of the model belong beside it.
    """

    number: str
    title: str
    needs: str
    differs: str
    run: Callable[[Settings], Sequence[Record]]
    draw: Callable[[Sequence[Record]], Any]
    inputs: Callable[[], str] = str
    modelled: bool = False

    @property
    def name(self) -> str:
        """The name of its files and anchors."""
        return f"figure_{self.number.lower()}"

    @property
    def label(self) -> str:
        """The label as a heading."""
        return f"Figure {self.number}" if self.number[0].isdigit() else f"Beyond the paper, {self.number}"
