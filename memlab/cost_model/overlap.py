"""The time of operators on several streams: a list schedule, from what a recording says of them.

The idea. The host issues one operator after the other, mostly without waiting. A stream runs its
operators in that order, and each as soon as the one before it is done and whatever the stream was
told to wait for. With a kernel of 3 ms on stream 0, a collective of 5 ms on stream 1, and a kernel
of 1 ms on stream 0 that waits for the collective:

    stream 0    |--- kernel ---|         |- kernel -|
    stream 1    |------ collective ------|
                0              3         5          6 ms

    without the wait the step would take 5 ms; one after the other they would take 9 ms

With one stream the time is the sum of the operators' times, unless the card waits for the host: a
step of small kernels takes what Python and the driver take, which is much the same for each of
them (`HOST_SECONDS`). Where the host asks for a value it waits for the card, and issues the next
operator only then. Left out: that kernels and collectives beside each other slow each other down,
since they share multiprocessors and memory; the other ranks, which are taken to be as fast as this
one; that a host is at most some thousand kernels ahead.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from memlab._util.units import format_seconds
from memlab.result import format_percent
from memlab.trace import Phase
from memlab.tracing.recording import Operator, OpTrace, StreamMark

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import

    Seconds = npt.NDArray[np.float64]

DEFAULT = 0  # the stream of a step's own operators
LEAST_SHARE = 0.005  # of the communication, below which nothing is hidden: floats leave a rest
OF_HOST = "The card waits for its host"  # how the note on the host begins
MUCH_WAITING = 0.1  # for the host, as a share of a step's time: it is said
AT_ONCE = 1e-9  # a share of a collective's time: it is issued still
VALUE = "aten::_local_scalar_dense"  # of a tensor, that the host asks for

HOST_SECONDS = 40e-6
"""What a host takes from one operator to the next: Python, autograd, dispatcher and driver.

From steps that others timed on four machines (`python -m benchmarks.host_pace`, and
`benchmarks.iteration_times`).
"""
UPDATE_SECONDS = 7e-6
"""The same in an update, which has neither modules nor autograd (pytorch issue 41383: 5 to 7 us).

Held against others' steps by `python -m benchmarks.power`.
"""
HOST_FACTOR = 1.5
"""How many times as long another host may take, or as short; `Overlap.half_width` has the mean."""
HOST_HALF_WIDTH = (HOST_FACTOR - 1.0 / HOST_FACTOR) / 2
"""That of a step that waits for its host all the time."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Overlap:
    """How the operators of a recording with several streams overlap.

    Attributes:
        interval_seconds: float64, (intervals,); see `scheduler_of`.
        least_seconds: float64, (2, intervals), what these take with a host that needs no time, and
            what the host takes for them: what times of other batches are drawn from.
        step_seconds: of the step that is judged, with the micro-batches that were recorded.
        communication_seconds: of its collectives, one after the other.
        exposed_seconds: what the step takes longer than it would without them.
        waiting_seconds: what it takes longer than with a host that needs no time.
        half_width: the relative half-width of its time.
    """

    interval_seconds: Seconds
    least_seconds: Seconds
    step_seconds: float
    communication_seconds: float
    exposed_seconds: float
    waiting_seconds: float
    half_width: float

    @property
    def hidden_share(self) -> float:
        """The share of the communication that other operators hide; a tiny one is 0."""
        if not self.communication_seconds:
            return 0.0
        share = min(1.0 - self.exposed_seconds / self.communication_seconds, 1.0)
        return share if share >= LEAST_SHARE else 0.0


