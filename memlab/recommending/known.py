"""What searches of this session have predicted: another limit needs no new recording of a step.

A prediction does not depend on the limit: its forecast judges any. It is used again only for the
same workload, device, seed and circumstances (`sending/same_step.py`) and while no file of a
person's own was edited that this session or a worker had imported or read for them.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from memlab.api import predict_with_forecast
from memlab.config import StepConfig
from memlab.devices.cards import Target
from memlab.predicting.predict import Prediction
from memlab.recommending.alternatives import Alternative, cost_of
from memlab.result import Outcome, StepResult
from memlab.running import Ended
from memlab.sending.same_step import circumstances_here
from memlab.sending.sources import Stamp, stamp
from memlab.worker.isolation import predicting
from memlab.workload import Workload

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
