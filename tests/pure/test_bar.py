"""The bar of a call that takes a while: one for each call, and nothing where nobody watches."""

import contextlib
import io
import threading

import pytest
from jupyter_client.manager import start_new_kernel

from memlab.running import Progress
from memlab.runtime import bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


@bar.shows_progress
def outer(*, on_progress=None, progress=True):
    on_progress and on_progress(Progress(text="outer", fraction=0.1))
    inner()
    bar.tick()
    return on_progress


@bar.shows_progress
def inner(*, on_progress=None, progress=True):
    on_progress and on_progress(Progress(text="inner", fraction=0.5))
    return on_progress


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(bar, "_is_notebook", lambda: False)
    monkeypatch.setattr(bar, "DELAY_SECONDS", 0.0)
    monkeypatch.setattr(bar, "UPDATE_SECONDS", 0.0)
    with contextlib.ExitStack() as stack:  # pytest replaces stderr between fixture and test
        yield lambda: stack.enter_context(contextlib.redirect_stderr(Terminal()))


def test_a_call_has_one_bar_which_is_gone_when_it_ends(terminal):
    shown = terminal()
    outer()
    shown = shown.getvalue()
    assert "10 %|" in shown
    assert "outer" in shown
    assert "inner" not in shown  # the call that was asked for tells how far it is
    assert shown.rpartition("outer")[2].strip("\r \x1b[A\n") == ""


def test_a_bar_is_not_left_behind_by_an_error(terminal):
    @bar.shows_progress
    def fails(*, on_progress=None, progress=True):
        on_progress(Progress(text="about to fail", fraction=0.2))
        raise ValueError

    shown = terminal()
    with pytest.raises(ValueError, match=r"^$"):
        fails()
    assert bar._shown == []
    assert shown.getvalue().rpartition("fail")[2].strip("\r \x1b[A\n") == ""


@pytest.mark.parametrize("options", [{"progress": False}, {"on_progress": lambda _: None}])
def test_no_bar_where_it_is_not_wanted_not_even_of_a_call_inside(terminal, options):
    shown = terminal()
    outer(**options)
    assert shown.getvalue() == ""


def test_no_bar_in_a_thread_nor_without_a_terminal_nor_of_a_call_that_is_over_at_once(
    terminal, monkeypatch
):
    shown = terminal()
    with monkeypatch.context() as patch:
        patch.setattr(bar, "DELAY_SECONDS", 60.0)
        outer()
    thread = threading.Thread(target=outer)
    thread.start()
    thread.join()
    monkeypatch.setattr(shown, "isatty", lambda: False)
    assert outer() is None
    assert shown.getvalue() == ""
    for stream in (None, object()):
        monkeypatch.setattr("sys.stderr", stream)
        assert outer() is None


CELL = """
from memlab.running import Progress
from memlab.runtime import bar
bar.DELAY_SECONDS = 0.0

@bar.shows_progress
def call(*, on_progress=None, progress=True):
    on_progress and on_progress(Progress(text="half", fraction=0.5))

call()
"""


@pytest.mark.slow
def test_a_page_shows_a_bar_and_papermill_none():
    """A page names the cell in its request; what runs a notebook without a page does not."""
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        kinds = {}
        for metadata in ({}, {"cellId": "a"}):
            content = {"code": CELL, "silent": False, "store_history": False}
            request = client.session.msg("execute_request", content, metadata=metadata)
            client.shell_channel.send(request)
            found = []
            while True:
                message = client.get_iopub_msg(timeout=120)
                if message["parent_header"].get("msg_id") != request["header"]["msg_id"]:
                    continue
                found.append(message)
                if message["content"].get("execution_state") == "idle":
                    break
            assert not [one for one in found if one["msg_type"] in ("error", "stream")]
            kinds[len(metadata)] = [
                (one["msg_type"], sorted(one["content"]["data"]))
                for one in found
                if one["msg_type"].endswith("display_data")
            ]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert kinds[0] == []
    shown, gone = kinds[1]
    assert "application/vnd.jupyter.widget-view+json" in shown[1]
    assert gone == ("update_display_data", ["text/plain"])