def overlap_of(
    recording: OpTrace,
    seconds: Seconds,
    *,
    kernels_half_width: float,
    links_half_width: float,
    host_seconds: float = HOST_SECONDS,
    judged: int | None = None,
) -> Overlap:
    """Return how the operators of a recording overlap.

    The half-width has four parts, which do not depend on one another: what the times of kernels
    make of the step if all of them are too short or too long by theirs, the same of collectives,
    that of the host, and all that is hidden. For how much kernels and collectives slow each other
    down is not known, and at worst they run one after the other.

    Args:
        recording: of two steps.
        seconds: float64, (operators,), of each alone.
        kernels_half_width: the relative half-width of the times of kernels.
        links_half_width: of the times of collectives.
        host_seconds: that the host takes from one operator of forward and backward to the next.
        judged: the step that is told of; None for the last one.
    """
    is_sent = np.array([bool(operator.ranks) for operator in recording.operators], dtype=bool)
    last = max(interval.step for interval in recording.intervals) if judged is None else judged
    in_last = np.array([interval.step == last for interval in recording.intervals], dtype=bool)

    schedule, copies = scheduler_of(recording), _Copies(recording)
    of_operators = np.array([operator.interval for operator in recording.operators], np.int64)
    is_update = [interval.phase is Phase.OPTIMIZER for interval in recording.intervals]
    issued = np.where(np.array(is_update, bool), UPDATE_SECONDS, host_seconds)[of_operators]

    def intervals(given: Seconds, host: float = 1.0) -> Seconds:
        by_kernels = schedule(copies.without(given), host * issued)
        return np.maximum(by_kernels, copies.seconds(given))

    def total(kernels: float = 1.0, links: float = 1.0, host: float = 1.0) -> float:
        varied = seconds * np.where(is_sent, links, kernels)
        return float(intervals(varied, host)[in_last].sum())

    of_intervals, without_host = intervals(seconds), intervals(seconds, host=0.0)
    by_host = np.bincount(of_operators, issued * (seconds > 0), minlength=len(of_intervals))
    whole = float(of_intervals[in_last].sum())
    sent = float(seconds[is_sent & in_last[of_operators]].sum())
    exposed = whole - total(links=AT_ONCE) if sent else 0.0
    hidden = max(sent - exposed, 0.0)
    spreads = [
        total(kernels=1.0 + kernels_half_width) - total(kernels=max(1.0 - kernels_half_width, 0.1)),
        total(host=HOST_FACTOR) - total(host=1.0 / HOST_FACTOR),
    ]
    if sent:
        spreads.append(total(links=1.0 + links_half_width) - total(links=1.0 - links_half_width))
    width = math.hypot(*(spread / 2 for spread in spreads), hidden)
    return Overlap(
        interval_seconds=of_intervals,
        least_seconds=np.minimum((without_host, by_host), of_intervals),
        step_seconds=whole,
        communication_seconds=sent,
        exposed_seconds=exposed,
        waiting_seconds=max(whole - float(without_host[in_last].sum()), 0.0),
        half_width=max(width / whole if whole else 0.0, kernels_half_width),
    )


def overlap_notes(overlap: Overlap) -> list[str]:
    """Return sentences on what communication adds to the time and its uncertainty."""
    if not overlap.communication_seconds:
        return [
            "One rank has no other to send to, so collectives take no time. The time of the step "
            f"is stated ± {overlap.half_width:.0%}, by the doubt about kernels and the host."
        ]
    return [
        f"Collectives take {format_seconds(overlap.communication_seconds)}, of which "
        f"{format_percent(overlap.hidden_share)} is hidden behind other operators. The time of the "
        f"step is stated ± {overlap.half_width:.0%}, by the doubt about kernels, links and the "
        "host, and because what runs beside each other may slow each other down."
    ]


def host_notes(overlap: Overlap) -> list[str]:
    """Return a note on a step that waits for its host; none for any other."""
    waiting, whole = overlap.waiting_seconds, overlap.step_seconds
    if waiting < MUCH_WAITING * whole or not whole:
        return []
    return [
        f"{OF_HOST} for {format_percent(waiting / whole)} of a step: its kernels are short, and "
        f"Python and the driver take {format_seconds(HOST_SECONDS)} from one operator to the next "
        "(less in an update), as on the machines of others. The time is stated ± "
        f"{overlap.half_width:.0%}, by the doubt about the host, too. A larger batch, or fewer "
        "micro-batches, waits less."
    ]


