"""`Beside`: asks memlab what takes a while in a thread beside the kernel's, one thing at a time.

*Stop* ends it as it ends a run. A failure becomes a sentence, because a thread has no caller.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

from memlab._panel import texts, verdicts
from memlab._panel.job import BaseJob, FitJob, Throttle
from memlab._panel.page import Page
from memlab._panel.view import View
from memlab.worker.isolation import prewarm

T = TypeVar("T")


class Beside:
    """Asks on behalf of a pane of the page.

    Args:
        view: of the panel.
        page: shows progress and sentences, and knows whether a run goes on.
    """

    def __init__(self, view: View, page: Page) -> None:
        self._view, self._page = view, page

    def begin(self, job: FitJob | BaseJob) -> bool:
        """Take the turn of a job; return whether it was free."""
        with self._page.lock:
            if self._page.job is not None:
                return False
            self._page.begin(job)
            self._page.show_ready(True)
            self._view.show_progress(0.0)
            self._page.forecasts.ahead([])  # they would take turns with it in the worker
            return True

    def ask(
        self,
        job: FitJob | BaseJob,
        question: Callable[[Throttle], T],
        arrived: Callable[[T], None],
        failed: Callable[[str], None],
    ) -> None:
        """Ask in a thread, and let the next job begin once it has ended.

        Args:
            job: that has begun.
            question: returns the answer; it tells its progress to what it is given.
            arrived: takes the answer, unless the panel is closed.
            failed: takes a sentence that says why there is none.
        """

        def work() -> None:
            tell = Throttle(self._page.tell)
            try:
                with self._page.guarded():
                    try:
                        answer = question(tell)
                    except Exception as error:  # a thread has no caller
                        self._say(job, error, failed)
                        return
                    tell.drop()  # late progress would overwrite the answer
                    if not self._page.closed:
                        arrived(answer)
            finally:
                tell.close()
                self._end()

        threading.Thread(target=work, daemon=True).start()

    def _say(self, job: FitJob | BaseJob, error: Exception, failed: Callable[[str], None]) -> None:
        was_stopped = job.cancel.is_set()
        text = job.stopped if was_stopped else texts.error_text(error)
        failed(text)
        self._page.say(text, verdicts.OPEN if was_stopped else verdicts.BAD)

    def _end(self) -> None:
        """Let the next job begin."""
        with self._page.lock:
            self._page.job = None
        self._view.show_progress(0.0)
        self._page.refresh()
        prewarm()  # if the job was stopped, its worker is gone
