"""Oracles: schedules of a few operators, worked by hand."""

import numpy as np
import pytest
import torch

from memlab.cost_model.overlap import (
    HOST_HALF_WIDTH,
    HOST_SECONDS,
    UPDATE_SECONDS,
    VALUE,
    host_notes,
    overlap_notes,
    overlap_of,
    scheduler_of,
)
from memlab.trace import Interval, Phase
from memlab.tracing.recording import Operator, OpTrace, Streams

OUTSIDE, FORWARD, UPDATE = 0, 1, 2


class Host:
    """Issues operators and events as a step does, and says how long each takes."""

    def __init__(self) -> None:
        intervals = [
            Interval(step=-1, phase=Phase.BUILD),
            Interval(step=0, phase=Phase.FORWARD),
            Interval(step=0, phase=Phase.OPTIMIZER),
        ]
        self.recording = OpTrace(intervals=intervals)
        self.streams = Streams()
        self.streams.restart(self.recording.marks.append, self.recording.operators.__len__)
        self.seconds: list[float] = []

    def run(self, seconds, stream=None, interval=FORWARD, *, name="an operator", **given):
        number = (stream or self.streams.current).number
        operator = Operator(name, None, (), -1, interval, stream=number, **given)
        self.recording.operators.append(operator)
        self.seconds.append(seconds)

    def taken(self, launch=0.0):
        seconds = np.array(self.seconds)
        return scheduler_of(self.recording)(seconds, np.full_like(seconds, launch)).tolist()


def test_streams_have_the_numbers_that_torch_asks_them_for():
    """An operator of `fully_shard` takes them since torch 2.15 (`record_grad_output_stream`)."""
    streams = Streams()
    one, other = streams.made(), streams.made()
    assert one.stream_id != other.stream_id
    assert torch.device("cuda", one.device_index) == torch.device("cuda:0")
    assert type(one.device_type) is int


@pytest.mark.parametrize(("waits", "seconds"), [(True, 6.0), (False, 5.0)])
def test_a_stream_waits_for_an_event_of_another(waits, seconds):
    # 3 s beside 5 s, then 1 s, as in the picture of the module
    host = Host()
    other = host.streams.made()
    host.run(3.0)
    host.run(5.0, other)
    event = other.record_event()
    if waits:
        host.streams.current.wait_event(event)
    host.run(1.0)
    assert host.taken() == [0.0, seconds, 0.0]


def test_an_event_stands_behind_what_its_stream_itself_waits_for():
    host = Host()
    first, second = host.streams.made(), host.streams.made()
    host.run(4.0, first)
    second.wait_stream(first)  # and nothing runs on it
    host.streams.current.wait_stream(second)
    host.run(1.0)
    assert host.taken() == [0.0, 5.0, 0.0]


def test_what_comes_after_an_event_is_not_waited_for():
    host = Host()
    other = host.streams.made()
    host.run(2.0, other)
    event = other.record_event()
    host.run(9.0, other, interval=UPDATE)
    host.streams.current.wait_event(event)
    host.run(1.0, interval=UPDATE)
    # the update ends when all streams are done
    assert host.taken() == [0.0, 0.0, 11.0]


def test_the_host_issues_one_operator_after_the_other():
    host = Host()
    for seconds in (3.0, 0.0, 5.0):  # of one stream: their sum
        host.run(seconds)
    host.run(2.0, interval=UPDATE)
    assert host.taken(launch=1.0) == [0.0, 8.0, 2.0]

    host = Host()
    other = host.streams.made()
    host.run(0.5)
    host.run(0.5, other)
    host.streams.current.wait_stream(other)
    host.run(0.5)
    # issued after 0, 1 and 2 seconds; the third runs from 2 to 2.5
    assert host.taken(launch=1.0) == [0.0, 2.5, 0.0]


def overlap(seconds_of_kernel, seconds_of_collective, kernels=0.1, links=0.2, pace=0.0):
    """A kernel, a collective beside it, and one more kernel that waits for it."""
    host = Host()
    host.run(seconds_of_kernel)
    other = host.streams.made()
    host.run(seconds_of_collective, other, ranks=(0, 1))
    host.streams.current.wait_stream(other)
    host.run(1.0)
    return overlap_of(
        host.recording, np.array(host.seconds), kernels_half_width=kernels,
        links_half_width=links, host_seconds=pace,
    )  # fmt: skip


def test_what_computation_hides_adds_nothing_but_doubt():
    found = overlap(9.0, 2.0)
    assert (found.step_seconds, found.communication_seconds) == (10.0, 2.0)
    assert (found.exposed_seconds, found.hidden_share) == (0.0, 1.0)
    # kernels may take 1 s more or less, and all that is hidden may not be
    assert found.half_width == pytest.approx((1.0**2 + 2.0**2) ** 0.5 / 10)


def test_what_is_not_hidden_adds_its_time_and_its_own_doubt():
    found = overlap(4.0, 10.0)
    assert (found.step_seconds, found.exposed_seconds) == (11.0, 6.0)
    assert found.hidden_share == pytest.approx(0.4)
    # the last kernel by 0.1 s, the collective by 2 s; the 4 s beside the first kernel
    assert found.half_width == pytest.approx((0.1**2 + 2.0**2 + 4.0**2) ** 0.5 / 11)
    # and it is never less than that of kernels
    assert overlap(0.001, 50.0, kernels=0.3, links=0.01).half_width == pytest.approx(0.3)


