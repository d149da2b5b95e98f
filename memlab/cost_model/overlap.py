"""The time of operators on several streams: a list schedule, from what a recording says of them.

The idea. The host issues one operator after the other and waits for none. A stream runs its
operators in that order, and each as soon as the one before it is done and whatever the stream was
told to wait for. With a kernel of 3 ms on stream 0, a collective of 5 ms on stream 1, and a kernel
of 1 ms on stream 0 that waits for the collective:

    stream 0    |--- kernel ---|         |- kernel -|
    stream 1    |------ collective ------|
                0              3         5          6 ms

    without the wait the step would take 5 ms; one after the other they would take 9 ms

With one stream the time is the sum of the operators' times. Left out: that kernels and collectives
beside each other slow each other down, since they share multiprocessors and memory; the other
ranks, which are taken to be as fast as this one. How long Python takes between operators is in
doubt: a step of small kernels may wait for it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memlab._util.units import format_seconds
from memlab.cost_model.roofline import LAUNCH_SECONDS, SLOW_LAUNCH_SECONDS
from memlab.result import format_percent
from memlab.tracing.recording import OpTrace, StreamMark

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import


DEFAULT = 0  # the stream of a step's own operators
LEAST_SHARE = 0.005  # of the communication, below which nothing is hidden: floats leave a rest
OF_HOST = "Kernels of this step are so short"  # how the note on the host begins
MUCH_WAITING = 0.1  # for the host, as a share of a step's time: it is said


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Overlap:
    """How the operators of a recording with several streams overlap.

    Attributes:
        interval_seconds: float64, (intervals,); see `seconds_of_streams`.
        step_seconds: of the last recorded step.
        communication_seconds: of its collectives, one after the other.
        exposed_seconds: what the step takes longer than it would without them.
        waiting_seconds: what it takes longer if the host is slow.
        half_width: the relative half-width of its time, without what a slow host adds.
    """

    interval_seconds: npt.NDArray[np.float64]
    step_seconds: float
    communication_seconds: float
    exposed_seconds: float
    waiting_seconds: float
    half_width: float

    @property
    def slow_factor(self) -> float | None:
        """How many times as long it takes with a slow host; None where that is not much."""
        return _if_much(self.step_seconds, self.step_seconds + self.waiting_seconds)

    @property
    def hidden_share(self) -> float:
        """The share of the communication that other operators hide; a tiny one is 0."""
        if not self.communication_seconds:
            return 0.0
        share = min(1.0 - self.exposed_seconds / self.communication_seconds, 1.0)
        return share if share >= LEAST_SHARE else 0.0


def overlap_of(
    recording: OpTrace,
    seconds: npt.NDArray[np.float64],
    *,
    kernels_half_width: float,
    links_half_width: float,
    launch_seconds: float,
    slow_launch_seconds: float,
) -> Overlap:
    """Return how the operators of a recording overlap.

    The half-width has three parts, which do not depend on one another: what the times of kernels
    make of the step if all of them are too short or too long by theirs, the same of collectives,
    and all that is hidden. For how much kernels and collectives slow each other down is not known,
    and at worst they run one after the other. What a slow host adds is no part of it, since it can
    be many times the step and only makes it longer.

    Args:
        recording: of two steps.
        seconds: float64, (operators,), of each alone.
        kernels_half_width: the relative half-width of the times of kernels.
        links_half_width: of the times of collectives.
        launch_seconds: that the host takes to issue an operator; in doubt as kernels are.
        slow_launch_seconds: that it takes where Python does more between them.
    """
    is_sent = np.array([bool(operator.ranks) for operator in recording.operators], dtype=bool)
    last = max(interval.step for interval in recording.intervals)
    in_last = np.array([interval.step == last for interval in recording.intervals], dtype=bool)
    of_last = in_last[[operator.interval for operator in recording.operators]]

    def total(kernels: float, links: float, launch: float = launch_seconds) -> float:
        varied = seconds * np.where(is_sent, links, kernels)
        return float(seconds_of_streams(recording, varied, kernels * launch)[in_last].sum())

    def spread(kernels: float, links: float) -> float:
        return (total(1.0 + kernels, 1.0 + links) - total(1.0 - kernels, 1.0 - links)) / 2

    of_intervals = seconds_of_streams(recording, seconds, launch_seconds)
    whole, sent = float(of_intervals[in_last].sum()), float(seconds[is_sent & of_last].sum())
    exposed = whole - total(1.0, 0.0)
    hidden = max(sent - exposed, 0.0)
    waiting = max(total(1.0, 1.0, slow_launch_seconds) - whole, 0.0)
    spreads = spread(kernels_half_width, 0.0), spread(0.0, links_half_width)
    width = math.hypot(*spreads, hidden)
    return Overlap(
        interval_seconds=of_intervals,
        step_seconds=whole,
        communication_seconds=sent,
        exposed_seconds=exposed,
        waiting_seconds=waiting,
        half_width=max(width / whole, kernels_half_width),
    )


def overlap_notes(overlap: Overlap) -> list[str]:
    """Return sentences on what communication and the host add to the time and its uncertainty."""
    said = (
        f"Collectives take {format_seconds(overlap.communication_seconds)}, of which "
        f"{format_percent(overlap.hidden_share)} is hidden behind other operators. The time of the "
        f"step is stated ± {overlap.half_width:.0%}, by the doubt about kernels and links, and "
        "because what runs beside each other may slow each other down."
    )
    if not overlap.communication_seconds:
        said = (
            "One rank has no other to send to, so collectives take no time. The time of the step "
            f"is stated ± {overlap.half_width:.0%}, by the doubt about kernels."
        )
    return [said, *host_notes(overlap.slow_factor)]


def slow_host_factor(recording: OpTrace, seconds: npt.NDArray[np.float64]) -> float | None:
    """Return how many times as long a step takes with a slow host; None where that is not much.

    Args:
        recording: of a step or more, which count together.
        seconds: float64, (operators,), of each alone.
    """
    in_step = np.array([interval.step >= 0 for interval in recording.intervals], dtype=bool)
    usual, slow = (
        float(seconds_of_streams(recording, seconds, launch)[in_step].sum())
        for launch in (LAUNCH_SECONDS, SLOW_LAUNCH_SECONDS)
    )
    return _if_much(usual, slow)


def _if_much(usual: float, slow: float) -> float | None:
    return slow / usual if slow - usual >= MUCH_WAITING * usual > 0 else None


def host_notes(slow_factor: float | None) -> list[str]:
    """Return a note on a step that may wait for its host; none for any other."""
    if slow_factor is None:
        return []
    own, most = format_seconds(LAUNCH_SECONDS), format_seconds(SLOW_LAUNCH_SECONDS)
    return [
        f"{OF_HOST} that the card may wait for the host, which is taken to start one each {own}; "
        f"with {most} of Python for each, as under Megatron, the step takes {slow_factor:.2g} "
        "times as long, which the ± does not include. A larger batch, or fewer micro-batches, "
        "waits less."
    ]


def seconds_of_streams(
    recording: OpTrace, seconds: npt.NDArray[np.float64], launch_seconds: float
) -> npt.NDArray[np.float64]:
    """Return the time of each interval, (intervals,): how much later the default stream is done.

    All streams are done before a step begins, as when steps are measured, and the last interval of
    a step ends when they are.

    Args:
        recording: of the run.
        seconds: float64, (operators,), of each alone.
        launch_seconds: that the host takes to issue an operator that takes any time.
    """
    clock = _Clock(recording.marks, launch_seconds)
    taken = np.zeros(len(recording.intervals))
    interval, began = 0, 0.0

    for number, operator in enumerate(recording.operators):
        clock.pass_marks(number)
        if operator.interval != interval:
            here, there = recording.intervals[interval], recording.intervals[operator.interval]
            if here.step != there.step:
                clock.synchronize()
            taken[interval] += clock.ready[DEFAULT] - began
            interval, began = operator.interval, clock.ready[DEFAULT]
        clock.run(operator.stream, float(seconds[number]))

    clock.pass_marks(len(recording.operators))
    clock.synchronize()
    taken[interval] += clock.ready[DEFAULT] - began
    return taken


class _Clock:
    """When each stream is done with what it has been given so far."""

    def __init__(self, marks: Sequence[StreamMark], launch_seconds: float) -> None:
        self.ready: dict[int, float] = defaultdict(float)
        self._marks, self._passed, self._launch_seconds = marks, 0, launch_seconds
        self._events: dict[int, float] = {}
        self._issued = 0.0

    def pass_marks(self, operator: int) -> None:
        """Record events and wait for them, as the host asked before it issued an operator."""
        while self._passed < len(self._marks) and self._marks[self._passed].operator <= operator:
            mark = self._marks[self._passed]
            if mark.waits:
                self.ready[mark.stream] = max(self.ready[mark.stream], self._events[mark.event])
            else:
                self._events[mark.event] = self.ready[mark.stream]
            self._passed += 1

    def run(self, stream: int, seconds: float) -> None:
        """Run an operator once it has been issued and its stream is done."""
        if seconds <= 0.0:
            return
        self.ready[stream] = max(self.ready[stream], self._issued) + seconds
        self._issued += self._launch_seconds

    def synchronize(self) -> None:
        """Let all streams and the host wait for one another."""
        self._issued = max(self.ready.values(), default=0.0)
        self.ready = defaultdict(float, dict.fromkeys(self.ready, self._issued))


# The time that Python takes for a recompute. A CPU waits for it; on a card kernels hide it.
#
# The constants are the minimum of many runs on a 2-core server with torch 2.13 (`host` of
# benchmarks/recompute_checks.py). Left out: how much slower another machine is.

REGION_SECONDS = 235e-6
"""For each call of a recomputed module."""

HOOK_SECONDS = 5.5e-6
"""For each of its operators, to drop and fetch what autograd saves."""

DISPATCH_SECONDS = 16e-6
"""For each operator if some outputs are kept: two dispatch modes count it, once in each run."""


def python_seconds(num_calls: int, num_operators: int, *, keeps: bool) -> float:
    """Return the time that Python takes for a recomputed module in one step.

    Args:
        num_calls: number of calls of the module's forward.
        num_operators: number of operators in all of these.
        keeps: whether outputs of some operators are kept.
    """
    each = HOOK_SECONDS + (DISPATCH_SECONDS if keeps else 0.0)
    return num_calls * REGION_SECONDS + num_operators * each
