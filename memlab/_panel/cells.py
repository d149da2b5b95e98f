"""What the panel knows about its notebook: its variables, and which cell made which panel.

A cell that is run again closes its former panel and ends a run of it.
"""

import os
from collections.abc import Mapping
from typing import Any, Protocol


class Closable(Protocol):
    """Anything that can be closed."""

    def close(self) -> None:
        """Close it."""


class Shown(Protocol):
    """An output that can be replaced in place."""

    def update(self, bundle: Mapping[str, Any], *, raw: bool) -> None:
        """Show this MIME bundle instead."""


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
