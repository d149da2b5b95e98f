"""The caller's side of a run, either in a worker that is kept running or in this process.

Only one measurement runs at a time, because two would slow each other down. One prediction may run
beside it. However a worker ends, the caller gets `Ended`, and a new worker is started at once.
"""

import atexit
import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memlab._util.units import format_seconds, shown
from memlab.errors import ConfigError, MemlabError
from memlab.result import Outcome
from memlab.running import Ended, Progress, Run
from memlab.runtime.bar import tick
from memlab.runtime.process import STARTING, TAKING, Spare, WorkerProcess, has_little_memory
from memlab.runtime.same_step import step_of
from memlab.runtime.sending import (
    Stamp,
    for_worker,
    in_one_form,
    own_files,
    own_values,
    pickled,
    without_cards,
)
from memlab.runtime.wire import POLL_SECONDS, PREDICTING, Check, Job
from memlab.workloads import check_installed

START_SECONDS = 600.0  # importing torch takes 3 s of a free processor, and minutes of a busy one
ENDED_WITH = "stopped, because its kernel or script ended"
TOO_LONG = "raise timeout_seconds, or make the step smaller"
NOT_STARTED = "other programs keep the processor busy: try again once they have ended"
GIVE_UP_SECONDS = 1.0  # within which a worker leaves a prediction, or is killed
BY_NAME = "on <module '__main__'"  # part of Python's error for a name that __main__ lacks
OnProgress = Callable[[Progress], None]


class Lane:
    """A worker and the lock that decides which thread may use it.

    Attributes:
        is_predicting: whether the jobs are predictions; otherwise they run real steps.
        lock: held while a job runs, here or in the worker.
        num_waiting: jobs that wait for it.
        owner: the thread that holds the lock.
        worker: None until it is first needed.
        stamps: of a person's own files that the worker which answered last had imported or read.
    """

    def __init__(self, *, is_predicting: bool) -> None:
        self.is_predicting = is_predicting
        self.lock = threading.Lock()
        self.num_waiting = 0
        self.owner: int | None = None
        self.worker: WorkerProcess | None = None
        self.stamps: dict[str, Stamp | None] = {}

    @contextlib.contextmanager
    def turn(self, tell: OnProgress, cancel: threading.Event) -> Iterator[None]:
        """Wait until no other job runs in this lane.

        Raises:
            Ended: the job was cancelled before it began.
            MemlabError: this thread already runs a job, and would wait for itself.
        """
        if self.owner == threading.get_ident():
            raise MemlabError(
                "a run cannot start another run from inside itself (from on_progress, or from the "
                "workload); start it after this one has ended"
            )

        if not self.lock.acquire(blocking=False):
            tell(Progress(text="waiting for another run to end", fraction=0.0))
            self.num_waiting += 1
            try:
                while not self.lock.acquire(timeout=POLL_SECONDS):
                    if cancel.is_set():
                        raise Ended(Outcome.CANCELLED, "stopped before it began")
            finally:
                self.num_waiting -= 1

        self.owner = threading.get_ident()
        try:
            yield
        finally:
            self.owner = None
            self.lock.release()

    def ensure(self) -> WorkerProcess:
        """Return the worker; start a new one if there is none or the old one takes no more jobs."""
        if self.worker is None or self.worker.is_spent():
            self.replace()
        assert self.worker is not None
        return self.worker

    def replace(self) -> None:
        """End the worker and start a new one, so that the next job need not wait for it."""
        if self.worker is not None:
            self.worker.kill()
        self.worker = spare.take() or WorkerProcess()
        self.worker.assign(is_predicting=self.is_predicting)

    def forget(self) -> None:
        """In a forked child: the worker and the lock are the parent's."""
        if self.worker is not None:
            self.worker.forget()
        self.lock, self.owner, self.worker = threading.Lock(), None, None


# predictions have a worker of their own: they run beside a measurement, and they register a
# stand-in for CUDA in torch, which cannot be undone and must not affect measurements
measuring, predicting = Lane(is_predicting=False), Lane(is_predicting=True)


def _lane_of(function: str) -> Lane:
    return predicting if function in PREDICTING else measuring


def is_measuring() -> bool:
    """Return whether a real step is running, here or in the worker."""
    return measuring.lock.locked()


def is_predicting() -> bool:
    """Return whether a prediction is running, here or in the worker."""
    return predicting.lock.locked()


def is_waited_for() -> bool:
    """Return whether a prediction waits for the end of the one that is running."""
    return predicting.num_waiting > 0


def prewarm() -> None:
    """Start the workers that are not running, without waiting for them.

    With little memory it is the one that predicts; the other starts with its first job.
    """
    _ensure([predicting] if has_little_memory() else [measuring, predicting])


