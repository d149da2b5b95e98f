"""The panel's threads: presses wait for changes, garbage for a rest, messages for a moment."""

import gc
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest

from memlab._panel import asked, job
from memlab._panel.job import MOST_PICTURES, IdleGarbage, Settling
from tests.panel_parts import PATIENCE_SECONDS, until

# a press waits for what was changed before it: once, not for ever, and not after the panel


MOMENT_SECONDS = 0.2


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


@pytest.mark.parametrize("typed", [False, True])  # that of Enter whenever the change was
def test_where_a_change_takes_long_the_wait_is_longer(settling_soon, monkeypatch, typed):
    monkeypatch.setattr(job, "LONGEST_SECONDS", 3 * MOMENT_SECONDS)
    called, done = [], threading.Event()
    settling_soon.note(handling_seconds=60)
    time.sleep(3 * MOMENT_SECONDS * typed)
    start = time.monotonic()
    settling_soon.call(lambda: (called.append(time.monotonic()), done.set()), typed=typed)
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


# and for what the kernel's main thread was sent before it


class Loop:
    """A kernel's loop as far as a press needs it; a real one would not run beside a browser's."""

    def __init__(self):
        self.ready, self.later = [], []

    def add_callback(self, function, *args):
        self.ready.append(partial(function, *args))

    def call_later(self, seconds, function):
        assert seconds > 0
        self.later.append(function)

    def run(self):
        """Call what is ready, what that adds, and then what was to come later."""
        while self.ready or self.later:
            (self.ready or self.later).pop(0)()


@pytest.fixture
def loop(monkeypatch):
    made = Loop()
    shell = SimpleNamespace(kernel=SimpleNamespace(io_loop=made))
    monkeypatch.setattr(asked, "_shell", lambda: shell)
    return made


def press(call, most_seconds):
    """Press in another thread, as JupyterLab does."""
    other = threading.Thread(target=asked.after_main_thread, args=(call, most_seconds))
    other.start()
    other.join()


def test_what_came_before_is_handled_before(loop):
    handled = []
    loop.add_callback(lambda: loop.add_callback(lambda: handled.append("change")))
    press(lambda: handled.append("press"), PATIENCE_SECONDS)
    assert handled == []
    loop.run()
    assert handled == ["change", "press"]


def test_a_main_thread_that_does_not_come_is_not_waited_for_and_no_press_counts_twice(loop):
    called, done = [], threading.Event()

    def call():
        called.append("press")
        done.set()

    press(call, 0.05)
    assert done.wait(PATIENCE_SECONDS)
    loop.run()
    assert called == ["press"]


def test_in_the_main_thread_and_without_a_kernel_nothing_waits(loop, monkeypatch):
    called = []
    asked.after_main_thread(lambda: called.append("main"), PATIENCE_SECONDS)
    monkeypatch.setattr(asked, "_shell", lambda: None)
    press(lambda: called.append("no kernel"), PATIENCE_SECONDS)
    assert called == ["main", "no kernel"]


# garbage is looked for while the panel rests, and only after pictures


@pytest.fixture
def collected(monkeypatch):
    monkeypatch.setattr(job, "REST_SECONDS", 0.01)
    return []


@pytest.fixture
def garbage(collected):
    made = IdleGarbage(lambda: collected.append(len(collected)))
    yield made
    made.close()


def noted(garbage, count):
    garbage.note(count)
    assert garbage._rest.wait(PATIENCE_SECONDS)


def test_it_is_looked_for_once_after_some_pictures(garbage, collected):
    for count in range(1, MOST_PICTURES):
        noted(garbage, count)
    assert collected == []
    noted(garbage, MOST_PICTURES)
    noted(garbage, MOST_PICTURES)
    assert collected == [0]
    noted(garbage, 2 * MOST_PICTURES)
    assert collected == [0, 1]


def test_nothing_is_looked_for_where_a_person_has_switched_that_off(garbage, collected):
    gc.disable()
    try:
        noted(garbage, MOST_PICTURES)
    finally:
        gc.enable()
    assert collected == []


def test_what_nobody_needs_is_gone_after_a_rest(monkeypatch):
    monkeypatch.setattr(job, "REST_SECONDS", 0.0)
    found, garbage = [], IdleGarbage()
    gc.callbacks.append(lambda phase, info: found.append((phase, info["generation"])))
    try:
        garbage.note(MOST_PICTURES)
        until(lambda: ("stop", 2) in found)
    finally:
        gc.callbacks.pop()
        garbage.close()


# messages: the first at once and the last always; of calls the newest


def test_a_throttle_sends_the_first_at_once_and_the_last_always(monkeypatch):
    sent = []
    # far longer than the loop takes, even where the machine is busy with other things
    monkeypatch.setattr(job, "UPDATE_SECONDS", 2.0)
    throttled = job.Throttle(sent.append)
    for i in range(100):
        throttled(i)
    assert sent == [0]
    until(lambda: sent == [0, 99])
    throttled.close()
    throttled(100)
    assert throttled._timer is None, "nothing is left that could send"
    assert sent == [0, 99]


def test_what_a_throttle_has_dropped_is_never_sent(monkeypatch):
    sent = []
    monkeypatch.setattr(job, "UPDATE_SECONDS", 0.2)
    throttled = job.Throttle(sent.append)
    throttled("first")
    throttled("late")
    throttled.drop()
    until(lambda: throttled._timer is None)
    assert sent == ["first"]
    throttled("next")
    until(lambda: sent == ["first", "next"])
    throttled.close()


def test_latest_drops_what_is_not_newest():
    seen, go = [], threading.Event()

    def slow(value):
        seen.append(value)
        go.wait(PATIENCE_SECONDS)

    latest = job.Latest(slow)
    latest(0)
    until(lambda: seen == [0])
    for i in range(1, 10):
        latest(i)
    go.set()
    assert latest.wait(PATIENCE_SECONDS)
    assert seen == [0, 9]
    latest.close()
