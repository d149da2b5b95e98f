"""PyTorch's MemTracker over fake tensors, and a process that does jobs in forks of itself.

The peer runs the step that memlab predicts, with the techniques of memlab, as a person would set it
up: the model is built for real and its parameters replaced by fakes, since many initialisers do not
run on fakes. What it raises is reported. Libraries are imported once and each job is done
in a fork, where no older tensor lives.
"""

import contextlib
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils import _pytree as pytree

from benchmarks.independent import SEED, peak_in_profile
from memlab import StepConfig, Workload
from memlab.techniques import accumulation, precision
from memlab.techniques.checkpointing import checkpointing
from memlab.techniques.optimizers import optimizers

CPU = torch.device("cpu")
SECONDS_FOR_ONE_JOB = 300
LIBRARIES = ("transformers", "monai.networks.nets")


def peak_in_fake_tracker(workload: Workload, config: StepConfig) -> dict[str, int]:
    """Return the peak of the second step as MemTracker sees it over fake tensors."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model, batch = built(workload, config)
    with mode:
        to_fake(model, mode)
        batch = pytree.tree_map_only(torch.Tensor, mode.from_tensor, batch)
        sizes = config.micro_batch_sizes
        parts = accumulation.split(batch, sizes) if len(sizes) > 1 else [batch]
        optimizer, scheduler = optimizers.make(model, config)
        scaler = precision.make_scaler(config.precision, CPU)
        tracker = MemTracker()
        tracker.track_external(model, optimizer, batch)
        with tracker:
            for _ in range(2):
                tracker.reset_mod_stats()
                for part, size in zip(parts, sizes, strict=True):
                    with precision.autocast(config, CPU):
                        loss = workload.compute_loss(model, part)
                    loss = loss if len(parts) == 1 else loss * (size / config.batch_size)
                    (loss if scaler is None else scaler.scale(loss)).backward()
                    del loss
                _update(optimizer, scheduler, scaler)
    return {"peak_2": tracker.get_tracker_snapshot("peak")[CPU]["Total"]}


def _update(optimizer: Any, scheduler: Any, scaler: Any) -> None:
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    if scheduler is not None:
        scheduler.step()
    optimizer.zero_grad(set_to_none=True)


def built(workload: Workload, config: StepConfig) -> tuple[torch.nn.Module, Any]:
    """Return the model in training and a batch, both for real, in the format of the weights."""
    torch.manual_seed(SEED)
    model = workload.build_model().train()
    precision.cast_model(model, config.precision)
    if config.checkpointing == "blocks":
        checkpointing.apply(model, config, compiled=False)
    torch.manual_seed(SEED)
    return model, precision.cast_batch(workload.make_batch(config.batch_size), config.precision)


def to_fake(model: torch.nn.Module, mode: FakeTensorMode) -> None:
    """Replace parameters and buffers by fake ones, in place; what is tied stays tied."""
    fakes: dict[int, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = fakes.setdefault(id(tensor), mode.from_tensor(tensor))


class Forks:
    """A process that has imported the libraries and does each job in a fork of itself."""

    def __init__(
        self, libraries: tuple[str, ...] = ("transformers", "monai.networks.nets")
    ) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from benchmarks.peers import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._send((torch.get_num_threads(), libraries))

    def __call__(self, function: Callable[..., dict[str, int]], *arguments: Any) -> dict[str, int]:
        """Return what the function returns in a fork.

        Raises:
            RuntimeError: it raised; the message is the kind and text of what was raised.
        """
        with self._lock:
            self._send(cloudpickle.dumps((function, arguments)))
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process that forks has ended")
        answer = json.loads(line)
        if isinstance(answer, str):
            raise RuntimeError(answer)
        found: dict[str, int] = answer
        return found

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        pickle.dump(message, self._process.stdin)
        self._process.stdin.flush()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve() -> None:
    """Do the jobs that come on standard input, each in a fork; say what each returns in a line."""
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a model prints is no answer
    num_threads, libraries = pickle.load(sys.stdin.buffer)
    for library in libraries:
        with contextlib.suppress(ImportError):
            importlib.import_module(library)
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            os.write(write, json.dumps(_done(job, num_threads)).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            answer = pipe.read()
        os.waitpid(child, 0)
        out.write((answer or b'"it was ended by a signal"') + b"\n")


def _done(job: bytes, num_threads: int) -> Any:
    signal.alarm(SECONDS_FOR_ONE_JOB)
    torch.set_num_threads(num_threads)
    try:
        function, arguments = pickle.loads(job)
        return function(*arguments)
    except BaseException as error:  # whatever a model raises is this job's answer
        return traceback.format_exception_only(error)[-1].strip()[-500:]


def independent_peak(forks: Forks, workload: Workload, config: StepConfig) -> int:
    """Return the second step's peak by the loop and the meter that share no code with memlab."""
    definition = (workload.build_model, workload.make_batch, workload.compute_loss)
    sizes = (config.batch_size, config.accumulation_steps)
    return forks(peak_in_profile, *definition, *sizes)["peak_2"]


def tracker_peak(forks: Forks, workload: Workload, config: StepConfig) -> int | str:
    """Return MemTracker's peak of the second step, or why it has none."""
    try:
        return forks(peak_in_fake_tracker, workload, config)["peak_2"]
    except RuntimeError as error:
        return str(error)