def _replace_spent() -> None:
    """Replace workers that take no more jobs, so that the next job need not wait for a start.

    With little memory the one that measures ends.
    """
    lanes = [lane for lane in (measuring, predicting) if lane.worker is not None]
    if has_little_memory() and measuring in lanes:
        lanes.remove(measuring)
        if measuring.lock.acquire(blocking=False):
            worker, measuring.worker = measuring.worker, None
            measuring.lock.release()
            if worker is not None:
                worker.kill()
    _ensure(lanes)


def _ensure(lanes: list[Lane]) -> None:
    for lane in lanes:
        if lane.lock.acquire(blocking=False):
            try:
                lane.ensure()
            finally:
                lane.lock.release()


spare = Spare(before_start=_replace_spent)


def run(
    function: str,
    arguments: dict[str, Any],
    *,
    timeout_seconds: float,
    on_progress: OnProgress | None = None,
    cancel: threading.Event | None = None,
    guard_bytes: int | None = None,
) -> Any:
    """Run a function of the worker and return its value.

    Args:
        function: name in `memlab.runtime.serving.FUNCTIONS`.
        arguments: sent by cloudpickle.
        timeout_seconds: counted from when the worker takes the job.
        on_progress: called in this thread.
        cancel: once set, the job is given up, and the worker is killed if it works on.
        guard_bytes: see `memlab.runtime.wire.Job`.

    Raises:
        Ended: the run ended without a value; the message says why.
        WorkloadError: the arguments cannot be sent, or the workload needs a missing package.
    """
    cancel = cancel or threading.Event()
    tell = teller(on_progress)
    check_installed(arguments.get("workload"))
    arguments = in_one_form(arguments)
    files = own_files()
    values, path, environment = own_values(files), list(sys.path), for_worker(os.environ)
    lane = _lane_of(function)
    job = Job(
        function=function,
        arguments=pickled(arguments),
        step=step_of(function, arguments, own_values=values, path=path, environment=environment),
        path=path,
        folder=_folder(),
        own_files=files,
        own_values=values,
        environment=without_cards(environment) if lane.is_predicting else environment,
        threads=torch.get_num_threads(),
        guard_bytes=guard_bytes,
    )

    with lane.turn(tell, cancel), spare.waits(is_timed=lane is measuring):
        return _converse(lane, job, timeout_seconds, tell, cancel)


def _converse(
    lane: Lane, job: Job, timeout_seconds: float, tell: OnProgress, cancel: threading.Event
) -> Any:
    tried_again = False
    while True:
        worker, is_sent = lane.ensure(), False
        try:
            if worker.doing == STARTING:
                tell(Progress(text="starting the worker", fraction=0.0))
                _receive(worker, _check(worker, START_SECONDS, cancel, NOT_STARTED), tell)
            check = _check(worker, timeout_seconds, cancel, TOO_LONG)
            worker.send(job, check)
            is_sent = True
            kind, value = _receive(worker, check, tell)
        except Ended as ended:
            if leaving.is_set():
                raise Ended(Outcome.CANCELLED, ENDED_WITH) from None
            is_cancelled = ended.outcome is Outcome.CANCELLED and lane.is_predicting
            if not (is_cancelled and is_sent and _gives_up(worker)):
                lane.replace()
            if ended.outcome is not Outcome.CRASHED or worker.doing != TAKING or tried_again:
                raise
            tried_again = True  # the worker died while idle, before it had read the job
            continue
        except BaseException:
            lane.replace()
            raise

        if kind == "result":
            lane.stamps = worker.stamps
            return value

        lane.replace()
        if kind == "stale":  # an earlier job changed the worker, or a person's file was edited
            continue
        if not tried_again:  # the cause may be the worker and not the job
            tried_again = True
            continue
        if kind == "unloadable":
            raise Ended(Outcome.FAILED, _unloadable(value))

        raise Ended(Outcome.FAILED, f"memlab failed while {worker.doing}: {value}")


def _gives_up(worker: WorkerProcess) -> bool:
    """Return whether a worker left its prediction at once, and so need not be replaced.

    A new one would have to import the workload's libraries again.
    """
    check = _check(worker, GIVE_UP_SECONDS, threading.Event(), TOO_LONG)
    with contextlib.suppress(Ended):
        worker.give_up(check)
        return _receive(worker, check, lambda _: None)[0] in ("result", "raised")
    return False


