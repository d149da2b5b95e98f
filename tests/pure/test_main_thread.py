"""A press is handled after what the kernel's main thread was sent before it, and not never."""

import threading
from types import SimpleNamespace

import pytest
from tornado.ioloop import IOLoop

from memlab._panel import cells

PATIENCE_SECONDS = 60


@pytest.fixture
def loop(monkeypatch):
    made = IOLoop(make_current=False)
    shell = SimpleNamespace(kernel=SimpleNamespace(io_loop=made))
    monkeypatch.setattr(cells, "_shell", lambda: shell)
    yield made
    made.close()


def press(call, most_seconds):
    """Press in another thread, as JupyterLab does."""
    other = threading.Thread(target=cells.after_main_thread, args=(call, most_seconds))
    other.start()
    other.join()


def test_what_came_before_is_handled_before(loop):
    handled = []

    def finish():
        handled.append("press")
        loop.stop()

    loop.add_callback(lambda: loop.add_callback(lambda: handled.append("change")))
    press(finish, PATIENCE_SECONDS)
    assert handled == []
    loop.start()
    assert handled == ["change", "press"]


def test_a_main_thread_that_does_not_come_is_not_waited_for_and_no_press_counts_twice(loop):
    called, done = [], threading.Event()

    def call():
        called.append("press")
        done.set()

    press(call, 0.05)
    assert done.wait(PATIENCE_SECONDS)
    loop.call_later(5 * cells.PASS_SECONDS, loop.stop)
    loop.start()
    assert called == ["press"]


def test_in_the_main_thread_and_without_a_kernel_nothing_waits(loop, monkeypatch):
    called = []
    cells.after_main_thread(lambda: called.append("main"), PATIENCE_SECONDS)
    monkeypatch.setattr(cells, "_shell", lambda: None)
    press(lambda: called.append("no kernel"), PATIENCE_SECONDS)
    assert called == ["main", "no kernel"]
