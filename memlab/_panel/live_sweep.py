"""`live_sweep`: a sweep in a thread, with a picture that fills in and buttons to pause and stop it.

The picture is drawn between two settings, never beside one, so that it does not disturb a time that
is being measured.
"""

import contextlib
import html
import threading
import time
from typing import Any

import ipywidgets as widgets
import torch

from memlab import plots
from memlab.arguments.checks import anything, checked
from memlab.errors import ConfigError
from memlab.result import StepResult
from memlab.running import Progress
from memlab.sweeping.sweep import sweep
from memlab.sweeping.table import SweepTable
from memlab.workload import Workload

DRAW_SECONDS = 1.0  # between two pictures
TELL_SECONDS = 0.1  # between two lines of progress
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
        self._picture = widgets.HTML(_drawn([]))
        self._pausing = widgets.ToggleButton(description="Pause", icon="pause")
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
            MemlabError: whatever `sweep` has raised.
            TimeoutError: it has not ended by then.
        """
        self._thread.join(timeout_seconds)
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
        self._pausing.description = "Go on" if change["new"] else "Pause"

    def _tell(self, progress: Progress) -> None:
        self._bar.value = progress.fraction
        if time.monotonic() - self._told_at >= TELL_SECONDS:
            self._text.value = html.escape(progress.text)
            self._told_at = time.monotonic()

    def _show(self, result: StepResult) -> None:
        self.results.append(result)
        if time.monotonic() - self._drawn_at >= DRAW_SECONDS:
            self._draw()

    def _draw(self) -> None:
        self._picture.value = _drawn(self.results)
        self._drawn_at = time.monotonic()

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """Return the widgets, and one line for pages without them."""
        return {**dict(self._box._repr_mimebundle_() or {}), "text/plain": repr(self)}

    def __repr__(self) -> str:
        """Return one line."""
        if self.table is not None:
            return repr(self.table)
        return f"sweep that runs: {len(self.results)} settings have ended"


def _drawn(results: list[StepResult]) -> str:
    """Return the picture of the results: memory against time, a dot each."""
    labels = [str(result.config) for result in results]
    figure = plots.memory_against_time(results, labels=labels)
    return plots.to_svg(figure, label="memory against time of the settings that have ended")
