"""What is wrong with a checkpoint: all of it, in one error, before anything is loaded."""

from collections.abc import Sequence

_MOST_SHOWN = 40


class CheckpointError(ValueError):
    """A folder that cannot be loaded, or not as asked. Nothing was loaded or written.

    Attributes:
      faults: every one, as `missing tensor: lm_head.weight`; the message shows the first 40.
    """

    def __init__(self, subject: object, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        shown = [f"\n  - {fault}" for fault in self.faults[:_MOST_SHOWN]]
        if len(self.faults) > _MOST_SHOWN:
            shown.append(f"\n  - and {len(self.faults) - _MOST_SHOWN} more")
        count = "1 fault" if len(self.faults) == 1 else f"{len(self.faults)} faults"
        super().__init__(f"{subject}: {count}:{''.join(shown)}")


def raise_faults(subject: object, faults: Sequence[str]) -> None:
    """Raises `CheckpointError` if there are any."""
    if faults:
        raise CheckpointError(subject, faults)
