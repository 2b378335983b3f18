"""What a signal asks of a run: to end after the step that it is in, and to save it."""

import os
import signal
import time
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from train import parent_io, supervise


class Interrupt:
    """Turns the first Ctrl-C (or SIGTERM) into a question the loop asks between steps; the second one kills."""

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self._asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        self.watch()
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def watch(self) -> None:
        """Takes the signals, again if something else has taken them since."""
        if self._asked:
            return
        for number in self._SIGNALS:
            before = signal.signal(number, self._note)
            self._before.setdefault(number, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            return  # A launcher that signals each process does so to this one and to its parent, which passes it on.
        self._asked = True
        # No print: it may be what the signal came into.
        name = signal.Signals(number).name
        os.write(2, f"\n{name}: the run ends after this step, and saves it; another signal kills\n".encode())
        if not supervise.has_parent():  # which kills at the second signal
            # The same signal may come again meanwhile, and ends above. Waiting here, and not a handler that looks at
            # the time: what was there before kills even where Python runs no handlers, as in a collective that hangs.
            time.sleep(parent_io.SAME_S)
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def asked(self) -> bool:
        """Whether any process was interrupted: all must leave the loop at the same step."""
        if jax.process_count() == 1:
            return self._asked
        return bool(multihost_utils.process_allgather(np.array(self._asked)).any())
