"""`Goal`: what a search looks for, and where. `Steps` tells how far it is, and when it ends."""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from memlab.devices.cards import Target
from memlab.recommending.known import Known
from memlab.recommending.space import Space
from memlab.running import Progress
from memlab.worker.isolation import OnProgress, runner
from memlab.workload import Workload

MOST_STEPS = 40  # that are recorded; each takes one or two seconds


@dataclass(slots=True)
class Steps:
    """Passes progress on, and says which step of the search it belongs to, and what it has found.

    Attributes:
        tell: gets the progress; None for nobody.
        patience: seconds after which the search begins nothing more, if something fits. Without an
            answer it may take twice as long, and a prediction that goes on then is ended. The step
            as it is is predicted however long that takes.
        started: when the search began.
        best: the best so far, in words; "" if nothing fits yet.
        has_begun: whether the step as it is was predicted.
        number: of the step that is looked at, from 1; 0 outside of the search.
        settings: that this step adds to the base, in words.
        workload: the name of the one that is looked at, if there are several.
    """

    tell: OnProgress | None
    patience: float
    started: float = field(default_factory=time.monotonic)
    best: str = ""
    has_begun: bool = False
    number: int = 0
    settings: str = ""
    workload: str = ""

    @property
    def seconds(self) -> float:
        """How long the search has gone on."""
        return time.monotonic() - self.started

    @property
    def rest_seconds(self) -> float:
        """How long a prediction that begins now may take."""
        return 2 * self.patience - self.seconds if self.has_begun else float("inf")

    @property
    def is_over(self) -> bool:
        """Whether nothing more is begun."""
        return self.rest_seconds <= (self.patience if self.best else 0.0)

    def found(self, best: str) -> None:
        """Say at once what is the best so far."""
        self.best = best
        self(Progress(text="found one that fits", fraction=1.0))

    def __call__(self, progress: Progress) -> None:
        """Pass progress on."""
        if self.tell is None:
            return
        if self.number:
            which = f" of {self.workload}" if self.workload else ""
            which += f" with {self.settings}" if self.settings else ""
            most = max(MOST_STEPS, self.number)  # each workload has one step at least
            done = (self.number - 1 + progress.fraction) / most
            best = f"; best so far: {self.best}" if self.best else ""
            progress = Progress(
                text=f"searching for {self.seconds:.0f} s, step {self.number} of at "
                f"most {most}{which}: {progress.text}{best}",
                fraction=min(max(done, self.seconds / (2 * self.patience)), 1.0),
            )
        self.tell(progress)


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """What is searched for, and where.

    Attributes:
        workload: what is trained.
        space: what may be changed.
        device: as `memlab.predict` takes it.
        target: the same device.
        limit_bytes: that a step may hold, the headroom taken off.
        most: how many settings to find.
        each_format: whether to find the fastest of each number format too, among the steps that are
            recorded, if it may be the fastest. How the times of two formats compare is the least
            certain of all, and a run can tell.
        seed: set before the model, the batch and each step.
        timeout_seconds: for each prediction.
        cancel: once set, the search ends.
        steps: gets all progress, and knows how long the search may go on.
        known: what earlier searches have predicted; this one adds to it.
    """

    workload: Workload
    space: Space
    device: Any
    target: Target
    limit_bytes: int
    most: int
    each_format: bool
    seed: int
    timeout_seconds: float
    cancel: threading.Event | None
    steps: Steps
    known: Known

    @property
    def options(self) -> dict[str, Any]:
        """Options of `predict_with_forecast`: the time that is left, and how to tell and stop."""
        left = max(self.steps.rest_seconds, 0.1)
        return {
            "seed": self.seed,
            "timeout_seconds": min(self.timeout_seconds, left),
            "on_progress": self.steps,
            "cancel": self.cancel,
        }

    def run(self, function: str, arguments: dict[str, Any]) -> Any:
        """Make a plan in the worker."""
        options = self.options
        return runner(True, options["timeout_seconds"], self.steps, self.cancel)(
            function, arguments
        )
