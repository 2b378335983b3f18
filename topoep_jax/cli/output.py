"""Where results go: numbers and tables as text, and files that can be written."""

import math
import pathlib
from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Lines of equal columns under a header and a rule; the first `left` columns are text, the others numbers."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (f"{c:<{w}}" if i < left else f"{c:>{w}}" for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return "  ".join(padded).rstrip() + "\n"

    return line(header) + "-" * (sum(widths) + 2 * (len(widths) - 1)) + "\n" + "".join(map(line, rows))


def milliseconds(value: float, decimals: int = 2) -> str:
    """A time with so many decimals; more of them below one millisecond, for three significant digits."""
    return f"{value:.{decimals_for(value, decimals)}f}"


def decimals_for(value: float, decimals: int) -> int:
    """Decimals of `milliseconds`."""
    return max(decimals, 2 - math.floor(math.log10(abs(value)))) if value else decimals


def plural(count: int, one: str, many: str = "") -> str:
    """A count and its noun; `many` is `one` and an s if not given."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def check_writable(flag: str, path: str, suffix: str) -> None:
    """Raises ValueError, before any work is done for the file, if it could not be written."""
    folder = pathlib.Path(path).parent
    if not path.endswith(suffix):
        raise ValueError(f"--{flag}={path} must end in {suffix}")
    if not folder.is_dir():
        raise ValueError(f"--{flag}={path}: there is no folder {folder}")
