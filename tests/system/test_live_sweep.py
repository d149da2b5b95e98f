"""A sweep in a thread: the picture fills in, and the buttons pause and stop it."""

import threading
import time

import pytest

import memlab
from memlab import MemlabError
from memlab._panel import live_sweep
from memlab.search import sweep as sweep_tasks
from tests.sweep_parts import WORKLOAD, Runs, once, sizes


@pytest.fixture
def runs(monkeypatch, tmp_path):
    made = Runs(tmp_path / "runs.txt")
    monkeypatch.setattr(sweep_tasks, "measure_only", made.measure)
    monkeypatch.setattr(live_sweep, "DRAW_SECONDS", 0.0)
    monkeypatch.setenv("MEMLAB_STORE", str(tmp_path / "results.sqlite3"))
    return made


def test_the_picture_fills_in_while_the_kernel_is_free(runs):
    may_go_on, is_at_three = threading.Event(), threading.Event()

    def wait_at_three(size):
        if size == 3:
            is_at_three.set()
            assert may_go_on.wait(60)

    runs.doing = wait_at_three
    sweep = memlab.live_sweep(WORKLOAD, sizes(4), "cpu")
    assert is_at_three.wait(60)
    assert repr(sweep) == "sweep that runs: 2 settings have ended"
    early = sweep._picture.value
    assert "<svg" in early
    assert sweep._bar.value == 0.5
    with pytest.raises(TimeoutError, match="has not ended"):
        sweep.wait(0.01)

    may_go_on.set()
    table = sweep.wait(60)
    assert len(table) == len(sweep.results) == 4
    assert sweep._picture.value != early
    assert sweep._text.value == "sweep of 4 settings: 4 ok."
    assert sweep._stop.disabled
    assert "text/plain" in sweep._repr_mimebundle_()
    assert runs.ended() == once(4)


def test_the_buttons_pause_and_stop(runs):
    sweep = None
    is_ready = threading.Event()

    def pause_at_two(size):
        assert is_ready.wait(60)
        if size == 2 and not sweep._pause.is_set():
            sweep._pausing.value = True

    runs.doing = pause_at_two
    sweep = memlab.live_sweep(WORKLOAD, sizes(50), "cpu")
    is_ready.set()
    while not sweep._pause.is_set() or runs.ended() != once(2):
        time.sleep(0.01)
    assert sweep._pausing.description == "Go on"
    sweep._stop.click()
    table = sweep.wait(60)
    assert [str(result.outcome) for result in table][:3] == ["ok", "ok", "cancelled"]
    assert runs.ended() == once(2)


def test_waiting_for_a_paused_sweep_says_so_instead_of_blocking(runs):
    is_ready = threading.Event()

    def wait_until_ready(size):
        assert is_ready.wait(60)

    runs.doing = wait_until_ready
    sweep = memlab.live_sweep(WORKLOAD, sizes(3), "cpu")
    sweep.pause()
    for timeout_seconds in (None, 60):
        with pytest.raises(MemlabError, match=r"is paused, .* go_on\(\)"):
            sweep.wait(timeout_seconds)
    is_ready.set()
    sweep.go_on()
    assert len(sweep.wait(60)) == 3


def test_a_sweep_that_is_paused_while_it_is_waited_for_says_so(runs):
    sweep = None

    def pause(size):
        if size == 2:
            sweep.pause()

    is_ready = threading.Event()
    runs.doing = lambda size: is_ready.wait(60) and pause(size)
    sweep = memlab.live_sweep(WORKLOAD, sizes(3), "cpu")
    is_ready.set()
    with pytest.raises(MemlabError, match="is paused"):
        sweep.wait()
    sweep.stop()
    assert [str(result.outcome) for result in sweep.wait(60)][:1] == ["ok"]


def test_a_picture_that_cannot_be_drawn_ends_no_sweep(runs, monkeypatch):
    draw, shown, is_ready = live_sweep._drawn, [], threading.Event()

    def broken(results):
        if 0 < len(results) < 3:
            raise ValueError("a <bad> label")
        return draw(results)

    def look(size):
        assert is_ready.wait(60)
        if size == 2:
            shown.append(sweep._picture.value)

    monkeypatch.setattr(live_sweep, "_drawn", broken)
    runs.doing = look
    sweep = memlab.live_sweep(WORKLOAD, sizes(4), "cpu")
    is_ready.set()
    table = sweep.wait(60)
    assert [str(result.outcome) for result in table] == ["ok"] * 4
    assert "could not be drawn (ValueError: a &lt;bad&gt; label); the sweep goes on" in shown[0]
    assert "<svg" in sweep._picture.value  # the next one was
    assert runs.ended() == once(4)


def test_what_a_sweep_raises_is_shown_and_raised(runs):
    sweep = memlab.live_sweep(WORKLOAD, {"batch_size": 3}, "cpu")
    with pytest.raises(MemlabError, match="is not a list"):
        sweep.wait(60)
    assert "is not a list" in sweep._text.value
    assert repr(sweep).startswith("sweep that has failed")
    with pytest.raises(MemlabError, match="on_progress belongs to the buttons"):
        memlab.live_sweep(WORKLOAD, sizes(1), "cpu", on_progress=print)
