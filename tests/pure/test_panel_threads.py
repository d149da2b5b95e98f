"""The panel's threads: of messages the first at once and the last always, of calls the newest."""

import threading

from memlab._panel import job, panel_state
from memlab.runtime import isolation
from tests.panel_parts import PATIENCE_SECONDS, until


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


def test_a_thread_sends_nothing_once_its_kernel_ends(monkeypatch):
    sent = []
    made = panel_state.PanelState(lambda message: None)
    monkeypatch.setattr(made.comm, "send", lambda **message: sent.append(message))
    made.tell(job={"text": "building"})
    made.send_csv("a,b")
    assert len(sent) == 2
    monkeypatch.setattr(isolation, "leaving", threading.Event())
    isolation.leaving.set()
    made.tell(job={"text": "predicting"})
    made.send_csv("a,b")
    with made.together():
        made.tell(job={"text": "measuring"})
    assert len(sent) == 2
