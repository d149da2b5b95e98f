"""The panel without widgets: a table and a picture for saved notebooks, where no kernel runs."""

import base64
import html
from collections.abc import Sequence

from memlab import plots
from memlab._panel.access import SCRIPT
from memlab._panel.pictures import Scene
from memlab._panel.rows import table_html
from memlab._panel.runs import Run, RunLog
from memlab._panel.state import describe

EMPTY = "memlab panel: no run yet. With a kernel, run this cell and press Run."
PICTURE_SIZE = (9.0, 4.0)


def still(log: RunLog, shown: Run | None, limit_bytes: int | None) -> dict[str, str]:
    """Return the table of runs and the picture of one of them, by MIME type."""
    picture = as_png(shown, log.comparison(shown), limit_bytes)
    made = {"text/html": as_html(log.visible, shown, picture)}
    return made | ({"image/png": as_text(picture)} if picture else {})


def as_html(runs: Sequence[Run], shown: Run | None, picture: bytes | None) -> str:
    """Return the table of runs and the timeline of the shown one as a page needs them."""
    if shown is None:
        return f'<div class="memlab-still"><p>{html.escape(EMPTY)}</p></div>{SCRIPT}'

    result = shown.result
    where = f"predicted for {result.device}" if shown.is_predicted else f"on {result.device}"
    title = f"{result.workload_name}, {where}: {describe(result)}"
    image = ""
    if picture:
        source = f"data:image/png;base64,{as_text(picture)}"
        image = f'<img alt="{html.escape(str(result))}" src="{source}">'

    said = f"<p>{html.escape(result.message)}</p>"
    inside = f"<p><b>{html.escape(title)}</b></p>{said}{image}{table_html(runs[::-1])}"
    return f'<div class="memlab-still">{inside}</div>{SCRIPT}'


def as_png(shown: Run | None, comparison: Run | None, limit_bytes: int | None) -> bytes | None:
    """Return the timeline of the shown run, over its prediction if there is one."""
    if shown is None:
        return None

    scene = Scene(
        predicted=shown.prediction,
        shown=shown,
        comparison=comparison,
        runs=(),
        limit_bytes=limit_bytes,
    )
    return plots.to_png(scene.timeline(PICTURE_SIZE))


def as_text(picture: bytes) -> str:
    """Return a picture as notebooks store it."""
    return base64.b64encode(picture).decode()
