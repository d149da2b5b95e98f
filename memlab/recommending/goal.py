"""`Goal`: what a search looks for, and where. `Steps` tells how far it is."""

from dataclasses import dataclass
from typing import Any

from memlab.devices.cards import Target
from memlab.recommending.known import Known
from memlab.recommending.space import Space
from memlab.running import Progress, Run
from memlab.worker.isolation import OnProgress
from memlab.workload import Workload

MOST_STEPS = 40  # that are recorded; each takes one or two seconds


@dataclass(slots=True)
class Steps:
    """Passes progress on, and says which step of the search it belongs to.

    Attributes:
        tell: gets the progress; None for nobody.
        number: of the step that is looked at, from 1; 0 outside of the search.
        settings: that this step adds to the base, in words.
        workload: the name of the one that is looked at, if there are several.
    """

    tell: OnProgress | None
    number: int = 0
    settings: str = ""
    workload: str = ""

    def __call__(self, progress: Progress) -> None:
        """Pass progress on."""
        if self.tell is None:
            return
        if self.number:
            which = f" of {self.workload}" if self.workload else ""
            which += f" with {self.settings}" if self.settings else ""
            most = max(MOST_STEPS, self.number)  # each workload has one step at least
            progress = Progress(
                text=f"step {self.number} of at most {most}{which}: {progress.text}",
                fraction=(self.number - 1 + progress.fraction) / most,
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
        options: of `predict_with_forecast`: the time limit, and how to tell and stop.
        run: how a plan is made.
        steps: gets all progress.
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
    options: dict[str, Any]
    run: Run
    steps: Steps
    known: Known
