"""A press waits for what was changed before it: once, not for ever, and not after the panel."""

import threading
import time

import pytest

from memlab._panel import job
from memlab._panel.job import Settling

MOMENT_SECONDS = 0.2
PATIENCE_SECONDS = 60


@pytest.fixture
def settling_soon(monkeypatch):
    monkeypatch.setattr(job, "SETTLED_SECONDS", MOMENT_SECONDS)
    made = Settling()
    yield made
    made.close()


def test_without_a_change_nothing_waits(settling_soon):
    called = []
    settling_soon.call(lambda: called.append(threading.current_thread()))
    assert called == [threading.current_thread()]


def test_presses_after_a_change_are_one_call_once_nothing_changes(settling_soon):
    called, done = [], threading.Event()

    def call():
        called.append(time.monotonic())
        done.set()

    settling_soon.note()
    settling_soon.call(call)
    settling_soon.call(call)
    for _ in range(10):
        time.sleep(MOMENT_SECONDS / 10)
        settling_soon.note()
    last = time.monotonic()
    assert done.wait(PATIENCE_SECONDS)
    assert len(called) == 1
    assert called[0] - last >= MOMENT_SECONDS / 2


def test_changes_without_end_do_not_put_it_off_for_ever(settling_soon, monkeypatch):
    monkeypatch.setattr(job, "LONGEST_SECONDS", 3 * MOMENT_SECONDS)
    done = threading.Event()
    settling_soon.call(done.set, typed=True)
    end = time.monotonic() + PATIENCE_SECONDS
    while not done.wait(MOMENT_SECONDS / 10) and time.monotonic() < end:
        settling_soon.note()
    assert done.is_set()


def test_enter_waits_for_what_has_not_come_yet(settling_soon):
    batch, called, done = [8], [], threading.Event()
    settling_soon.call(lambda: (called.append(batch[0]), done.set()), typed=True)
    assert called == []
    batch[0] = 16
    settling_soon.note()
    assert done.wait(PATIENCE_SECONDS)
    assert called == [16]


def test_where_a_change_takes_long_the_wait_is_longer(settling_soon, monkeypatch):
    monkeypatch.setattr(job, "LONGEST_SECONDS", 3 * MOMENT_SECONDS)
    called, done = [], threading.Event()
    start = time.monotonic()
    settling_soon.note(handling_seconds=60)
    settling_soon.call(lambda: (called.append(time.monotonic()), done.set()))
    assert done.wait(PATIENCE_SECONDS)
    assert called[0] - start >= 2 * MOMENT_SECONDS


def test_so_is_that_of_enter_whenever_the_change_was(settling_soon, monkeypatch):
    monkeypatch.setattr(job, "LONGEST_SECONDS", 3 * MOMENT_SECONDS)
    settling_soon.note(handling_seconds=60)
    time.sleep(3 * MOMENT_SECONDS)
    called, done = [], threading.Event()
    start = time.monotonic()
    settling_soon.call(lambda: (called.append(time.monotonic()), done.set()), typed=True)
    assert done.wait(PATIENCE_SECONDS)
    assert called[0] - start >= 2 * MOMENT_SECONDS


def test_nothing_is_called_once_it_is_closed(settling_soon):
    called = []
    settling_soon.note()
    settling_soon.call(lambda: called.append("waited"))
    settling_soon.close()
    settling_soon.note()
    settling_soon.call(lambda: called.append("pressed later"))
    time.sleep(2 * MOMENT_SECONDS)
    assert called == []