def test_what_rounding_leaves_is_not_hidden():
    host = Host()
    for _ in range(3):
        host.run(1.1)
        host.run(1.3, ranks=(0, 1))
    found = overlap_of(
        host.recording, np.array(host.seconds), kernels_half_width=0.1, links_half_width=0.2,
        host_seconds=0.0,
    )  # fmt: skip
    assert 0 < 1 - found.exposed_seconds / found.communication_seconds < 1e-8
    assert found.hidden_share == 0
    assert "of which 0 % is hidden" in overlap_notes(found)[0]


def test_the_host_is_part_of_the_time_and_of_the_doubt():
    found = overlap(9.0, 2.0, pace=3.0)  # the card does not wait for it
    assert (found.step_seconds, found.waiting_seconds) == (10.0, 0.0)
    assert found.half_width == overlap(9.0, 2.0).half_width
    assert host_notes(found) == []
    (said,) = overlap_notes(found)
    assert "100 % is hidden" in said
    # issued after 0, 20 and 40 seconds, so that the step ends after 41
    found = overlap(9.0, 2.0, pace=20.0)
    assert (found.step_seconds, found.waiting_seconds) == (41.0, 31.0)
    # after 61 with a host 1.5 times as slow, and after 27.7 with one as much faster; the last
    # kernel by 0.1 s
    by_host = (60 - 40 / 1.5) / 2
    assert found.half_width == pytest.approx((by_host**2 + 0.1**2 + 2.0**2) ** 0.5 / 41)
    (said,) = host_notes(found)
    assert said.startswith("The card waits for its host for 76 % of a step")
    assert f"The time is stated ± {found.half_width:.0%}" in said


@pytest.mark.parametrize(("seconds", "waits"), [(5e-6, True), (50e-6, False)])
def test_a_step_of_one_card_waits_for_its_host_too(seconds, waits):
    """A thousand kernels of 5 us wait for each but the last; of 50 us they do not."""
    host = Host()
    for _ in range(1000):
        host.run(seconds)
    found = overlap_of(
        host.recording, np.array(host.seconds), kernels_half_width=0.0, links_half_width=0.0
    )
    whole = 999 * HOST_SECONDS + seconds if waits else 1000 * seconds
    assert found.step_seconds == pytest.approx(whole)
    by_host = min(1000 * HOST_SECONDS, whole)  # never more than it takes
    assert found.least_seconds.tolist() == [
        pytest.approx([0.0, 1000 * seconds, 0.0]), pytest.approx([0.0, by_host, 0.0])
    ]  # fmt: skip
    # the slower host decides over half of the longer kernels, too: 60 us for each of 50
    slower = 999 * 60e-6 + seconds - whole
    assert found.half_width == pytest.approx(
        HOST_HALF_WIDTH if waits else slower / 2 / whole, rel=0.01
    )
    assert len(host_notes(found)) == waits


def test_an_update_is_issued_faster():
    host = Host()
    for interval in (FORWARD, UPDATE):
        for _ in range(100):
            host.run(1e-6, interval=interval)
    found = overlap_of(
        host.recording, np.array(host.seconds), kernels_half_width=0.0, links_half_width=0.0
    )
    assert found.least_seconds[1].tolist() == [
        0.0, pytest.approx(99 * HOST_SECONDS + 1e-6), pytest.approx(100 * UPDATE_SECONDS),
    ]  # fmt: skip
    # the first of the update is issued after the last of the forward
    assert found.interval_seconds[FORWARD] == pytest.approx(99 * HOST_SECONDS + 1e-6)
    assert found.interval_seconds[UPDATE] == pytest.approx(HOST_SECONDS + 99 * UPDATE_SECONDS)


def some_steps(seed):
    """Many kernels of one stream in two steps, long and short, some of which the host waits for."""
    random, host = np.random.default_rng(seed), Host()
    host.recording.intervals.append(Interval(step=1, phase=Phase.FORWARD))
    for interval in (OUTSIDE, FORWARD, UPDATE, 3):
        for kind in random.integers(0, 8, 60):
            facts = {0: {"name": VALUE, "reads": (0,)}, 1: {"by_values": True}}.get(kind, {})
            host.run(0.0 if kind == 0 else random.choice([0.0, 0.1, 5.0]), None, interval, **facts)
    return host


@pytest.mark.parametrize("seed", range(5))
def test_sums_over_one_stream_say_what_its_schedule_says(seed):
    host = some_steps(seed)
    by_sums = host.taken(launch=1.0)
    host.recording.operators.append(
        Operator("nothing on another stream", None, (), -1, 3, stream=host.streams.made().number)
    )
    host.seconds.append(0.0)
    assert by_sums == pytest.approx(host.taken(launch=1.0))
    assert by_sums[1] > host.taken(launch=0.0)[1] > 0


def test_a_host_that_asks_for_a_value_issues_the_next_operator_later():
    for reads, taken in (((0,), 8.5), ((), 6.5)):  # of the card, and of the host
        host = Host()
        host.run(5.0)
        host.run(0.0, name=VALUE, reads=reads)
        for _ in range(3):
            host.run(0.5)
        # they run at 6, 7 and 8 s, or at once
        assert host.taken(launch=1.0) == [0.0, taken, 0.0]


def test_copies_beside_the_kernels_count_where_they_take_longer():
    for copy, taken in ((1.0, 4.0), (6.0, 6.0)):
        host = Host()
        host.run(copy, crosses=True, beside=True)
        host.run(4.0)
        found = overlap_of(
            host.recording, np.array(host.seconds), kernels_half_width=0.1, links_half_width=0.0
        )
        assert found.step_seconds == taken
