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
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memlab._util.units import format_seconds
from memlab.config import StepConfig
from memlab.errors import MemlabError
from memlab.prediction.predict import peak_of, with_ranks
from memlab.result import Outcome, Source, StepResult
from memlab.running import Ended, Progress, Report, explain
from memlab.runtime import start
from memlab.runtime.process import innermost, interpreter, signal_name
from memlab.runtime.rank import ANSWERS, ARGUMENTS, JOB, SOCKET, RankJob, RankUpdates
from memlab.runtime.sending import dumps
from memlab.runtime.updates import UpdatesRun
from memlab.runtime.verify import verify_in_process
from memlab.runtime.verify_report import VerifyReport
from memlab.runtime.wire import Channel, Garbage, Job
from memlab.techniques.sharding.sharding import most_ranks
from memlab.techniques.technique import Plan
from memlab.workload import Workload

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
            function: name in `memlab.runtime.rank.FUNCTIONS`.
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
        where = innermost(said.rpartition(STACK)[2])
        message = f"had not finished after {took}, while {self.doing[rank]}{where}"
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
            how = f"was ended by {signal_name(-code)}" if code < 0 else f"exited with {code}"
        where = innermost(self._said(rank).rpartition(STACK)[2])
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


# Measure a sharded step: run it in real ranks, and make one result of those of all ranks.

WORST_FIRST = (
    Outcome.OUT_OF_MEMORY,
    Outcome.CRASHED,  # a rank that waits for a process that is gone fails: it lost its connection
    Outcome.FAILED,
    Outcome.UNSUPPORTED,
    Outcome.TIMED_OUT,
    Outcome.CANCELLED,
)
"""What ended a run, if ranks ended differently: the others were stopped or waited because of it."""


def measure_ranks(
    workload: Workload,
    config: StepConfig,
    device: torch.device,
    *,
    job: Job,
    timeout_seconds: float,
    report: Report,
    **arguments: Any,
) -> StepResult:
    """Measure a step of several ranks. Errors of the step are outcomes, not raised.

    Args:
        workload: what is trained.
        config: how, with sharding.
        device: of the first rank; the others have the next ones of its kind, or the same CPU.
        job: of this worker.
        timeout_seconds: after which the ranks are stopped.
        report: called during the run.
        **arguments: the others of `measure_in_process`.
    """
    deadline = time.monotonic() + timeout_seconds
    asked: dict[str, Any] = {
        "source": Source.MEASURED,
        "device": str(device),
        "config": config,
        "workload_name": workload.name,
        "own_optimizer": workload.make_optimizer is not None,
        "memory_limit_bytes": arguments["memory_limit"],
    }
    try:
        check_devices(config, device)
        job = dataclasses.replace(job, threads=config.threads_of_rank(job.threads))
        with RankGroup(job, config.world_size, device.type, deadline, report) as group:
            own = {"workload": workload, "config": config, "device_type": device.type}
            return measure_in(group, own | arguments, asked)
    except (Exception, SystemExit) as error:
        outcome, message = explain(error, "starting the ranks")
        return StepResult(**asked, outcome=outcome, message=message)


def measure_in(group: RankGroup, arguments: dict[str, Any], asked: dict[str, Any]) -> StepResult:
    """Measure a step in ranks that have started.

    Args:
        group: the ranks; one that fails ends them all.
        arguments: of `measure_rank`.
        asked: fields of the result that are known before it runs.
    """
    answers = group.call("measure", arguments, _is_ok)
    order = sorted(range(len(answers)), key=lambda rank: answers[rank].order)
    results = [_result_of(answer, rank, asked) for rank, answer in enumerate(answers)]
    return together(results, order)


def check_devices(config: StepConfig, device: torch.device) -> None:
    """Raise Ended if this machine has fewer devices than the config has ranks, or starts none."""
    if not (hasattr(socket, "AF_UNIX") and hasattr(signal, "SIGUSR1")):
        raise Ended(
            Outcome.UNSUPPORTED,
            f"sharding={str(config.sharding)!r} runs in processes that memlab starts on Linux and "
            "macOS only; use memlab.predict, which simulates them",
        )
    most = most_ranks(device)
    if config.world_size > most:
        has = f"runs at most {most} ranks" if device.type == "cpu" else f"has {most} of them"
        raise Ended(
            Outcome.UNSUPPORTED,
            f"world_size={config.world_size} is more than the devices of this machine, which "
            f"{has} on {device.type!r}; lower world_size, or use memlab.predict, which simulates "
            "any number of ranks",
        )


