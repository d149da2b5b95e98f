"""The line between a caller and its worker: whatever a model does to it is an outcome."""

import ctypes
import multiprocessing
import os
import pickle
import signal
import socket
import stat
import struct
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from memlab import StepConfig, measure, predict
from memlab._util.units import MIB
from memlab.running import Progress
from memlab.runtime import isolation, serving
from memlab.runtime.loading import resident_bytes
from memlab.runtime.process import WorkerProcess
from memlab.runtime.wire import HEADER, MAGIC, Channel
from tests.models import blocks, linear, made_of
from tests.worker_parts import assert_worker_is_back, doing, wait_for


def fork_in_c():
    ctypes.CDLL(None).fork()  # no handler of Python's runs in the child


def fork_in_a_library():
    child = multiprocessing.get_context("fork").Process(target=os.getpid)
    child.start()
    child.join()


def answer_twice():
    content = pickle.dumps(("result", "of nobody's question"))
    os.write(worker_socket(), HEADER.pack(MAGIC, 0, len(content)) + content)


def worker_socket():
    """Return the descriptor that the worker answers on."""
    sockets = [
        int(name)
        for name in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{name}")
        and stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode)
    ]
    assert len(sockets) == 1
    return sockets[0]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "action",
    [os.fork, os.forkpty, fork_in_c, fork_in_a_library, answer_twice],
    ids=lambda action: action.__name__,
)
def test_each_result_is_that_of_its_own_question(action):
    assert doing(action).outcome == "ok"
    for batch_size in (1, 2, 3):
        result = measure(linear(), StepConfig(batch_size=batch_size), "cpu", repeats=1)
        here = measure(linear(), StepConfig(batch_size=batch_size), "cpu", repeats=1, isolate=False)
        assert result.peak_by_category == here.peak_by_category
        assert result.workload_name == "linear"


def write_to_the_socket(content):
    return lambda: os.write(worker_socket(), content)


def close_all():
    os.closerange(3, 4096)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("action", "said"),
    [
        (
            write_to_the_socket(struct.pack("!i", 1000)),
            "cannot be read",
        ),  # only a header, elsewhere
        (close_all, "socket was closed"),
        (lambda: os.kill(os.getppid(), 9), "SIGKILL"),  # of what keeps the worker
    ],
)
def test_whatever_a_model_does_to_the_line_is_an_outcome(action, said):
    result = doing(action)
    assert (result.outcome, said in result.message) == ("crashed", True), result.message


@pytest.mark.slow
def test_a_header_without_a_body_ends_with_the_time_limit():
    result = doing(write_to_the_socket(HEADER.pack(MAGIC, 1, 10**6)), timeout_seconds=5)
    assert result.outcome == "timed_out"
    assert_worker_is_back()


@pytest.mark.parametrize(
    "other",
    [(blocks(), StepConfig()), (linear(), StepConfig(optimizer="sgd"))],
    ids=["workload", "config"],
)
def test_an_answer_to_another_question_is_not_taken(monkeypatch, other):
    answer = measure(*other, "cpu", repeats=1, isolate=False)
    monkeypatch.setattr(isolation, "run", lambda *_, **__: answer)
    result = measure(linear(), StepConfig(), "cpu")
    assert (result.outcome, result.config) == ("crashed", StepConfig())
    assert "was not asked for" in result.message


class FakeProcess:
    """A worker that has ended, or not."""

    def poll(self):
        return None


@pytest.fixture
def line():
    """A worker as its caller holds it, and the channel at its other end."""
    ours, theirs = socket.socketpair()
    worker = object.__new__(WorkerProcess)
    worker.process, worker.channel = FakeProcess(), Channel(ours, blocks=False)
    worker.number, worker.doing = 7, "testing"
    yield worker, Channel(theirs, blocks=True)
    ours.close()
    theirs.close()


def test_messages_of_other_jobs_are_not_heard(line):
    worker, end = line
    for number in (6, 8, 0, 7, 7):  # the last is a second answer
        end.send(number, pickle.dumps(("result", number)))
    assert worker.receive(lambda: None) == ("result", 7)
    worker.number = 9
    end.send(9, pickle.dumps(("result", 9)))
    assert worker.receive(lambda: None) == ("result", 9)


class Unreadable:
    def __reduce__(self):
        return (int, ("no number",))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no!",
        bytes(range(100, 200)),
        pickle.dumps(Unreadable()),
        pickle.dumps(("result", 1, 2)),
        pickle.dumps(("unheard of", 1)),
        pickle.dumps(([], 1)),
        pickle.dumps(("progress", "no progress")),
        pickle.dumps(Progress(text="x", fraction=0)),
        pickle.dumps(None),
    ],
    ids=range(10),
)
def test_what_cannot_be_read_is_a_crash_with_a_sentence(line, content):
    worker, end = line
    end.send(7, content)
    with pytest.raises(isolation.Ended, match="while testing cannot be read") as ended:
        worker.receive(lambda: None)
    assert ended.value.outcome == "crashed"


@pytest.mark.slow
def test_a_large_workload_can_be_stopped_while_it_is_sent():
    held = torch.zeros(2**26)  # 256 MiB
    workload = made_of(
        lambda: nn.Linear(held.shape[0] // 2**24, 1), (4,), lambda model, x: model(x).mean()
    )
    assert_worker_is_back()
    former = isolation.measuring.worker
    os.kill(former.process.pid, signal.SIGSTOP)  # it reads nothing any more
    cancel = threading.Event()
    stop = threading.Timer(0.5, cancel.set)
    stop.start()
    result = measure(workload, StepConfig(), "cpu", cancel=cancel)
    assert (result.outcome, result.message) == ("cancelled", "stopped while taking the job")

    isolation.measuring.worker.receive(lambda: None)  # it is ready
    isolation.measuring.worker.doing = "idle"
    os.kill(isolation.measuring.worker.process.pid, signal.SIGSTOP)
    result = measure(workload, StepConfig(), "cpu", timeout_seconds=0.5)
    assert (result.outcome, "taking the job" in result.message) == ("timed_out", True)
    assert former.has_ended()
    assert_worker_is_back()


def print_without_end():
    for _ in range(64):
        os.write(1, b"x" * MIB)
    os.abort()


def test_what_a_model_prints_has_a_bound():
    assert_worker_is_back()
    before = resident_bytes()
    result = doing(print_without_end)
    assert (result.outcome, "in print_without_end" in result.message) == ("crashed", True)
    assert resident_bytes() - before < 16 * MIB

    output = Path(f"/proc/{isolation.measuring.worker.process.pid}/fd/1")
    assert wait_for(output.is_fifo)  # no file that would grow


def test_a_prediction_that_another_job_follows_does_not_give_memory_back_first(monkeypatch):
    monkeypatch.setattr(serving, "NEXT_SECONDS", 0.0)
    ours, theirs = (Channel(end, blocks=True) for end in socket.socketpair())
    try:
        assert not serving._is_followed("predict", theirs)
        ours.send(1, b"the next job")
        assert serving._is_followed("predict", theirs)
        assert serving._is_followed("plan", theirs)
        assert not serving._is_followed("measure", theirs)
    finally:
        ours.close()
        theirs.close()


def test_a_predicted_tf32_step_leaves_its_worker_as_it_was():
    for precision in ("tf32", "as-built"):
        config = StepConfig(batch_size=8, precision=precision)
        assert predict(linear(), config, "rtx-4060").outcome == "ok"
        if precision == "tf32":
            before = isolation.predicting.worker.process.pid
    assert isolation.predicting.worker.process.pid == before
