"""Measure a step with its data loader, in this process: time, waiting, resident memory.

The step first runs alone on one batch, while no loader worker shares the processor. Then it runs
with the loader, one batch after another. The device is not synchronised between steps, so loading
and computation can overlap as in training. Left out: reading from disk, whose time depends on what
the system has cached.
"""

import dataclasses
import gc
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

from memlab._util.units import KIB, format_bytes, format_seconds
from memlab.config import StepConfig
from memlab.devices.generators import preserved_random_state
from memlab.devices.here import synchronize
from memlab.errors import UnsupportedError
from memlab.loading import LoadingConfig, LoadingResult
from memlab.memory import cuda
from memlab.result import Outcome
from memlab.running import Progress, Report, explain
from memlab.techniques.batches import map_tensors, tensors_of
from memlab.techniques.step import Step, build_step, set_seed
from memlab.techniques.technique import Plan
from memlab.workload import Workload

# Resident memory of processes, as Linux counts it; elsewhere nothing is known.
#
# Left out: swap, and what other processes share.

PRIVATE = ("Private_Clean:", "Private_Dirty:")


def resident_bytes(pid: int | str = "self") -> int | None:
    """Return the bytes of a process that are in memory, shared pages included."""
    return _summed(f"/proc/{pid}/status", ("VmRSS:",))


def private_bytes(pid: int | str = "self") -> int | None:
    """Return the bytes of a process that are in memory and that no other process shares."""
    return _summed(f"/proc/{pid}/smaps_rollup", PRIVATE)


def _summed(path: str, names: tuple[str, ...]) -> int | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) for line in lines if line.startswith(names)]
    return sum(found) * KIB if found else None


FEWER = "lower num_workers or prefetch_factor, or decode smaller samples"


class Feed:
    """A loader in the place of a workload's `make_batch`; it adds up the time spent waiting."""

    def __init__(self, loading: LoadingConfig, device: torch.device) -> None:
        self.batches: Iterator[Any] = iter(())
        self.waited_seconds = 0.0
        self.batch_bytes = 0
        self._loading, self._device = loading, device

    def __call__(self, num_samples: int) -> Any:
        """Return the next batch, on the device."""
        start = time.perf_counter()
        batch = next(self.batches)
        self.waited_seconds += time.perf_counter() - start
        self.batch_bytes = sum(tensor.nbytes for tensor in tensors_of(batch))

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self._device, non_blocking=self._loading.non_blocking)

        return map_tensors(move, batch)


def loading_in_process(
    workload: Workload,
    config: StepConfig,
    dataset: Dataset[Any],
    loading: LoadingConfig,
    device: torch.device,
    *,
    num_steps: int,
    seed: int,
    plan: Plan | None = None,
    report: Report,
) -> LoadingResult:
    """Return the cost of loading. Errors of the step or the loader are outcomes, not raised.

    Args:
        workload: model and loss; its `make_batch` is not used.
        config: of the step; its `batch_size` is the loader's.
        dataset: map-style, of samples.
        loading: how they are fetched.
        device: of this machine.
        num_steps: number of timed steps; one untimed step runs before them.
        seed: of the model, the order of the samples and each step.
        plan: of the config's memory budget.
        report: called during the run; an error that it raises ends the run.
    """
    facts: dict[str, Any] = {
        "device": str(device),
        "config": config,
        "loading": loading,
        "workload_name": workload.name,
    }
    feed = Feed(loading, device)
    try:
        _check(loading, device)
        with preserved_random_state(device):
            report(Progress(text=f"building {workload.name}", fraction=0.0))
            feed.batches = iter(_loader(dataset, config, loading, 1, seed))
            report(Progress(text="waiting for the dataset's first batch", fraction=0.0))
            fed = dataclasses.replace(workload, make_batch=feed)
            step = build_step(fed, config, device, plan=plan, seed=seed)
            feed.batches = iter(())  # ends the workers
            report(Progress(text="steps on one batch", fraction=0.2))
            facts |= _alone(step, num_steps, seed)
            report(Progress(text="steps with the loader", fraction=0.5))
            feed.batches = iter(_loader(dataset, config, loading, num_steps + 2, seed))
            facts |= _fed(step, feed, num_steps, seed)
    except (Exception, SystemExit) as error:  # what a person's dataset raises is an outcome
        outcome, message = _explain(error)
        return LoadingResult(**facts, outcome=outcome, message=message)
    finally:
        feed.batches = iter(())  # ends the workers
        gc.collect()
        cuda.release(device)

    return LoadingResult(**facts, outcome=Outcome.OK, message=_summary(facts))


