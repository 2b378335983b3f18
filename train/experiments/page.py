"""A few elements of HTML, for a page that needs neither scripts nor a network."""

import html
import re
from collections.abc import Iterable, Sequence

_STYLE = """
body { font: 16px/1.45 system-ui, sans-serif; color: #222; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.25rem; margin-top: 2.6rem; border-top: 1px solid #ddd; padding-top: 1rem; }
img { max-width: 100%; height: auto; }
table { border-collapse: collapse; margin: .8rem 0; font-size: .9rem; }
th, td { text-align: left; padding: .2rem .7rem .2rem 0; border-bottom: 1px solid #eee; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
a { color: #0b5cad; } code { font-size: .95em; } summary { cursor: pointer; color: #0b5cad; }
ul { margin: 0; padding-left: 1.2rem; }
"""

escape = html.escape


def prose(text: str) -> str:
    """HTML of plain text with code between backticks."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def document(title: str, parts: Iterable[str]) -> str:
    """A whole page."""
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def heading(level: int, text: str, anchor: str = "") -> str:
    """A heading of plain text."""
    place = f' id="{anchor}"' if anchor else ""
    return f"<h{level}{place}>{escape(text)}</h{level}>"


def paragraph(content: str) -> str:
    """A paragraph of HTML."""
    return f"<p>{content}</p>"


def link(target: str, text: str) -> str:
    """To an anchor of this page, or to a file beside it."""
    return f'<a href="{escape(target)}">{escape(text)}</a>'


def picture(file: str, text: str) -> str:
    """A file beside the page, and what it shows, for those who do not see it."""
    return f'<a href="{escape(file)}"><img src="{escape(file)}" alt="{escape(text)}"></a>'


def listing(items: Iterable[str]) -> str:
    """A list of HTML."""
    return "<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>"


def details(title: str, content: str) -> str:
    """What is folded away until somebody wants it."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    """Cells are HTML; those of the columns `numbers` are right-aligned."""
    right = set(numbers)

    def cells(row: Sequence[str], tag: str) -> str:
        kinds = [' class="n"' if column in right else "" for column in range(len(row))]
        return "".join(f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in zip(kinds, row, strict=True))

    lines = "".join(f"<tr>{cells(row, 'td')}</tr>\n" for row in rows)
    return f"<table>\n<tr>{cells(header, 'th')}</tr>\n{lines}</table>"
