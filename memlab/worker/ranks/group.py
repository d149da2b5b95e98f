"""`RankGroup`: start the ranks of one step, ask all of them the same, and end them.

The launcher is torch's own (`elastic_launch`), which runs in a thread: it starts one process for
each rank, gives it its place in the environment, and ends the others when one of them ends badly.
Each rank connects to a socket in a folder of the group. A call writes its arguments to a file in
this folder, which all ranks read, and each rank writes its value to another: gradients of a whole
model are too large for messages.

Ranks wait for one another inside of collectives. So when one has ended, failed or answered that it
could not go on, the others are given a moment and are then stopped.
"""

import contextlib
import dataclasses
import json
import logging
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memlab.arguments.libraries import is_library
from memlab.arguments.units import format_seconds
from memlab.result import Outcome
from memlab.running import Ended, Progress, Report
from memlab.sending.by_value import dumps
from memlab.worker import start
from memlab.worker.job import Job
from memlab.worker.kept import interpreter
from memlab.worker.ranks.rank import ANSWERS, ARGUMENTS, JOB, SOCKET, RankJob
from memlab.worker.wire import Channel, Garbage

START_SECONDS = 300.0  # importing torch takes 3 s of a free processor, for each rank
GRACE_SECONDS = 2.0  # for the other ranks to fail by the same cause, before they are stopped
END_SECONDS = 5.0
STACK_SECONDS = 0.5  # for ranks to write down where they are
POLL_SECONDS = 0.01
STARTING = "starting"
STACK = "Current thread"  # with which faulthandler begins that of the main thread
COLLECTIVES = f"{os.sep}torch{os.sep}distributed{os.sep}"  # in the files that wait for other ranks
SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"  # a variable that the launcher sets in its own process
TOO_LONG = "raise timeout_seconds, or make the step smaller"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What became of a call in one rank.

    Attributes:
        value: what the function returned, if `outcome` is ok.
        outcome: ok, failed, crashed, timed_out or cancelled.
        message: how the rank ended, in a clause: "was ended by SIGKILL while timing step 2".
        order: how many ranks had answered before.
    """

    outcome: Outcome
    value: Any = None
    message: str = ""
    order: int = 0


class RankGroup:
    """The ranks of one step; a context manager that ends them whatever happens.

    Args:
        job: whose surroundings the ranks share: path, folder, the person's files; its threads are
            those of each rank.
        world_size: number of ranks.
        device_type: "cpu" or "cuda".
        deadline: by `time.monotonic`, when the ranks are stopped.
        report: called with the progress of the first rank.
    """

    def __init__(
        self, job: Job, world_size: int, device_type: str, deadline: float, report: Report
    ) -> None:
        self.world_size, self.deadline, self.report = world_size, deadline, report
        self.began = time.monotonic()
        self.folder = Path(tempfile.mkdtemp(prefix="memlab-"))
        self.channels: dict[int, Channel] = {}
        self.processes: dict[int, int] = {}
        self.doing = dict.fromkeys(range(world_size), STARTING)
        self.num_calls = 0
        self._failures: dict[int, int] = {}  # exit status by rank, as the launcher reports it
        self._first_failure: int | None = None
        self._error: BaseException | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.folder / SOCKET))
        self._listener.listen(world_size)
        self._listener.setblocking(False)
        ranks = RankJob(
            path=job.path,
            folder=job.folder,
            own_files=job.own_files,
            own_values=job.own_values,
            threads=job.threads,
            device_type=device_type,
            world_size=world_size,
        )
        (self.folder / JOB).write_bytes(pickle.dumps(ranks))
        self._launcher = threading.Thread(target=self._launch, daemon=True)

    def __enter__(self) -> "RankGroup":
        """Start the ranks and wait until all of them have opened the process group."""
        try:
            self.report(Progress(text=f"starting {self.world_size} ranks", fraction=0.0))
            self._launcher.start()
            self._await_ranks(min(self.deadline, self.began + START_SECONDS))
        except BaseException:
            self.close(is_failed=True)
            raise
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        """End the ranks."""
        self.close(is_failed=kind is not None)

    def call(
        self, function: str, arguments: dict[str, Any], is_good: Callable[[Any], bool]
    ) -> list[Answer]:
        """Run a function in every rank and return what became of it, by rank.

        Args:
            function: name in `memlab.worker.ranks.rank.FUNCTIONS`.
            arguments: of the function.
            is_good: whether the other ranks can go on beside a rank with this value.
        """
        self.num_calls += 1
        (self.folder / f"{ARGUMENTS}{self.num_calls}").write_bytes(dumps(arguments))
        for channel in self.channels.values():
            with contextlib.suppress(OSError):  # a rank that is gone is noticed below
                channel.send(self.num_calls, pickle.dumps(function))

        answers: dict[int, Answer] = {}
        stop_at = self.deadline
        while len(answers) < self.world_size and time.monotonic() < stop_at:
            for rank, answer in self._heard(answers):
                answers[rank] = dataclasses.replace(answer, order=len(answers))
                if answer.outcome is not Outcome.OK or not is_good(answer.value):
                    stop_at = min(stop_at, time.monotonic() + GRACE_SECONDS)
            time.sleep(POLL_SECONDS)

        if len(answers) < self.world_size:
            self._stop_rest(answers)
        return [answers[rank] for rank in range(self.world_size)]

    @property
    def has_ended(self) -> bool:
        """Whether the ranks take no more calls."""
        return not self._launcher.is_alive()

    def _heard(self, answers: dict[int, Answer]) -> list[tuple[int, Answer]]:
        """Return the ranks that have answered or ended since, and report progress."""
        found = []
        for rank, channel in self.channels.items():
            while rank not in answers and channel.has_unread():
                try:
                    number, content = channel.receive_checked(self._check, lambda: False)
                except (EOFError, OSError, Garbage):
                    found.append((rank, self._ending(rank)))
                    break
                kind, value = pickle.loads(content)
                if number != self.num_calls:
                    continue
                if kind == "progress":
                    self.doing[rank] = value.text
                    if rank == 0:
                        self.report(value)
                    continue
                if kind == "answered":
                    path = self.folder / f"{ANSWERS}{self.num_calls}.{rank}"
                    answer = Answer(outcome=Outcome.OK, value=pickle.loads(path.read_bytes()))
                    path.unlink()
                else:
                    answer = Answer(outcome=Outcome.FAILED, message=f"failed: {value}")
                found.append((rank, answer))
                break
        return found

    def _check(self) -> None:
        """Stop reading a message that does not come to its end."""
        if time.monotonic() > self.deadline + END_SECONDS:
            raise EOFError

    def _stop_rest(self, answers: dict[int, Answer]) -> None:
        """Stop the ranks that have not answered, and write down how."""
        is_late = time.monotonic() >= self.deadline
        waiting = [rank for rank in range(self.world_size) if rank not in answers]
        stacks = self._stacks(waiting) if is_late else {}
        self._kill()
        for rank in waiting:
            answers[rank] = self._late(rank, stacks[rank]) if is_late else self._stopped(rank)

    def _stopped(self, rank: int) -> Answer:
        message = f"was stopped while {self.doing[rank]}, because another rank had ended"
        return Answer(outcome=Outcome.CANCELLED, message=message)

    def _late(self, rank: int, said: str) -> Answer:
        """Return what a rank did when the time was over: it waited for another, or it did not."""
        if COLLECTIVES in said.rpartition(STACK)[2]:
            message = f"waited for another rank, while {self.doing[rank]}"
            return Answer(outcome=Outcome.CANCELLED, message=message)
        took = format_seconds(self.deadline - self.began)
        message = f"had not finished after {took}, while {self.doing[rank]}{_innermost(said)}"
        return Answer(outcome=Outcome.TIMED_OUT, message=f"{message}; {TOO_LONG}")

    def _stacks(self, waiting: list[int]) -> dict[int, str]:
        """Return what the ranks have said, with the stacks of their threads at the end."""
        for rank in waiting:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank], signal.SIGUSR1)  # faulthandler writes the stack
        time.sleep(STACK_SECONDS)
        return {rank: self._said(rank) for rank in waiting}

    def _said(self, rank: int) -> str:
        """Return what a rank has written to its standard error."""
        files = list(self.folder.glob(f"logs/**/{rank}/stderr.log"))
        return files[0].read_text(errors="replace") if files else ""

    def _ending(self, rank: int) -> Answer:
        """Return how a rank has ended that is gone."""
        self._launcher.join(END_SECONDS)
        if self._first_failure not in (None, rank):  # the launcher has ended this one
            return self._stopped(rank)
        code = self._failures.get(rank)
        how = "ended"
        if code is not None:
            how = f"was ended by {_signal_name(-code)}" if code < 0 else f"exited with {code}"
        where = _innermost(self._said(rank))
        return Answer(outcome=Outcome.CRASHED, message=f"{how} while {self.doing[rank]}{where}")

    def _await_ranks(self, until: float) -> None:
        """Wait until every rank has connected and opened the process group.

        Raises:
            Ended: a rank ended before that, or it took too long.
        """
        arrived: list[Channel] = []
        while len(self.channels) < self.world_size:
            with contextlib.suppress(BlockingIOError):
                end, _ = self._listener.accept()
                arrived.append(Channel(end, blocks=False))
            for channel in list(arrived):
                if channel.has_unread():
                    self._welcome(channel)
                    arrived.remove(channel)

            if not self._launcher.is_alive():
                raise Ended(Outcome.CRASHED, self._not_started())
            if time.monotonic() > until:
                took = format_seconds(time.monotonic() - self.began)
                missing = [str(r) for r in range(self.world_size) if r not in self.channels]
                raise Ended(
                    Outcome.TIMED_OUT,
                    f"ranks {', '.join(missing)} of {self.world_size} had not started after "
                    f"{took}; raise timeout_seconds, or lower world_size",
                )
            time.sleep(POLL_SECONDS)

    def _welcome(self, channel: Channel) -> None:
        _, content = channel.receive_checked(self._check, lambda: False)
        rank, process = pickle.loads(content)
        self.channels[rank], self.processes[rank] = channel, process

    def _not_started(self) -> str:
        said = [line for r in range(self.world_size) for line in self._said(r).splitlines()]
        why = said[-1].strip() if said else str(self._error or "no answer")
        return f"the {self.world_size} ranks could not be started: {why}"

    def close(self, *, is_failed: bool) -> None:
        """End the ranks: by closing their sockets, and those that do not end then by force."""
        for channel in self.channels.values():
            channel.close()
        self._listener.close()
        if is_failed:
            self._kill()
        if self._launcher.ident is not None:
            self._launcher.join(END_SECONDS)
            if self._launcher.is_alive():
                self._kill()
                self._launcher.join(END_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _kill(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _launch(self) -> None:
        """Run torch's elastic launcher until all ranks have ended."""
        # it warns that a thread cannot handle signals, and reports failures that we report; known
        # before its children, or they would change their parent, and this worker would be changed
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        # late: half a second that only sharded steps need
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self.world_size,
            run_id=self.folder.name,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # any free port
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=str(self.folder / "logs"), redirects=Std.ALL),
        )
        settings = {
            "rank_folder": str(self.folder),
            "path": [folder for folder in sys.path if isinstance(folder, str)],
            "environment": {},
        }
        command = ["-P", str(start.__file__), json.dumps(settings), str(os.getpid())]
        own = os.environ.get(SIGNALS)
        try:
            elastic_launch(config, interpreter())(*command)
        except ChildFailedError as error:
            self._failures = {rank: f.exitcode for rank, f in error.failures.items()}
            self._first_failure, _ = error.get_first_failure()
        except BaseException as error:
            self._error = error
        finally:
            os.environ.pop(SIGNALS, None)
            if own is not None:
                os.environ[SIGNALS] = own


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _innermost(said: str) -> str:
    """Return the innermost frame of a stack that faulthandler wrote, of a person's own code if any.

    Of several stacks the last is read.
    """
    _, _, stack = said.rpartition(STACK)
    frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', stack)
    own = [frame for frame in frames if not is_library(frame[0])]
    for file, line, function in own[:1] or frames[:1]:
        return f", in {function} ({file}, line {line})"
    return ""
