"""What a worker does after `start.py` has prepared it: it serves one job after another.

It ends when its socket closes, or at the latest when its keeper is killed. A job is a function of
memlab with its arguments, which may use a person's own modules. The worker asks to be replaced

- if a job has changed anything of this process (`unchanged.py`), as a script and a compiled step
  always do, so that no job can affect a later one;
- if one of a person's files has changed since it was imported, so that old code is never measured.

It looks for changes after it has sent the result, so only a job that follows at once has to wait.
A prediction that follows another one waits less: memory is given back after the last of them.
"""

import contextlib
import ctypes
import faulthandler
import importlib
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from memlab._util.torch_private.compiler import DYNAMO
from memlab.config import StepConfig
from memlab.memory.garbage import collect_and_freeze, keep_frozen
from memlab.running import Progress, Report
from memlab.runtime import measure
from memlab.runtime.accumulation import accumulation_in_process
from memlab.runtime.guard import Printed, limit_memory, noted
from memlab.runtime.inspect import inspect_in_process
from memlab.runtime.loading import loading_in_process
from memlab.runtime.measure import measure_in_process
from memlab.runtime.same_step import recall, remember
from memlab.runtime.sending import Environment, OwnValues, Sources, Stamp, read_no_bytecode
from memlab.runtime.standard_library import StandardLibrary
from memlab.runtime.unchanged import WorkerState
from memlab.runtime.verify import verify_in_process
from memlab.runtime.wire import (
    GIVE_UP,
    LOST_STATUS,
    PREDICTING,
    SCRIPT,
    SCRIPT_STEP,
    SCRIPTS,
    WITH_RANKS,
    Channel,
    Garbage,
    Job,
    beginning,
    bridged,
)
from memlab.techniques.compilation import is_compiled
from memlab.workload import Workload

# A small measurement or prediction that a worker runs before any code of a person's.
#
# PyTorch initialises much when it is first used, and a prediction registers a device
# permanently. After a rehearsal these changes are not mistaken for changes by a person's
# code. A worker either measures or predicts, never both: autograd counts the devices at its
# first backward, so the device that predictions need must exist by then.

LATE_MODULES = ("cloudpickle", DYNAMO, "torch.utils.serialization")


def import_late_modules() -> None:
    """Import the modules that the first step would import; this touches no device."""
    for name in LATE_MODULES:
        importlib.import_module(name)


def rehearse(*, is_predicting: bool) -> None:
    """Measure or predict a linear layer."""
    workload = Workload(
        name="rehearsal",
        build_model=lambda: torch.nn.Linear(2, 2),
        make_batch=lambda n: torch.ones(n, 2),
        compute_loss=lambda model, batch: model(batch).mean(),
    )
    config = StepConfig(batch_size=2)
    if is_predicting:
        from memlab.devices.cards import resolve
        from memlab.prediction.predict import predict_in_process

        predict_in_process(
            workload, config, resolve("cpu"), seed=0, memory_limit=None, report=_say_nothing
        )
        # a recorded TF32 step does the same; the first time it writes down what was the default
        torch.set_float32_matmul_precision(torch.get_float32_matmul_precision())
        return

    cpu = torch.device("cpu")
    measure.measure_in_process(
        workload, config, cpu, repeats=1, warmup=0, seed=0, memory_limit=None, report=_say_nothing
    )


def _say_nothing(progress: Progress) -> None:
    """Ignore the progress of a rehearsal."""


NEXT_SECONDS = 0.5  # within which one prediction follows another


def _predict(**arguments: Any) -> Any:
    from memlab.prediction.predict import predict_in_process

    return predict_in_process(**arguments)


def _plan(**arguments: Any) -> Any:
    from memlab.prediction.planning import plan_in_process  # as above

    return plan_in_process(**arguments)


def _per_sample(**arguments: Any) -> Any:
    from memlab.runtime.per_sample import judged_by_shapes  # as above

    return judged_by_shapes(**arguments)


def _loss(**arguments: Any) -> Any:
    from memlab.runtime.per_sample import loss_in_process  # as above

    return loss_in_process(**arguments)


