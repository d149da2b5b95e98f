"""The progress bar of a call that takes a while, by tqdm: in notebooks and in terminals.

A call has one bar, also if it makes other calls, and the bar is gone when the call ends. None is
shown during the first second; nor where nobody watches: in papermill and nbconvert, where standard
error is no terminal, in threads (the panel shows its own) and in the worker.
"""

import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from memlab.running import Progress

P = ParamSpec("P")
R = TypeVar("R")
DELAY_SECONDS, UPDATE_SECONDS = 1.0, 0.2
FORMAT = "{percentage:3.0f} %|{bar}| {elapsed} {desc}"

_shown: list["Bar | None"] = []  # of the call that goes on: its bar, or that it has none


class Bar:
    """Shows progress, from a second after it was made on."""

    def __init__(self) -> None:
        self._due = time.monotonic() + DELAY_SECONDS
        self._said = Progress(text="", fraction=0.0)
        self._drawn: Any = None
        self._display: Any = None  # of a notebook

    def __call__(self, progress: Progress) -> None:
        """Take the progress of the call."""
        self._said = progress
        self.tick()

    def tick(self) -> None:
        """Draw the bar if that is due."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + UPDATE_SECONDS
        if self._drawn is None:
            self._draw()
        self._drawn.n = min(max(self._said.fraction, 0.0), 1.0)
        self._drawn.set_description_str(self._said.text)

    def _draw(self) -> None:
        from tqdm.auto import tqdm  # late: most calls take less than a second

        options: dict[str, Any] = {"total": 1.0, "leave": False, "bar_format": FORMAT}
        if not _is_notebook():
            self._drawn = tqdm(**options, dynamic_ncols=True)
            return
        from IPython.display import display

        self._drawn = tqdm(**options, display=False)
        self._display = display(self._drawn.container, display_id=True)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Take the bar away; a saved notebook keeps nothing of it."""
        if self._drawn is not None:
            self._drawn.n = self._drawn.total  # else it is left standing in red
            self._drawn.close()
        if self._display is not None:
            self._display.update({"text/plain": ""}, raw=True)


def tick() -> None:
    """Let the bar of this thread's call go on, while nothing is reported."""
    if _is_main_thread() and _shown and _shown[0] is not None:
        _shown[0].tick()


def shows_progress(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function with a bar, unless its `progress` is False or `on_progress` is given."""

    @functools.wraps(function)
    def shown(*args: P.args, **kwargs: P.kwargs) -> R:
        if _shown or not _is_main_thread():
            return function(*args, **kwargs)
        is_wanted = kwargs.get("progress", True) and kwargs.get("on_progress") is None
        bar = Bar() if is_wanted and (_is_notebook() or _is_terminal()) else None
        _shown.append(bar)
        if bar is not None:
            kwargs["on_progress"] = bar
        try:
            return function(*args, **kwargs)
        finally:
            _shown.clear()
            if bar is not None:
                bar.close()

    return shown


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # a stand-in, none at all, or closed
        return False


def _is_notebook() -> bool:
    """Return whether a page has asked for this cell.

    Papermill and nbconvert send no metadata with a request; JupyterLab, Notebook and VS Code name
    the cell in it.
    """
    if "google.colab" in sys.modules:
        return True
    if "ipykernel" not in sys.modules:
        return False
    from IPython import get_ipython

    kernel = getattr(get_ipython(), "kernel", None)
    return kernel is not None and bool(kernel.get_parent().get("metadata"))