def _check(loading: LoadingConfig, device: torch.device) -> None:
    if loading.pin_memory and device.type == "cpu":
        raise UnsupportedError(
            "pin_memory=True does nothing on a CPU: pinned memory speeds up copies to a card, and "
            "on a CPU it only adds a copy; use pin_memory=False, or device='cuda'"
        )


def _loader(
    dataset: Dataset[Any], config: StepConfig, loading: LoadingConfig, num_batches: int, seed: int
) -> DataLoader[Any]:
    order = RandomSampler(
        dataset,  # type: ignore[arg-type] # it has a length, which Dataset does not declare
        replacement=True,
        num_samples=num_batches * config.batch_size,
        generator=torch.Generator().manual_seed(seed),
    )
    return DataLoader(
        dataset,
        batch_size=config.batch_size,
        sampler=order,
        num_workers=loading.num_workers,
        prefetch_factor=loading.prefetch_factor,
        pin_memory=loading.pin_memory,
    )


def _alone(step: Step, num_steps: int, seed: int) -> dict[str, Any]:
    """Return the mean time of a step on the batch that it has."""
    _run(step, seed)
    synchronize(step.device)
    start = time.perf_counter()
    for _ in range(num_steps):
        _run(step, seed)
    synchronize(step.device)
    return {"step_alone_seconds": (time.perf_counter() - start) / num_steps}


def _fed(step: Step, feed: Feed, num_steps: int, seed: int) -> dict[str, Any]:
    """Return times and memory of steps that each take a new batch."""
    feed.waited_seconds = 0.0
    step.take_batch(step.config, seed=seed)
    first = feed.waited_seconds
    _run(step, seed)
    cuda.reset_peaks(step.device)
    synchronize(step.device)
    feed.waited_seconds, start = 0.0, time.perf_counter()

    for _ in range(num_steps):
        step.take_batch(step.config, seed=seed)
        _run(step, seed)

    synchronize(step.device)
    seconds = (time.perf_counter() - start) / num_steps
    peaks = cuda.read_peaks(step.device)
    loading = feed._loading

    return {
        "step_seconds": seconds,
        "waiting_fraction": feed.waited_seconds / num_steps / seconds,
        "first_batch_seconds": first,
        "samples_per_second": step.config.batch_size / seconds,
        "batch_bytes": feed.batch_bytes,
        "queued_bytes": feed.batch_bytes * loading.num_queued_batches,
        "peak_allocated_bytes": peaks.allocated_bytes if peaks else None,
    } | _resident()


def _run(step: Step, seed: int) -> None:
    """Run one update without reading its loss, which would wait for the device."""
    set_seed(seed)
    step.accumulate()
    step.update()


def _resident() -> dict[str, int | None]:
    pids = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
    resident = [resident_bytes(pid) for pid in pids]
    private = [private_bytes(pid) for pid in pids]

    return {
        "main_resident_bytes": resident_bytes(),
        "workers_resident_bytes": _total(resident),
        "workers_private_bytes": _total(private),
    }


def _total(sizes: list[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _explain(error: BaseException) -> tuple[Outcome, str]:
    """Return the outcome that an error means, and one sentence with a remedy."""
    text = str(error)
    if "DataLoader worker" not in text:
        return explain(error, "a step with its loader")
    if "shm" in text or "Bus error" in text:
        return Outcome.OUT_OF_MEMORY, (
            f"out of shared memory (/dev/shm), through which loader workers pass batches; {FEWER}"
        )

    if "exited unexpectedly" in text or "killed by signal" in text:
        return Outcome.CRASHED, (
            f"a loader worker died ({text.splitlines()[0].rstrip('. ')}); if the system killed it "
            f"for memory, {FEWER}; with num_workers=0 an error of the dataset itself is shown"
        )

    lines = text.strip().splitlines()  # of the worker's traceback; its frames are indented
    last_frame = max((at for at, line in enumerate(lines) if line.startswith("  ")), default=-1)
    raised = " ".join(lines[last_frame + 1 :])
    return Outcome.FAILED, (
        f"the dataset raised in a loader worker: {raised}; try its samples one by one, dataset[0]"
    )


def _summary(facts: dict[str, Any]) -> str:
    waited = 100 * facts["waiting_fraction"]
    text = (
        f"{format_seconds(facts['step_seconds'])} a step with loading, {waited:.0f} % of it "
        f"waiting; {format_seconds(facts['step_alone_seconds'])} a step without loading"
    )
    private = facts["workers_private_bytes"]
    if not private:
        return text

    return f"{text}; loader workers add {format_bytes(private)} of resident memory"
