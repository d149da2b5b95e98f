"""Small tables, as HTML for a notebook and as text: how results and reports show themselves.

Every text in HTML is escaped. A table has no colours of its own, so it reads as well on a dark page
as on a light one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

LEFT = "style='text-align:left'"  # notebooks align cells to the right


def facts_table(title: str, facts: Mapping[str, str]) -> str:
    """Return a table of names and texts under a title; what has an empty text is left out.

    >>> "<td style='text-align:left'>1 &lt; 2</td>" in facts_table("run 1", {"why": "1 < 2"})
    True
    """
    from html import escape  # 5 ms that `import memlab` need not wait for

    rows = "".join(
        f"<tr><th scope='row' {LEFT}>{escape(name)}</th><td {LEFT}>{escape(text)}</td></tr>"
        for name, text in facts.items()
        if text
    )
    return f"<table><caption {LEFT}>{escape(title)}</caption>{rows}</table>"


def columns_table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table with these heads over its columns; nothing if there are no rows."""
    if not rows:
        return ""

    from html import escape

    head = "".join(f"<th scope='col' {LEFT}>{escape(name)}</th>" for name in heads)
    body = "".join(
        "<tr>" + "".join(f"<td {LEFT}>{escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines of text; all columns but the first to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
