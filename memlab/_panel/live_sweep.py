"""`live_sweep`: a sweep in a thread, with a picture that fills in and buttons to pause and stop it.

The picture is drawn in the sweep's thread, after a result was written. Without an executor that is
between two settings, so it disturbs no time that is being measured. With an executor other settings
run meanwhile; drawing takes from those on this machine a tenth of a second, once a second at most.
What cannot be drawn or shown ends no sweep.
"""

import contextlib
import html
import math
import threading
import time
from typing import Any

import ipywidgets as widgets
import torch

from memlab import plots
from memlab._util.checks import anything, checked
from memlab.errors import ConfigError, MemlabError
from memlab.result import StepResult
from memlab.running import Progress
from memlab.search.sweep import SweepTable, sweep
from memlab.workload import Workload

DRAW_SECONDS = 1.0  # between two pictures
TELL_SECONDS = 0.1  # between two lines of progress
SIZE = (6.4, 3.4)  # of the picture, in inches
PAUSE_LABELS = (("Pause", "pause"), ("Go on", "play"))
LOOK_SECONDS = 0.2  # between two looks whether a sweep that is waited for was paused
PAUSED = (
    "the sweep is paused, and would not end while a cell waits for it: press Go on, or call "
    "go_on(), and then wait()"
)
OWN = ("on_progress", "on_result", "pause", "cancel")  # options of `sweep` that the buttons take


@checked(configs=anything)
def live_sweep(
    workload: Workload,
    configs: Any,
    device: str | torch.device | None = None,
    **options: Any,
) -> "LiveSweep":
    """Start `memlab.sweep` in a thread and return what shows it in a notebook.

    Make it the last line of a cell. The kernel stays free; `wait()` returns the table.

    Args:
        workload: as for `sweep`.
        configs: as for `sweep`.
        device: as for `sweep`.
        **options: further arguments of `sweep`.

    Raises:
        MemlabError: one of the options belongs to the buttons. What `sweep` raises is raised by
            `wait`, and shown.

    >>> import memlab
    >>> live = memlab.live_sweep(memlab.workloads.get("vit-digits"), {"batch_size": [2, 4]}, "t4")
    >>> list(live.wait().frame()["batch_size"])
    [2, 4]
    """
    taken = [name for name in OWN if name in options]
    if taken:
        raise ConfigError(f"{taken[0]} belongs to the buttons of a live sweep; call memlab.sweep")
    return LiveSweep(workload, configs, device, options)


