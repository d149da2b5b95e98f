"""A rank: one of the processes that run a sharded step. It serves calls until its socket closes."""

import contextlib
import dataclasses
import faulthandler
import hashlib
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from memlab.config import StepConfig
from memlab.memory.garbage import collect_new_and_freeze
from memlab.result import Outcome, StepResult
from memlab.running import Progress, Report, explain
from memlab.runtime.guard import Printed, limit_memory
from memlab.runtime.measure import measure_in_process
from memlab.runtime.sending import OwnValues, Values, dumps, read_no_bytecode
from memlab.runtime.standard_library import StandardLibrary
from memlab.runtime.updates import Tensors, UpdatesRun, run_updates
from memlab.runtime.wire import Channel, Garbage
from memlab.techniques.checkpointing.recompute import of_a_model_off
from memlab.techniques.technique import Plan
from memlab.workload import Workload

# What a rank does when it is asked: measure its step, or run updates for `verify`.


@dataclass(frozen=True, kw_only=True, slots=True)
class RankUpdates:
    """The updates of one rank.

    Attributes:
        run: what they did; of the first rank only, since the others saw the same.
        states: the optimizer state that this rank keeps after each update.
        fingerprints: of all weights after each update; equal in all ranks.
        outcome: ok, or what went wrong.
        error: a sentence about that.
    """

    run: UpdatesRun | None = None
    states: list[Tensors] = dataclasses.field(default_factory=list)
    fingerprints: list[str] = dataclasses.field(default_factory=list)
    outcome: Outcome = Outcome.OK
    error: str | None = None


def measure_rank(*, device_type: str, report: Report, **arguments: Any) -> StepResult:
    """Measure this rank's part of a step. The arguments are those of `measure_in_process`."""
    device = _device(device_type)
    result = measure_in_process(device=device, report=report, agreed=_agreed, **arguments)
    return dataclasses.replace(result, rank_numbers=(dist.get_rank(),))


def update_rank(
    *,
    workload: Workload,
    config: StepConfig,
    device_type: str,
    seed: int,
    plan: Plan | None,
    like: UpdatesRun | None,
    with_own: bool,
    report: Report,
) -> RankUpdates:
    """Run updates of a step. The arguments are those of `run_updates`.

    With `with_own` the model's own checkpointing is on.
    """
    try:
        with contextlib.nullcontext() if with_own else of_a_model_off():
            run = run_updates(workload, config, _device(device_type), seed, plan, like=like)
    except (Exception, SystemExit) as error:  # an error of a person's model is an outcome
        outcome, message = explain(error, "the step to verify")
        return RankUpdates(outcome=outcome, error=message)

    return RankUpdates(
        run=run if dist.get_rank() == 0 else None,
        states=[update.after.states for update in run.updates],
        fingerprints=[_fingerprint(update.after.weights) for update in run.updates],
    )


def _device(device_type: str) -> torch.device:
    """Return the device of this rank."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, int(os.environ["LOCAL_RANK"]))


def _agreed(goes_on: bool) -> bool:
    """Return whether all ranks go on. A rank that ended alone would leave the others waiting."""
    votes = torch.tensor([int(goes_on)])
    if "nccl" in dist.get_backend():
        votes = votes.cuda()
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes.item())


def _fingerprint(weights: Tensors) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


SOCKET, JOB, ARGUMENTS, ANSWERS = "socket", "job", "arguments", "answers"
"""Names in the folder of a group; those of arguments and answers are followed by numbers."""

# beside a card some tensors are in host memory: parts that are offloaded
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
FUNCTIONS: dict[str, Callable[..., Any]] = {"measure": measure_rank, "updates": update_rank}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankJob:
    """What all ranks of a group share; the fields of a worker's `Job` mean the same.

    Attributes:
        threads: of this rank for one operator.
        device_type: "cpu" or "cuda".
        world_size: number of ranks.
    """

    path: list[str]
    folder: str
    own_files: dict[str, str]
    own_values: Values
    threads: int
    device_type: str
    world_size: int


def serve_rank(folder: str, standard_library: StandardLibrary) -> None:
    """Open the process group, then run the functions that are asked for.

    Args:
        folder: of the group.
        standard_library: finds Python's own modules.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    read_no_bytecode()
    group = Path(folder)
    job: RankJob = pickle.loads((group / JOB).read_bytes())
    standard_library.shadowed = frozenset(job.own_files)
    sys.path[:] = job.path
    os.chdir(job.folder)
    torch.set_num_threads(job.threads)

    limit_memory(None, num_processes=job.world_size)
    end = socket.socket(socket.AF_UNIX)
    end.connect(str(group / SOCKET))
    channel = Channel(end, blocks=True)
    _open_group(job)
    rank = dist.get_rank()
    channel.send(0, pickle.dumps((rank, os.getpid())))
    try:
        _serve(channel, group, rank, job)
    finally:
        # a rank that waits for others which are gone must not keep this one
        threading.Timer(1.0, os._exit, (0,)).start()
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        os._exit(0)


def _open_group(job: RankJob) -> None:
    if sys.platform == "linux":  # all ranks are here, and a name of this machine may not resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # DeepSpeed would else look for devices, when a person's own module imports it
    os.environ.setdefault("DS_ACCELERATOR", job.device_type)
    if job.device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(BACKENDS[job.device_type])


def _serve(channel: Channel, group: Path, rank: int, job: RankJob) -> None:
    while True:
        try:
            number, content = channel.receive()
        except (EOFError, OSError, Garbage):
            return

        # libraries, also those that the call before has imported, are in no collection's way
        collect_new_and_freeze()
        try:
            own_values = OwnValues(job.own_values)
            arguments = pickle.loads((group / f"{ARGUMENTS}{number}").read_bytes())
            own_values.set_all()
            printed = Printed(sys.stdout)
            with contextlib.redirect_stdout(printed):
                value = FUNCTIONS[pickle.loads(content)](
                    **arguments, report=_reporter(channel, number)
                )
            (group / f"{ANSWERS}{number}.{rank}").write_bytes(dumps(printed.into(value)))
            message: tuple[str, Any] = ("answered", None)
        except BaseException as error:
            message = ("raised", f"{type(error).__name__}: {error}")

        channel.send(number, pickle.dumps(message))


def _reporter(channel: Channel, number: int) -> Callable[[Progress], None]:
    """Return a function that sends the progress of one call."""

    def report(progress: Progress) -> None:
        channel.send(number, pickle.dumps(("progress", progress)))

    return report
