"""What passes for an integer, in the whole library: Python's and NumPy's, and no bool."""

from typing import Any

import numpy as np


def is_integer(value: Any, least: int | None = None) -> bool:
    """Whether this is a Python or NumPy integer, no bool, and not below `least`."""
    integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return integer and (least is None or bool(value >= least))
