"""`PanelState`: all that the kernel and the page share, as one widget; the page is its only view.

The kernel writes the traits, the page sends messages. Both are JSON but for the files of steps and
runs, which the page asks for by number and gets as bytes. `page/kernel.js` is the other side.

    trait       what it holds                                            written
    catalog     what can be chosen: workloads, devices, controls, help   once
    still       id of what a saved notebook keeps, hidden beside a view  once
    form        what the workload on screen offers, what has no effect   with the settings
    asked       the settings, and which move of which view made them     with the settings
    answer      what is known of them: lines, badge, advice, step files  with the settings, or later
    job         what goes on: a run, a search, a comparison              ten times a second at most
    runs        the table of runs                                        after a run
    panes       what has been opened: code, cards, ranks and others      when it changes
"""

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import anywidget
import traitlets

from memlab._panel.joined import PAGE, joined
from memlab.runtime import isolation

Message = Mapping[str, Any]


class PanelState(anywidget.AnyWidget):
    """The shared state of a panel.

    Args:
        on_message: called with each message of a page, on any thread.

    Attributes:
        saved: returns what a page without a kernel is given, or None; see `page/app.js`.
    """

    _esm = joined("widget.js")
    _css = (PAGE / "page.css").read_text("utf-8")

    catalog = traitlets.Dict().tag(sync=True)
    still = traitlets.Unicode().tag(sync=True)
    form = traitlets.Dict().tag(sync=True)
    asked = traitlets.Dict().tag(sync=True)
    answer = traitlets.Dict().tag(sync=True)
    job = traitlets.Dict().tag(sync=True)
    runs = traitlets.Dict().tag(sync=True)
    panes = traitlets.Dict().tag(sync=True)

    def __init__(self, on_message: Callable[[Message], None], **values: Any) -> None:
        super().__init__(still=f"memlab-{uuid.uuid4().hex[:8]}", **values)
        self.saved: Callable[[], Message | None] = lambda: None
        self._lock = threading.RLock()  # ipywidgets' own holding is for one thread
        self.on_msg(lambda _, content, __: on_message(content))

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Send what the block changes as one message."""
        with self._lock, self.hold_sync():
            yield

    def tell(self, **traits: Any) -> None:
        """Write traits; one that is as it was is not sent again."""
        with self._lock:
            for name, value in traits.items():
                setattr(self, name, value)

    def _get_embed_state(self, drop_defaults: bool = False) -> dict[str, Any]:
        """Return what `ipywidgets.embed` writes: with the step, for its page has no kernel."""
        # what anywidget takes for defaults are the script and the style
        found: dict[str, Any] = super()._get_embed_state(drop_defaults=False)
        found["state"]["saved"] = self.saved()
        return found

    def send_state(self, key: Any = None) -> None:
        """Send traits, unless the kernel is ending: see `send`."""
        if not isolation.leaving.is_set():
            super().send_state(key)
            self._listen()

    def send(self, content: Message, buffers: Any = None) -> None:
        """Send a message, unless the kernel is ending, when it would be lost, or spoil others."""
        if not isolation.leaving.is_set():
            super().send(content, buffers)
            self._listen()

    def _listen(self) -> None:
        """Have ipykernel hear the page by whatever subshell it speaks.

        ipykernel 7 notes by which subshell came what a sent message answers, and leads all that
        the page says there, though it may have ended: that by which JupyterLab asks for widgets
        ends when a tab has opened. A thread of the panel answers whatever came last.
        """
        getattr(self.comm, "__dict__", {}).pop("_reply_subshell_id", None)

    def send_file(self, kind: str, number: int, file: bytes) -> None:
        """Send the file of a "step" or of a "run"."""
        self.send({"type": kind, "id": number}, [file])

    def send_csv(self, text: str) -> None:
        """Send all runs as a CSV file."""
        self.send({"type": "csv", "text": text})
