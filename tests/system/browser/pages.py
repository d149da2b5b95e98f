"""The page of a browser test: a new one, or the one that the test before has left.

Loading JupyterLab takes most of a test, so the page of the quick notebook is used again as long as
its tests pass. What a test may leave on it is put right here: its size, its theme, the place of the
mouse. Left out: the notebook, whose cells `panel_page.run_cells` runs again.
"""

import contextlib
import os
from typing import Any

from tests.system.browser import lab_browser

# until the picture of the last move is on screen
NEXT_FRAME = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
# the smallest size of a target is not among the rules that run by themselves
OPTIONS = {"resultTypes": ["violations"], "rules": {"target-size": {"enabled": True}}}
VIEWPORT = {"width": 1300, "height": 1500}
IS_TRACED = os.environ.get("MEMLAB_TRACE") == "1"
"""A trace shows each step of a failed test in `playwright show-trace`, and costs a third more."""

NOT_OURS = (
    "Could not restore the debugger state",  # JupyterLab, where a kernel is restarted
    "Error: Canceled future for create_subshell_request",  # the same
    "Error: widget model not found",  # ipywidgets, where a page opens while its panel is closed
    "[anywidget] Failed to initialize model.",  # the same, 2 s later
    "Cannot read properties of undefined (reading 'schema')",  # Notebook 7.6 itself, as it opens
    "Command 'filebrowser:open-path' not registered",  # the same, where JupyterLab was before
)


def violations(page: Any, part: str) -> Any:
    """Return what axe-core finds in the elements of a page that a selector names."""
    from axe_playwright_python.sync_playwright import Axe

    return Axe().run(page, part, OPTIONS).response["violations"]


class Pages:
    """Holds the one page that is open.

    Args:
        browser: Playwright's Chromium.
        lab: the address of the only server that a page may talk to.

    Attributes:
        is_new: whether nothing was opened yet on the page that was taken last.
    """

    def __init__(self, browser: Any, lab: str) -> None:
        self._browser, self._lab = browser, lab
        self._open: Any = None
        self.is_new = True

    def take(self, *, again: bool) -> Any:
        """Return a page whose `blocked` and `errors` are empty.

        Args:
            again: whether it may be the one that is open, with the quick notebook on it.
        """
        if not again:
            self.close()
        self.is_new = self._open is None
        if self.is_new:
            self._open = self._new()
        else:
            self._put_right(self._open)
        self._open.blocked.clear()
        self._open.errors.clear()
        return self._open

    def close(self) -> None:
        """Close the page, so that the next one is new."""
        if self._open is not None:
            self._open.context.close()
            self._open = None

    def _new(self) -> Any:
        context = self._browser.new_context(
            viewport=VIEWPORT, reduced_motion="reduce", color_scheme="light"
        )
        if IS_TRACED:
            context.tracing.start(screenshots=True, snapshots=True)
        page = context.new_page()
        page.set_default_timeout(1000 * lab_browser.PATIENCE_SECONDS)
        page.blocked, page.errors = [], []
        lab_browser.loopback_only(context, self._lab, page.blocked)

        def note(text: str) -> None:
            page.errors.extend([text] * (not text.startswith(NOT_OURS)))

        page.on("pageerror", lambda error: note(str(error)))
        page.on("console", lambda said: note(said.text) if said.type == "error" else None)
        return page

    @staticmethod
    def _put_right(page: Any) -> None:
        page.set_viewport_size(VIEWPORT)
        page.mouse.move(0, 0)
        if page.evaluate("() => document.body.dataset.jpThemeLight") == "false":
            lab_browser.set_theme(page, dark=False)


@contextlib.contextmanager
def saved_page(browser, file):
    """Open a saved page, which must ask for nothing else and raise or log nothing."""
    opened = browser.new_page(viewport={"width": 1366, "height": 900})
    opened.asked, opened.wrong = [], []
    opened.on("request", lambda request: opened.asked.append(request.url))
    opened.on("pageerror", lambda error: opened.wrong.append(str(error)))
    opened.on("console", lambda said: opened.wrong.append(said.text))
    opened.goto(file.as_uri())
    opened.wait_for_selector(".ml-chart canvas")
    yield opened
    assert opened.asked == [file.as_uri()], "it asks nobody else"
    assert opened.wrong == []
    opened.close()
