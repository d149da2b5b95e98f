"""The panel's threads: of messages the first at once and the last always, of calls the newest."""

import subprocess
import sys
import threading
from types import SimpleNamespace

from memlab._panel import job, page, panel_state
from memlab._panel.saved_page import Still
from memlab.runtime import isolation
from tests.panel_parts import PATIENCE_SECONDS, make_facts, opened, until


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


def test_what_a_notebook_saves_is_not_renewed_once_its_kernel_ends(monkeypatch):
    class Known(Still):
        _key, _result = property(lambda self: len(shown)), "known"

        def html(self):
            return "<p>"

    shown = []
    page = SimpleNamespace(guarded=threading.Lock)
    still = Known(None, page, None, "memlab-1")
    still._plain, still._shown = {}, None
    still._output = SimpleNamespace(update=lambda bundle, raw: shown.append(bundle))
    still.renew_now()
    assert shown == [{"text/html": "<p>"}]
    monkeypatch.setattr(isolation, "leaving", threading.Event())
    isolation.leaving.set()
    still.renew_now()
    assert len(shown) == 1
    still.close()


def test_threads_know_that_a_process_ends_before_anything_has_ended():
    code = (
        "import atexit\n"
        "from memlab.runtime import isolation\n"
        "atexit.register(lambda: print(isolation.leaving.is_set()))\n"  # called first
        "print(isolation.leaving.is_set())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_a_page_is_heard_though_the_subshell_of_the_last_answer_has_ended():
    made = panel_state.PanelState(lambda message: None)
    for tell in (lambda: made.tell(job={"text": "building"}), lambda: made.send_csv("a,b")):
        made.comm._reply_subshell_id = "of JupyterLab's restore"  # as ipykernel notes it in `send`
        tell()
        assert not hasattr(made.comm, "_reply_subshell_id")
    made.close()
    made.send_csv("a,b")


def test_of_panels_that_are_closed_meanwhile_no_workload_is_looked_at(monkeypatch):
    """Each would wait for the worker in turn, and so would what a person asks for next."""
    looked, end = [], threading.Event()

    def look(workload):
        looked.append(workload.name)
        assert end.wait(PATIENCE_SECONDS)
        return make_facts()

    monkeypatch.setattr(page, "inspect_workload", look)
    with opened("t4") as first:
        until(lambda: looked)
        closed = []
        for _ in range(3):
            with opened("t4") as panel:
                closed.append(panel)
        end.set()
        for panel in (first, *closed):
            assert panel._page._find_facts.wait(PATIENCE_SECONDS)
    assert len(looked) == 1
