"""Text tables: the first column to the left, numbers to the right."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Lines of equal columns under a header and a rule; the first `left` columns are text."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (f"{c:<{w}}" if i < left else f"{c:>{w}}" for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return "  ".join(padded).rstrip() + "\n"

    return line(header) + "-" * (sum(widths) + 2 * (len(widths) - 1)) + "\n" + "".join(map(line, rows))
