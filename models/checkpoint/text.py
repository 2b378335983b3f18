"""JSON of files that come from elsewhere: whatever they hold, the error is a ValueError."""

import json
import math
import pathlib
from collections.abc import Callable
from typing import Any


def parse(text: str | bytes, *, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value of a text; `pairs` makes an object of its names and values, as `json.loads` has it.

    Raises:
      ValueError: it is no JSON, which has neither NaN nor Infinity; a number is beyond float64; it nests too deep.
    """
    try:
        return json.loads(text, parse_constant=_finite, parse_float=_finite, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("it nests too deep") from None


def read(path: pathlib.Path) -> Any:
    """The value of a file in UTF-8, which some editors begin with a byte order mark; raises OSError, and as `parse`."""
    return parse(path.read_text(encoding="utf-8-sig"))


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is not finite")
    return value
