"""What the panel knows about its notebook: its variables, and which cell made which panel.

A cell that is run again closes its former panel and ends a run of it.
"""

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol


class Closable(Protocol):
    """Anything that can be closed."""

    def close(self) -> None:
        """Close it."""


class Shown(Protocol):
    """An output that can be replaced in place."""

    def update(self, bundle: Mapping[str, Any], *, raw: bool) -> None:
        """Show this MIME bundle instead."""


PASS_SECONDS = 0.02  # in which a thread that is free takes up what has arrived for it
_made: dict[str, tuple[str, list[Closable]]] = {}  # cell -> (execution, panels it made)


def namespace() -> Mapping[str, Any]:
    """Return the names of the notebook; empty outside one."""
    shell = _shell()
    return {} if shell is None else dict(shell.user_ns)


def replace_former(panel: Closable) -> None:
    """Close the panels that an earlier execution of this cell made, and remember this one."""
    cell, execution = _here()
    if not cell:
        return

    former, panels = _made.get(cell, ("", []))
    if former != execution:
        for old in panels:
            old.close()
        panels = []

    _made[cell] = (execution, [*panels, panel])


def place() -> str:
    """Return which panel of which cell of which notebook is made next; "" outside JupyterLab.

    It is the same after a restart of the kernel.
    """
    notebook, (cell, execution) = os.environ.get("JPY_SESSION_NAME", ""), _here()
    if not notebook or not cell:
        return ""
    former, panels = _made.get(cell, ("", []))
    return f"{notebook} {cell} {len(panels) if former == execution else 0}"


def show(bundle: Mapping[str, Any]) -> Shown:
    """Show a MIME bundle as an output of the running cell, and return a handle to replace it."""
    from IPython.display import display

    shown: Shown = display(dict(bundle), raw=True, display_id=True)  # type: ignore[no-untyped-call]
    return shown


def after_main_thread(function: Callable[[], None], most_seconds: float) -> None:
    """Call a function once the kernel's main thread has handled what was sent to it before.

    JupyterLab sends the first change of each control to that thread, and all that follows to
    another one. Without this, a press could be handled before a change that came before it.

    Args:
        function: called at once in the main thread, and where there is no such thread.
        most_seconds: after which it is called though the main thread, say in a long cell, is busy.
    """
    loop = getattr(getattr(_shell(), "kernel", None), "io_loop", None)
    if loop is None or threading.current_thread() is threading.main_thread():
        function()
        return

    first = threading.Lock()

    def call() -> None:
        if first.acquire(blocking=False):
            timer.cancel()
            function()

    timer = threading.Timer(most_seconds, call)
    timer.daemon = True
    timer.start()
    loop.add_callback(loop.call_later, PASS_SECONDS, call)


def _here() -> tuple[str, str]:
    """Return the ids of the running cell and of this execution of it; "" where there are none."""
    parent: dict[str, Any] = getattr(_shell(), "get_parent", dict)() or {}
    metadata = parent.get("metadata") or {}
    return str(metadata.get("cellId", "")), str((parent.get("header") or {}).get("msg_id", ""))


def _shell() -> Any:
    try:
        from IPython import get_ipython
    except ImportError:
        return None
    return get_ipython()
