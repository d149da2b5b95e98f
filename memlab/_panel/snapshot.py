"""The panel without widgets: a table and a picture for saved notebooks, where no kernel runs."""

import base64
import html
from collections.abc import Sequence

from memlab import plots
from memlab._panel.runs import Run, table_html
from memlab._panel.state import describe

EMPTY = "memlab panel: no run yet. With a kernel, run this cell and press Run."
PICTURE_SIZE = (9.0, 4.0)


def as_html(runs: Sequence[Run], shown: Run | None, picture: bytes | None) -> str:
    """Return the table of runs and the timeline of the shown one as a page needs them."""
    if shown is None:
        return f'<div class="memlab-still"><p>{html.escape(EMPTY)}</p></div>'
    result = shown.result
    title = f"{result.workload_name} on {result.device}, {describe(result.config)}"
    image = ""
    if picture:
        source = f"data:image/png;base64,{as_text(picture)}"
        image = f'<img alt="{html.escape(str(result))}" src="{source}">'
    said = f"<p>{html.escape(result.message)}</p>"
    inside = f"<p><b>{html.escape(title)}</b></p>{said}{image}{table_html(runs)}"
    return f'<div class="memlab-still">{inside}</div>'


def as_png(shown: Run | None, comparison: Run | None, limit_bytes: int | None) -> bytes | None:
    """Return the timeline of the shown run; None before the first."""
    if shown is None:
        return None
    compare = comparison.result if comparison else None
    label = comparison.label if comparison else ""
    figure = plots.timeline(
        shown.result,
        limit_bytes=limit_bytes,
        compare=compare,
        compare_label=label,
        size=PICTURE_SIZE,
    )
    return plots.to_png(figure)


def as_text(picture: bytes) -> str:
    """Return a picture as notebooks store it."""
    return base64.b64encode(picture).decode()
