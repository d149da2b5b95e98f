"""`Goal`: what a search looks for, and where. `Steps` tells how far it is, and when it ends."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from memlab.api import predict_with_forecast
from memlab.config import StepConfig
from memlab.devices.cards import Target
from memlab.prediction.predict import Prediction
from memlab.result import Outcome, StepResult
from memlab.running import Ended, Progress
from memlab.runtime.isolation import OnProgress, predicting, runner
from memlab.runtime.same_step import circumstances_here
from memlab.runtime.sending import Stamp, stamp
from memlab.search.alternatives import Alternative, Space, cost_of
from memlab.workload import Workload

# What searches of this session have predicted: another limit needs no new recording of a
# step.
#
# A prediction does not depend on the limit: its forecast judges any. It is used again only
# for the same workload, device, seed and circumstances (`runtime/same_step.py`) and while
# no file of a person's own was edited that this session or a worker had imported or read
# for them.

MOST_KEPT = 2  # workloads with a device


@dataclass(slots=True)
class Known:
    """Predictions of one workload on one device.

    Attributes:
        predictions: by config, without a limit; those that ended without an answer are not kept.
        of_one_rank: configs of whose ranks only the one that holds most was predicted, though
            others hold something else.
        too_large: estimates that were left out as too large: the limit, the settings of the step,
            what was estimated, and the config. The same question then leaves them out again,
            though it knows more of the other estimates from the beginning.
        alternatives: estimates, by the settings of the step and what was estimated.
        stamps: of a person's own files that decided them, here and in the workers.
    """

    predictions: dict[StepConfig, Prediction] = field(default_factory=dict)
    of_one_rank: set[StepConfig] = field(default_factory=set)
    too_large: set[Any] = field(default_factory=set)
    alternatives: dict[Any, list[Alternative]] = field(default_factory=dict)
    stamps: dict[str, Stamp | None] = field(default_factory=dict)

    def predicted(
        self,
        workload: Workload,
        config: StepConfig,
        device: Any,
        options: dict[str, Any],
        *,
        every_rank: bool = True,
    ) -> Prediction:
        """Return a prediction without a limit, made now if there is none.

        Without `every_rank` that of the rank which holds most is enough.

        Raises:
            Ended: it was cancelled.
        """
        cancel: threading.Event | None = options.get("cancel")
        if cancel is not None and cancel.is_set():
            raise Ended(Outcome.CANCELLED, "stopped during the search")
        found = self.predictions.get(config)
        if found is None or (every_rank and config in self.of_one_rank):
            found = predict_with_forecast(
                workload, config, device, **options, every_rank=every_rank
            )
            self.stamps = {**predicting.stamps, **self.stamps}  # an edit meanwhile is one, too
            if found.result.outcome is Outcome.CANCELLED:
                raise Ended(found.result.outcome, found.result.message)
            if found.result.outcome in (Outcome.OK, Outcome.UNSUPPORTED):
                self.predictions[config] = found
                self.of_one_rank.discard(config)
                if not every_rank and not _has_every_rank(found.result):
                    self.of_one_rank.add(config)
        return found

    def cost_of(self, alternative: Alternative) -> float | None:
        """Return the cost of an alternative as it was predicted exactly; None if it was not."""
        known = self.predictions.get(alternative.result.config)
        return None if known is None else cost_of(known.result)

    def estimated(self, key: Any, make: Callable[[], list[Alternative]]) -> list[Alternative]:
        """Return the estimates with this key, made now if there are none."""
        if key not in self.alternatives:
            self.alternatives[key] = make()
        return self.alternatives[key]


def _has_every_rank(result: StepResult) -> bool:
    known = sum(len(rank.rank_numbers) for rank in result.ranks or ())
    return result.config.world_size in (1, known)


_known: OrderedDict[str, Known] = OrderedDict()


def known_of(workload: Workload, target: Target, seed: int, beside: int = 1) -> Known:
    """Return what is known of a workload on a device; nothing yet if its code cannot be told.

    Args:
        workload: what is trained.
        target: the device.
        seed: of the predictions.
        beside: how many workloads the search has, of which none may push out another.
    """
    deciding = [workload, target.name, seed, torch.get_num_threads()]
    key, stamps = circumstances_here(deciding)
    if key is None:
        return Known()
    found = _known.setdefault(key, Known())
    if any(stamp(file) != then for file, then in found.stamps.items()):
        found = _known[key] = Known()
    found.stamps = {**stamps, **found.stamps}
    _known.move_to_end(key)
    while len(_known) > max(MOST_KEPT, beside):
        _known.popitem(last=False)
    return found


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