def _layers(**arguments: Any) -> Any:
    from memlab.prediction.planning import layers_in_process  # as above

    return layers_in_process(**arguments)


def _operators(**arguments: Any) -> Any:
    from memlab.cost_model.traced_step import operators_in_process  # as above

    return operators_in_process(**arguments)


def _graph(**arguments: Any) -> Any:
    from memlab.prediction.step_graph import graph_in_process  # as above

    return graph_in_process(**arguments)


def _predict_run(*, target: Any, report: Report, **asked: Any) -> Any:
    from memlab.prediction.predict_run import predict_run_in_process
    from memlab.prediction.run_spec import RunSpec  # as above

    return predict_run_in_process(RunSpec(**asked), target, report=report)


def _predict_script(**arguments: Any) -> Any:
    from memlab.prediction.predict_script import predict_script_in_process  # as above

    return predict_script_in_process(**arguments)


def _script_step(**arguments: Any) -> Any:
    from memlab.prediction.predict_script import script_step_in_process  # as above

    return script_step_in_process(**arguments)


def _measure_run(*, device: Any, report: Report, **asked: Any) -> Any:
    from memlab.prediction.run_spec import RunSpec  # as above
    from memlab.runtime.measure_run import measure_run_in_process

    return measure_run_in_process(RunSpec(**asked), device, report=report)


def _measure_ranks(**arguments: Any) -> Any:
    from memlab.runtime.rank_group import measure_ranks  # half a second that few steps need

    return measure_ranks(**arguments)


def _verify_ranks(**arguments: Any) -> Any:
    from memlab.runtime.rank_group import verify_ranks  # as above

    return verify_ranks(**arguments)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "measure": measure_in_process,
    "predict": _predict,
    "plan": _plan,
    "layers": _layers,
    "operators": _operators,
    "graph": _graph,
    "predict_run": _predict_run,
    SCRIPT: _predict_script,
    SCRIPT_STEP: _script_step,
    "measure_run": _measure_run,
    "verify": verify_in_process,
    "measure_ranks": _measure_ranks,
    "verify_ranks": _verify_ranks,
    "loading": loading_in_process,
    "inspect": inspect_in_process,
    "accumulation": accumulation_in_process,
    "per_sample": _per_sample,
    "loss": _loss,
}


def serve(line: int | list[int], standard_library: StandardLibrary) -> None:
    """Serve jobs until the caller is gone.

    Args:
        line: descriptor of the socket to the caller, or of the pipes from and to it.
        standard_library: finds Python's own modules; it learns which the caller has replaced.
    """
    log = os.dup(2)  # of its own, for a model may close the other
    faulthandler.enable(log)
    read_no_bytecode()
    if isinstance(line, int):
        end = socket.socket(fileno=line)
    else:
        reads, writes = open(line[0], "rb"), open(line[1], "wb")  # noqa: SIM115
        end = bridged(reads, writes, partial(os._exit, 0))
    channel = Channel(end, blocks=True)
    end.set_inheritable(False)  # or a model's own processes would hold it
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=channel.close)
    sources, environment = Sources(), Environment()
    environment.watch()
    told_stamps: dict[str, Stamp | None] = {}
    state = WorkerState(sources)
    state.watch_imports()
    limit_memory(sys.maxsize)
    import_late_modules()
    state.note_modules()
    keep_frozen()
    channel.send(0, _pickled(("ready", os.getpid())))

    while True:
        try:
            number, content = channel.receive()
        except (EOFError, OSError, Garbage):
            return

        if content == GIVE_UP:  # of a job that was answered meanwhile
            continue
        if number == 0:  # no job yet, but which jobs will come
            is_predicting = pickle.loads(content)
            if is_predicting:
                environment.hide_cards()
            rehearse(is_predicting=is_predicting)
            state.begin()
            continue

        job: Job = pickle.loads(content)
        is_stale = sources.changed(job.own_files, job.path, job.folder)
        if state.is_changed or is_stale or not environment.takes(job.environment):
            channel.send(number, _pickled(("stale", None)))
            return

        os.write(log, beginning(number).encode())
        standard_library.shadowed = frozenset(job.own_files)
        started_ns = time.time_ns()
        gives_up = job.function in PREDICTING
        answer = _serve(job, _reporter(channel, number, gives_up=gives_up), state)
        sources.note(started_ns, job.path, job.folder)
        if job.function == "measure" and channel.is_own():
            remember(job.step, answer[1], sources.stamps)

        if sources.stamps != told_stamps:
            told_stamps = dict(sources.stamps)
            _send(channel, number, ("sources", told_stamps))
        _send(channel, number, answer)
        function = job.function
        del job, content, answer
        if state.is_watching and state.compares:
            state.look()
        else:
            state.found.append("what a script or torch.compile has left")
        if not state.is_changed and not _is_followed(function, channel):
            _give_memory_back(state)
        if state.is_changed:
            _send(channel, number, ("stale", state.found))


