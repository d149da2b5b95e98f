"""A doctor's visit to a device: its settings predicted and measured, its operators timed.

A prediction is always made before its step is measured, so that it owes nothing to what it is
compared with.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memlab.arguments.units import format_bytes
from memlab.config import Precision
from memlab.doctor.keeping import RecordKeeper
from memlab.doctor.verdict import SettingPair
from memlab.records.records import Kind
from memlab.records.targets import costs_of
from memlab.result import Outcome, StepResult
from memlab.visits import driver, lines
from memlab.visits.bench import Bench
from memlab.visits.case import Case

MOST_SECONDS = 60.0  # of one prediction or measurement
UNDONE = (Outcome.TIMED_OUT, Outcome.CANCELLED)  # for want of time: it says nothing of the setting
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorVisit:
    """What the parts of a visit share.

    Attributes:
        bench: the device.
        keeper: of the record.
        end: on the monotonic clock.
        tell: called with what is being done.
        limit_bytes: that a step may reserve on a card; None on a CPU.
    """

    bench: Bench
    keeper: RecordKeeper
    end: float
    tell: Tell
    limit_bytes: int | None = None

    @property
    def seconds_left(self) -> float:
        """What is left of the visit."""
        return self.end - time.monotonic()

    def pairs(self, cases: Sequence[Case]) -> Iterator[SettingPair | str]:
        """Predict and measure settings; yield each pair, and a sentence on what was left out."""
        known: dict[str, StepResult] = {}
        done = 0
        for number, case in enumerate(cases, 1):
            if self.seconds_left <= 0:
                yield f"{len(cases) - done} of {len(cases)} settings were left out: time was over."
                return

            said = f"{number} of {len(cases)}: {case.workload}, {case.config}"
            self.tell(f"predicting {said}")
            key = dataclasses.replace(case, group="").key("")
            if key not in known:
                known[key] = self.bench.predict(case, self._most)
            if why := self._too_large(known[key]):
                yield f"{case.workload}, {case.config} was left out: {why}."
                continue

            self.tell(f"measuring {said}")
            measured = self._measured(case)
            if measured.outcome in UNDONE and self.seconds_left <= 0:
                continue  # to the sentence above
            done += 1
            yield SettingPair(case=case, predicted=known[key], measured=measured)
            if driver.is_broken(self.bench.device):
                yield (
                    f"{self.bench.device} does not answer this process any more after "
                    f"{case.workload}, {case.config}, so that the rest was left out; run doctor "
                    "again, and send its record in an issue."
                )
                return

    @property
    def _most(self) -> float:
        return max(min(self.seconds_left, MOST_SECONDS), 1.0)

    def _too_large(self, predicted: StepResult) -> str:
        """Return why a step is not run on a card that others use too; empty if it is."""
        peak = predicted.counted_peak
        if self.limit_bytes is None or peak is None or peak.upper_bytes <= self.limit_bytes:
            return ""
        return (
            f"it may take {format_bytes(peak.upper_bytes)}, and this visit uses at most "
            f"{format_bytes(self.limit_bytes)} of the card"
        )

    def _measured(self, case: Case) -> StepResult:
        run = lines.run_of(self.bench, case, self.keeper.visit, self._most, self.limit_bytes)
        if run.result.outcome not in UNDONE:
            self._keep(Kind.RUN, case, run.to_line())
        return run.result

    def _keep(self, kind: Kind, case: Case, line: Mapping[str, Any]) -> None:
        case = dataclasses.replace(case, kind=kind)
        self.keeper.add(kind, {**line, "key": case.key(torch.__version__)})

    def operators(self, cases: Sequence[Case]) -> None:
        """Record what the operators of these settings take, as long as there is time."""
        for number, case in enumerate(cases, 1):
            if self.seconds_left <= 0:
                return
            self.tell(f"operators of {number} of {len(cases)}: {case.workload}, {case.config}")
            asked = dataclasses.replace(case, kind=Kind.OPERATORS)
            line = lines.about(asked, self.keeper.visit)
            self._keep(Kind.OPERATORS, case, line | lines.operators(self.bench, asked, self._most))

    def predicted_again(self, pairs: Sequence[SettingPair]) -> list[SettingPair]:
        """Return pairs with predictions that use the operators that were timed in this visit."""
        timed = [line for kind, line in self.keeper.lines if kind is Kind.OPERATORS]
        found = []
        for pair in pairs:
            if self.seconds_left <= 0:
                break
            self.tell(f"predicting {pair.case.workload} by the times of its operators")
            tf32 = pair.case.config.precision is Precision.TF32
            costs = costs_of(timed, tf32=tf32)
            target = dataclasses.replace(self.bench.target, costs=costs)
            bench = dataclasses.replace(self.bench, target=target)
            found.append(dataclasses.replace(pair, predicted=bench.predict(pair.case, self._most)))
        return found
