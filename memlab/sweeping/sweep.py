"""`sweep`: one workload under many settings, each run once, whatever is interrupted."""

import contextlib
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from memlab.arguments.checks import anything, checked, count, seconds, size
from memlab.config import StepConfig
from memlab.devices.cards import resolve
from memlab.devices.here import resolve_device
from memlab.errors import StoreError
from memlab.records.recorded import is_recorded
from memlab.records.where import is_here
from memlab.result import Outcome, Source, StepResult
from memlab.running import Progress
from memlab.store.claims import owner
from memlab.store.database import reading, store_path
from memlab.store.identity import workload_key
from memlab.store.keeping import hardware_of, setting_of
from memlab.store.rows import RunArguments
from memlab.sweeping.filling import Means, SweepLoop, Wanted
from memlab.sweeping.settings import Setting, settings_of
from memlab.sweeping.table import SweepTable
from memlab.sweeping.tasks import Task, without_run
from memlab.worker.bar import shows_progress
from memlab.worker.isolation import teller
from memlab.workload import Workload

OF_THIS_MACHINE = (ThreadPoolExecutor, ProcessPoolExecutor)
NO_IDENTITY = (
    "The workload cannot be pickled, or is too large, to be recognised. So a later sweep does not "
    "find these results and runs every setting again."
)