class _Copies:
    """Copies of one card that run beside its kernels: an interval takes the longer of both.

    Copies in both directions share the bus, so their times are added.
    """

    def __init__(self, recording: OpTrace) -> None:
        operators, intervals = recording.operators, recording.intervals
        phases = [interval.phase in (Phase.FORWARD, Phase.BACKWARD) for interval in intervals]
        alone = not any(operator.ranks for operator in operators)
        self._are = np.array([alone and o.beside and phases[o.interval] for o in operators], bool)
        self._interval = np.array([o.interval for o in operators], np.int64)[self._are]
        self._count = len(intervals)

    def without(self, seconds: Seconds) -> Seconds:
        """Return the times of operators, (operators,), of copies 0."""
        return np.where(self._are, 0.0, seconds)

    def seconds(self, seconds: Seconds) -> Seconds:
        """Return the time of each interval's copies, (intervals,), from those of operators."""
        found = np.bincount(self._interval, seconds[self._are], minlength=self._count)
        return found.astype(np.float64)


def scheduler_of(recording: OpTrace) -> Callable[[Seconds, Seconds], Seconds]:
    """Return a function that gives the time of each interval: how much later the card is done.

    All streams are done before a step begins, as when steps are measured, and the last interval of
    a step ends when they are. The function takes the seconds of each operator alone, and those that
    the host takes to issue it if it takes any time, both (operators,), and returns (intervals,).
    """
    if all(operator.stream == DEFAULT for operator in recording.operators):
        return _OneStream(recording)
    return partial(_seconds_of_streams, recording)


class _OneStream:
    """The times of intervals of operators of the default stream, by sums.

    An operator is done at the latest, over all operators up to it, of when that one was issued and
    what runs from there on.
    """

    def __init__(self, recording: OpTrace) -> None:
        operators, self._count = recording.operators, len(recording.intervals)
        self._interval = np.array([operator.interval for operator in operators], np.int64)
        steps = np.array([interval.step for interval in recording.intervals])[self._interval]
        is_first = np.diff(steps, prepend=steps[:1]).astype(bool)
        is_waited = np.array([_is_waited_for(operator) for operator in operators], bool)
        self._group = np.cumsum(is_first | is_waited)  # the host waits for the card between them
        starts = np.flatnonzero(is_first | is_waited)
        self._is_late = np.concatenate(([False], is_waited[starts]))  # by group

    def __call__(self, seconds: Seconds, host: Seconds) -> Seconds:
        runs, taken = np.flatnonzero(seconds > 0), np.zeros(self._count)
        for members in np.split(runs, np.flatnonzero(np.diff(self._group[runs])) + 1):
            done = np.cumsum(seconds[members])
            late = self._is_late[self._group[members[:1]]] if len(members) else False
            issued = np.cumsum(host[members]) - host[members] * ~late
            ends = done + np.maximum.accumulate(issued - (done - seconds[members]))
            np.add.at(taken, self._interval[members], np.diff(ends, prepend=0.0))
        return taken


def _seconds_of_streams(recording: OpTrace, seconds: Seconds, host: Seconds) -> Seconds:
    clock = _Clock(recording.marks)
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
        if _is_waited_for(operator):
            clock.wait(float(host[number]))
        clock.run(operator.stream, float(seconds[number]), float(host[number]))

    clock.pass_marks(len(recording.operators))
    clock.synchronize()
    taken[interval] += clock.ready[DEFAULT] - began
    return taken


def _is_waited_for(operator: Operator) -> bool:
    """Return whether the host waits until it knows a value, or the size of a result."""
    # a value in the host's own memory, such as an optimizer's count of steps, is there already
    return operator.by_values or (operator.name == VALUE and bool(operator.reads))


class _Clock:
    """When each stream is done with what it has been given so far."""

    def __init__(self, marks: Sequence[StreamMark]) -> None:
        self.ready: dict[int, float] = defaultdict(float)
        self._marks, self._passed = marks, 0
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

    def run(self, stream: int, seconds: float, host: float) -> None:
        """Run an operator once it has been issued and its stream is done."""
        if seconds <= 0.0:
            return
        self.ready[stream] = max(self.ready[stream], self._issued) + seconds
        self._issued += host

    def wait(self, host: float) -> None:
        """Let the host wait until all streams are done, and then come to the next operator."""
        self._issued = max(self.ready.values(), default=0.0) + host

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