def _is_followed(function: str, channel: Channel) -> bool:
    """Return whether a prediction is followed by another job, which need not wait for a collection.

    That takes half a second, and fake tensors leave little behind. A search asks for its next
    prediction a moment after it has the last one.
    """
    return function in PREDICTING and channel.has_unread(within_seconds=NEXT_SECONDS)


class GivenUp(BaseException):
    """The caller no longer wants the answer. No `except Exception` of a model catches it."""


def _reporter(channel: Channel, number: int, *, gives_up: bool) -> Report:
    """Return a function that sends the progress of one job, and may end it for the caller."""

    def report(progress: Progress) -> None:
        _send(channel, number, ("progress", progress))
        if gives_up and channel.has_unread():  # nothing else is sent to a worker that works
            raise GivenUp

    return report


def _send(channel: Channel, number: int, message: tuple[str, Any]) -> None:
    """Send a message of a job. A fork of the worker that gets here is ended."""
    try:
        if channel.is_own():
            channel.send(number, _pickled(message))
            return
    except OSError:
        pass

    os._exit(LOST_STATUS)  # also a fork of the worker, whose socket this is not


def _serve(job: Job, report: Report, state: WorkerState) -> tuple[str, Any]:
    """Return ("result", value), or ("unloadable" or "raised", what was raised, as text)."""
    sys.path[:] = job.path
    torch.set_num_threads(job.threads)
    try:
        os.chdir(job.folder)
        state.expect()
        state.own_values = OwnValues(job.own_values)
        arguments = pickle.loads(job.arguments)
        state.own_values.set_all()
    except BaseException as error:  # a person's own module may raise anything on import
        return "unloadable", f"{type(error).__name__}: {error}"

    limit_memory(job.guard_bytes)
    try:
        if job.function == "predict":
            arguments["measured"] = recall(job.step)
        if job.function in WITH_RANKS:
            arguments["job"] = job
        # a script or torch.compile imports hundreds of modules, and the worker ends with it
        state.is_watching = job.function not in SCRIPTS
        config = arguments.get("config")
        state.compares = not (isinstance(config, StepConfig) and is_compiled(config))
        printed = Printed(sys.stdout)
        with contextlib.redirect_stdout(printed):
            value = FUNCTIONS[job.function](**arguments, report=report)
        if job.function == "measure":
            value = noted(value)
        return "result", printed.into(value)
    except BaseException as error:
        return "raised", f"{type(error).__name__}: {error}"
    finally:
        limit_memory(sys.maxsize)


def _pickled(message: tuple[str, Any]) -> bytes:
    """Return the bytes of a message; a result's config may hold a function of a notebook."""
    import cloudpickle  # as above

    try:
        pickled: bytes = cloudpickle.dumps(message)
    except Exception as error:
        text = f"the result cannot be sent ({type(error).__name__}: {error})"
        pickled = pickle.dumps(("raised", text))

    return pickled


def _give_memory_back(state: WorkerState) -> None:
    # libraries stay frozen: the next job's collections need not walk through them again
    collect_and_freeze(state.look_at_kept_tensors)

    try:
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps freed memory otherwise
    except (OSError, AttributeError, TypeError):  # Windows has no library of the process itself
        return