class LiveSweep:
    """A sweep that runs in a thread.

    Attributes:
        results: of the settings that have ended, in the order in which they did.
        table: once the sweep has ended; None before, or if it failed.
    """

    def __init__(self, workload: Workload, configs: Any, device: Any, options: Any) -> None:
        self.results: list[StepResult] = []
        self.table: SweepTable | None = None
        self._error: BaseException | None = None
        self._pause, self._cancel = threading.Event(), threading.Event()
        self._told_at = self._drawn_at = 0.0
        self._bar = widgets.FloatProgress(min=0.0, max=1.0, description="sweep")
        self._text = widgets.HTML("starting")
        # as wide as it is drawn, so that its text is as large as the page's, and it ends on screen
        self._picture = widgets.HTML(_drawn([]), layout={"max_width": f"{100 * SIZE[0]:.0f}px"})
        self._pausing = widgets.ToggleButton()
        self._pausing.description, self._pausing.icon = PAUSE_LABELS[False]
        self._pausing.tooltip = "begin no further setting until this is pressed again"
        self._pausing.observe(self._pause_pressed, "value")
        self._stop = widgets.Button(description="Stop", icon="stop")
        self._stop.tooltip = "end the sweep; what it has is kept, and the same call goes on later"
        self._stop.on_click(lambda _: self.stop())
        bar = widgets.HBox([self._bar, self._pausing, self._stop])
        self._box = widgets.VBox([bar, self._text, self._picture])
        self._thread = threading.Thread(
            target=self._run, args=(workload, configs, device, options), name="sweep", daemon=True
        )
        self._thread.start()

    def wait(self, timeout_seconds: float | None = None) -> SweepTable:
        """Return the table once the sweep has ended.

        Args:
            timeout_seconds: how long to wait; None is until it has.

        Raises:
            MemlabError: the sweep is paused, or is paused meanwhile; or whatever `sweep` has
                raised.
            TimeoutError: it has not ended by then.
        """
        end = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        while self._thread.is_alive() and (rest := end - time.monotonic()) > 0:
            if self._pause.is_set() and not self._cancel.is_set():
                raise MemlabError(PAUSED)
            self._thread.join(min(rest, LOOK_SECONDS))

        if self._error is not None:
            raise self._error
        if self.table is None:
            raise TimeoutError("the sweep has not ended; wait longer, or press Stop")
        return self.table

    def pause(self) -> None:
        """Begin no further setting until `go_on` is called."""
        self._pausing.value = True

    def go_on(self) -> None:
        """Begin settings again."""
        self._pausing.value = False

    def stop(self) -> None:
        """End the sweep. What it has is in the store; the same call goes on later."""
        self._cancel.set()
        self._stop.disabled = True

    def _run(self, workload: Workload, configs: Any, device: Any, options: Any) -> None:
        try:
            self.table = sweep(
                workload,
                configs,
                device,
                **options,
                on_progress=self._tell,
                on_result=self._show,
                pause=self._pause,
                cancel=self._cancel,
            )
            self._draw()
            said = str(self.table)
        except BaseException as error:
            self._error, said = error, f"The sweep has ended: {error}"
        with contextlib.suppress(Exception):  # the page may be gone
            self._text.value = html.escape(said)
            self._pausing.disabled = self._stop.disabled = True

    def _pause_pressed(self, change: Any) -> None:
        (self._pause.set if change["new"] else self._pause.clear)()
        is_paused = bool(change["new"])
        self._pausing.description, self._pausing.icon = PAUSE_LABELS[is_paused]
        if is_paused:
            self._text.value = "paused: no further setting begins"

    def _tell(self, progress: Progress) -> None:
        with contextlib.suppress(Exception):  # the page may be gone
            self._bar.value = progress.fraction
            if time.monotonic() - self._told_at >= TELL_SECONDS:
                paused = "paused; " if self._pause.is_set() else ""
                self._text.value = html.escape(paused + progress.text)
                self._told_at = time.monotonic()

    def _show(self, result: StepResult) -> None:
        self.results.append(result)
        # a sweep that is paused may have no later result to draw this one with
        if self._pause.is_set() or time.monotonic() - self._drawn_at >= DRAW_SECONDS:
            self._draw()

    def _draw(self) -> None:
        try:
            picture = _drawn(self.results)
        except Exception as error:  # the results are there all the same
            said = html.escape(f"{type(error).__name__}: {error}")
            picture = f"<p>The picture could not be drawn ({said}); the sweep goes on.</p>"
        with contextlib.suppress(Exception):  # the page may be gone
            self._picture.value = picture
        self._drawn_at = time.monotonic()

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """Return the widgets, and one line for pages without them."""
        return {**dict(self._box._repr_mimebundle_() or {}), "text/plain": repr(self)}

    def __repr__(self) -> str:
        """Return one line."""
        if self.table is not None:
            return repr(self.table)
        if self._error is not None:
            return f"sweep that has failed: {self._error}"
        return f"sweep that runs: {len(self.results)} settings have ended"


def _drawn(results: list[StepResult]) -> str:
    """Return the picture of the results: memory against time, a dot each."""
    labels = [str(result.config) for result in results]
    figure = plots.memory_against_time(results, labels=labels, size=SIZE)
    return plots.to_svg(figure, label="memory against time of the settings that have ended")