def together(results: Sequence[StepResult], order: Sequence[int]) -> StepResult:
    """Return one result of those of all ranks: that of the rank with the highest peak.

    If ranks have ended badly, its message is that of the one that caused it. Others lose their
    connection to it, which is an error of theirs too, and may be noticed first.

    Args:
        results: by rank.
        order: the ranks, as they have answered.
    """
    bad = [results[rank] for rank in order if results[rank].outcome is not Outcome.OK]
    if bad:
        first = min(bad, key=lambda result: WORST_FIRST.index(result.outcome))
        known = [r for r in results if r.peak_allocated_bytes is not None]
        number = first.rank_numbers[0]
        said = f"rank {number} of {len(results)}{first.message.removeprefix(f'rank {number}')}"
        if not first.message.startswith("rank "):
            said = f"rank {number} of {len(results)}: {first.message}"
        kept = first if first in known or not known else max(known, key=peak_of)
        return dataclasses.replace(
            kept, outcome=first.outcome, message=said, fits=first.fits, fit=first.fit,
            ranks=tuple(results), rank_numbers=(),
        )  # fmt: skip

    worst = max(results, key=peak_of)
    seconds = max(result.step_seconds or 0.0 for result in results)
    losses = [result.loss for result in results if result.loss is not None]
    return dataclasses.replace(
        with_ranks(worst, results),
        step_seconds=seconds,
        samples_per_second=worst.config.batch_size / seconds if seconds else None,
        loss=sum(losses) / len(losses) if losses else None,
        finite=all(result.finite for result in results),
    )


def _is_ok(result: StepResult) -> bool:
    """Return whether the other ranks can go on; all of them agree on an end above the limit."""
    if result.peak_allocated_bytes is None:
        return result.outcome is Outcome.OK
    is_over = result.outcome is Outcome.OUT_OF_MEMORY and result.fits is False
    # a rank that has failed while it was timed has a peak too, and the others wait for it
    return is_over or result.outcome in (Outcome.OK, Outcome.CANCELLED)


def _result_of(answer: Answer, rank: int, asked: dict[str, Any]) -> StepResult:
    """Return what became of one rank, which may have no result."""
    if answer.outcome is Outcome.OK:
        found: StepResult = answer.value
        return found
    message = f"rank {rank} {answer.message}"
    return StepResult(**asked, outcome=answer.outcome, message=message, rank_numbers=(rank,))


# Verify a sharded step: its updates run in real ranks, those of the reference in this
# process.


def verify_ranks(
    workload: Workload,
    config: StepConfig,
    device: torch.device,
    *,
    job: Job,
    timeout_seconds: float,
    report: Report,
    **arguments: Any,
) -> VerifyReport:
    """Compare a step of several ranks with one process; arguments as of `verify_in_process`.

    Args:
        workload: what is trained.
        config: how, with sharding.
        device: of the first rank.
        job: of this worker.
        timeout_seconds: after which the ranks are stopped.
        report: called during the run.
        **arguments: the others of `verify_in_process`.
    """
    deadline = time.monotonic() + timeout_seconds
    with contextlib.ExitStack() as opened:
        groups: list[RankGroup] = []

        def group() -> RankGroup:
            if not groups:  # what the reference refuses needs no ranks
                check_devices(config, device)
                own = dataclasses.replace(job, threads=config.threads_of_rank(job.threads))
                ranks = RankGroup(own, config.world_size, device.type, deadline, report)
                groups.append(opened.enter_context(ranks))
            return groups[0]

        return verify_in_process(
            workload, config, device, report=report, run_in_ranks=updates_in(group), **arguments
        )


def updates_in(group: Callable[[], RankGroup]) -> Callable[..., UpdatesRun]:
    """Return a function that runs updates in the ranks of a group, as `verify` asks for them."""

    def run_in_ranks(
        workload: Workload,
        config: StepConfig,
        device: torch.device,
        seed: int,
        plan: Plan | None,
        *,
        like: UpdatesRun | None,
        with_own: bool,
    ) -> UpdatesRun:
        asked = {
            "workload": workload, "config": config, "device_type": device.type, "seed": seed,
            "plan": plan, "like": like, "with_own": with_own,
        }  # fmt: skip
        return _updates(group(), asked)

    return run_in_ranks


def _updates(group: RankGroup, asked: dict[str, Any]) -> UpdatesRun:
    """Return what the updates did, as the first rank saw it, with the states that others keep.

    Raises:
        Ended: a rank could not run them.
        MemlabError: the ranks do not hold the same weights afterwards.
    """
    answers = group.call("updates", asked, lambda value: value.error is None)
    ended = [
        (answer.outcome, f"rank {rank} of {len(answers)} {answer.message}")
        for rank, answer in enumerate(answers)
        if answer.outcome is not Outcome.OK
    ]
    ended += [
        (answer.value.outcome, f"rank {rank} of {len(answers)}: {answer.value.error}")
        for rank, answer in enumerate(answers)
        if answer.outcome is Outcome.OK and answer.value.error is not None
    ]
    if ended:
        raise Ended(*min(ended, key=lambda end: WORST_FIRST.index(end[0])))

    found: list[RankUpdates] = [answer.value for answer in answers]
    first = found[0].run
    assert first is not None
    for rank, other in enumerate(found[1:], 1):
        for number, (one, two) in enumerate(
            zip(found[0].fingerprints, other.fingerprints, strict=True), 1
        ):
            if one != two:
                raise MemlabError(
                    f"after update {number} rank {rank} holds other weights than rank 0"
                )

    for index, update in enumerate(first.updates):
        states = {name: t for rank in found for name, t in rank.states[index].items()}
        after = dataclasses.replace(update.after, states=update.after.states | states)
        first.updates[index] = dataclasses.replace(update, after=after)
    return first