def _unloadable(error: str) -> str:
    """Return the message for a workload that the worker could not unpickle."""
    said = f"the worker could not load the workload: {error}"
    if BY_NAME not in error:
        return said
    return (
        f"{said}; it is defined in this notebook or script, where the worker cannot find it by "
        "name; define it in a module that you import, or inside build_model, or measure with "
        "isolate=False"
    )


def _check(
    worker: WorkerProcess, timeout_seconds: float, cancel: threading.Event, remedy: str
) -> Check:
    """Return a function that raises `Ended` once the run is cancelled or its time is over."""
    deadline = time.monotonic() + timeout_seconds

    def check() -> None:
        tick()
        if over := _over(cancel, deadline, timeout_seconds, worker.doing, remedy):
            raise Ended(*over)

    return check


def _receive(worker: WorkerProcess, check: Check, tell: OnProgress) -> tuple[str, Any]:
    """Return the worker's next message that ends a job or a start.

    Raises:
        Ended: the run was stopped or timed out, or the worker is gone.
    """
    while True:
        kind, value = worker.receive(check)
        if kind == "sources":
            worker.stamps = value
        elif kind == "progress":
            tell(value)
        else:
            return kind, value


def _forget() -> None:
    for holder in (measuring, predicting, spare):
        holder.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


leaving = threading.Event()


def _leave() -> None:
    """Have threads send nothing any more, and wait until what they have sent is on its way.

    A kernel ends piece by piece while threads go on. Once pyzmq's collector has ended, a message
    with a large part fails in its middle, and spoils the one that is sent after it.
    """
    leaving.set()
    with contextlib.suppress(Exception):  # there is none, or it is closed
        sys.stdout.flush()  # that of ipykernel waits for the thread that sends


@atexit.register
def _stop() -> None:
    spare.end()
    for lane in (measuring, predicting):
        if lane.worker is not None:
            lane.worker.kill()


with contextlib.suppress(RuntimeError):  # Python ends already
    # what is registered here is called before all that `atexit` calls
    getattr(threading, "_register_atexit", atexit.register)(_leave)


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise MemlabError(
            "the working folder of this process has been deleted; call os.chdir with an existing "
            "folder"
        ) from None


def run_here(
    function: str,
    arguments: dict[str, Any],
    *,
    timeout_seconds: float,
    on_progress: OnProgress | None = None,
    cancel: threading.Event | None = None,
) -> Any:
    """Run a function of the worker in this process; it can be stopped only between two steps."""
    check_installed(arguments.get("workload"))
    deadline = time.monotonic() + timeout_seconds
    # late, because the caller of a worker needs nothing of what runs there
    from memlab.runtime.serving import FUNCTIONS

    raised: list[Exception] = []

    def report(progress: Progress) -> None:
        if over := _over(cancel, deadline, timeout_seconds, progress.text, TOO_LONG):
            raise Ended(*over)
        try:
            tell(progress)
        except Exception as error:  # an error of the caller's function, not of the workload
            raised.append(error)
            raise

    tell = teller(on_progress)
    with _lane_of(function).turn(tell, cancel or threading.Event()):
        value = FUNCTIONS[function](**arguments, report=report)
    if raised:
        raise raised[0]

    return value


def teller(
    function: Callable[[Any], None] | None, name: str = "on_progress", what: str = "a Progress"
) -> Callable[[Any], None]:
    """Return a function that calls a person's own; errors that this raises reach the caller."""

    def tell(value: Any) -> None:
        if function is None:
            return

        try:
            function(value)
        except Exception as error:
            here = error.__traceback__
            was_entered = here is not None and here.tb_next is not None
            if was_entered or isinstance(error, MemlabError):
                raise
            raise ConfigError(
                f"{name}={shown(function)} cannot be called with {what} ({error}); "
                "pass a function of one argument"
            ) from error

    return tell


def _over(
    cancel: threading.Event | None,
    deadline: float,
    timeout_seconds: float,
    doing: str,
    remedy: str,
) -> tuple[Outcome, str] | None:
    """Return the outcome and the message of a run that has to end now, or None."""
    if cancel is not None and cancel.is_set():
        return Outcome.CANCELLED, f"stopped while {doing}"

    if time.monotonic() > deadline:
        text = f"not finished after {format_seconds(timeout_seconds)}, while {doing}; {remedy}"
        return Outcome.TIMED_OUT, text
    return None


def runner(
    isolate: bool,
    timeout_seconds: float,
    on_progress: OnProgress | None,
    cancel: threading.Event | None,
) -> Run:
    """Return a function that runs jobs with the options that a public function was given."""
    return functools.partial(
        run if isolate else run_here,
        timeout_seconds=timeout_seconds,
        on_progress=on_progress,
        cancel=cancel,
    )