@checked(
    configs=anything,
    path=anything,
    repeats=count(1),
    memory_limit=size,
    timeout_seconds=seconds,
)
@shows_progress
def sweep(
    workload: Workload,
    configs: Sequence[StepConfig] | Mapping[str, Sequence[Any]],
    device: str | torch.device | None = None,
    *,
    base: StepConfig | None = None,
    executor: Executor | None = None,
    repeats: int = 5,
    warmup: int = 1,
    seed: int = 0,
    memory_limit: int | str | None = None,
    timeout_seconds: float = 120,
    path: str | os.PathLike[str] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    progress: bool = True,
    on_result: Callable[[StepResult], None] | None = None,
    pause: threading.Event | None = None,
    cancel: threading.Event | None = None,
) -> SweepTable:
    """Run one workload under many settings and return a table of what each costs.

    Each result is written to the store (`memlab.results`) before it is shown. A sweep that was
    interrupted, even by `kill -9`, is resumed by the same call: a setting that the store has for
    the same code of the workload, config, device, versions, seed, limit and repeats is not run
    again, unless it has failed. Two sweeps at once share the settings between them. One measurement
    runs at a time on a machine.

    Args:
        workload: what is trained.
        configs: configs, or a dict of lists of which all combinations are run. A combination that
            no config allows is a row of the table with the reason.
        device: measured if it is in this machine, else predicted, as `memlab.predict` takes it.
        base: what a dict of lists varies; None is `StepConfig()`.
        executor: runs the settings; None runs one after another in this thread. For an executor of
            other machines, such as `dask.distributed.Client(...).get_executor()`, "cpu" and "cuda"
            are devices of those machines, and a setting counts as run whichever of them ran it.
        repeats: timed steps of each setting.
        warmup: untimed steps before them.
        seed: set before the model, the batch and each step.
        memory_limit: as for `measure`.
        timeout_seconds: after which a setting ends as `timed_out`.
        path: of another store.
        on_progress: called in this thread with a `Progress`, its fraction that of the whole sweep.
        progress: as for `measure`.
        on_result: called in this thread with each result, after it was written.
        pause: while this event is set, no further setting is begun.
        cancel: once this event is set, the sweep ends; what has not ended is `cancelled`. What an
            executor is running is waited for.

    Raises:
        MemlabError: an argument is not allowed, or the store cannot be used when the sweep begins.
            A store that fails later becomes a note of the results that are not in it.

    >>> import memlab
    >>> workload = memlab.workloads.get("vit-digits")
    >>> table = memlab.sweep(workload, {"batch_size": [8], "accumulation_steps": [2, 16]}, "t4")
    >>> [str(outcome) for outcome in table.frame()["outcome"]]
    ['ok', 'unsupported']
    """
    settings = settings_of(configs, base)
    place = _device_of(device, executor)
    options: dict[str, Any] = {
        "seed": seed, "memory_limit": memory_limit, "timeout_seconds": timeout_seconds,
    }  # fmt: skip
    if place.source is Source.MEASURED:
        options |= {"repeats": repeats, "warmup": warmup}

    asked = RunArguments(
        seed=seed,
        repeats=options.get("repeats"),
        warmup=options.get("warmup"),
        memory_limit_bytes=size("memory_limit", memory_limit),
        timeout_seconds=timeout_seconds,
    )
    key = workload_key(workload)
    wanted, index_of = _wanted(settings, key, place, asked)
    file = store_path(path)
    with owner(file) as name:
        means = Means(
            task=Task(workload=workload, device=place.device, source=place.source, options=options),
            asked=asked,
            workload_key=key,
            path=file,
            owner=name,
            executor=executor,
            tell=teller(on_progress),
            show=teller(on_result, "on_result", "a StepResult"),
            pause=pause or threading.Event(),
            cancel=cancel or threading.Event(),
        )
        loop = SweepLoop(wanted, means)
        loop.run()

    found = [loop.results.get(i) or _not_run(means.task, each.config) for i, each in
             enumerate(wanted)]  # fmt: skip
    notes = [loop.problem, NO_IDENTITY if key is None else _of_other_code(file, workload, key)]
    return SweepTable(
        settings=settings,
        by_setting=tuple(None if index is None else found[index] for index in index_of),
        num_reused=loop.num_reused,
        notes=tuple(note for note in notes if note),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepDevice:
    """Where the settings of a sweep run.

    Attributes:
        device: as `measure` or `predict` takes it.
        source: measured or predicted.
        hardware: what the numbers depend on besides the name of the device.
    """

    device: str | None
    source: Source
    hardware: dict[str, str]


def _device_of(device: str | torch.device | None, executor: Executor | None) -> SweepDevice:
    """Return where settings run: measured where the device is, predicted where it is nowhere.

    Raises:
        DeviceError: it is no device and no card that memlab knows.
    """
    is_elsewhere = executor is not None and not isinstance(executor, OF_THIS_MACHINE)
    if is_elsewhere and (device is None or re.fullmatch(r"(cpu|cuda)(:\d+)?", str(device))):
        name = None if device is None else str(device)
        hardware = {"device_name": "of the machines of an executor"}
        return SweepDevice(device=name, source=Source.MEASURED, hardware=hardware)

    if is_here(device):
        here = resolve_device(device)
        return SweepDevice(device=str(here), source=Source.MEASURED, hardware=hardware_of(here))
    name = str(device) if is_recorded(device) else resolve(device).name
    return SweepDevice(device=name, source=Source.PREDICTED, hardware={})


def _wanted(
    settings: Sequence[Setting], key: str | None, place: SweepDevice, asked: RunArguments
) -> tuple[list[Wanted], list[int | None]]:
    """Return what to run, each setting once, and the index in it for every setting."""
    wanted: list[Wanted] = []
    first: dict[str, int] = {}
    index_of: list[int | None] = []
    for each in settings:
        if each.config is None:
            index_of.append(None)
            continue

        setting = setting_of(
            key, each.config, asked, place.source, str(place.device), place.hardware
        )
        said = setting or str(asdict(each.config))
        if said not in first:
            first[said] = len(wanted)
            wanted.append(Wanted(config=each.config, setting=setting))
        index_of.append(first[said])
    return wanted, index_of


def _not_run(task: Task, config: StepConfig) -> StepResult:
    said = "stopped before it began; call sweep again to run what is left"
    return without_run(task, config, Outcome.CANCELLED, said)


def _of_other_code(file: Path, workload: Workload, key: str) -> str:
    """Return a note on results under the name of a workload that are of other code or data."""
    number = 0
    # notes of the results say why, if the store can no longer be used
    with contextlib.suppress(StoreError), reading(file) as connection:
        if connection is not None:
            number = connection.execute(
                "SELECT count(*) FROM result WHERE workload_name = ? AND workload_key != ?",
                (workload.name, key),
            ).fetchone()[0]
    if not number:
        return ""
    return (
        f"The store has {number} results of another workload named {workload.name!r}: its code, or "
        "whole numbers in its batch, are different. They were not used."
    )
