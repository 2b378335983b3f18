"""What parameters are read from, block by block: a released folder, a checkpoint of the trainer, arrays on devices."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np

from models.checkpoint.cast import Cast
from models.checkpoint.parameters import Index, Parameter


class Source(Protocol):
    """Parameters of one model, checked before they are offered."""

    config: Any
    """Of the model."""
    parameters: tuple[Parameter, ...]
    extra: dict[str, Any]
    """What else a written config.json is to say, see `folder.extra_of`."""
    cast: Cast
    """Casts the blocks; `cast.done` raises where values did not fit the dtype asked for."""

    def dtype(self, parameter: Parameter) -> np.dtype:
        """What a parameter is stored as; of parts that differ, what holds them all."""

    def blocks(
        self, parameter: Parameter, wanted: Iterable[Index] | None = None, dtype: Any = None
    ) -> Iterator[tuple[Index, np.ndarray]]:
        """Reads the wanted blocks (None: all) in the order that suits the source.

        Yields index and block; the block is in `dtype` (None: as stored) and the caller's to keep.
        """
