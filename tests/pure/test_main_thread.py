"""A press is handled after what the kernel's main thread was sent before it, and not never."""

import threading
from functools import partial
from types import SimpleNamespace

import pytest

from memlab._panel import asked

PATIENCE_SECONDS = 60


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
