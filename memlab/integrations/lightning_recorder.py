"""`step_recorder`: a Lightning callback that records the memory and time of each training step.

What can be known inside of a Trainer is less than `memlab.measure` finds. Time is that of the
Trainer's own work on the batches of an update, without loading them. On CUDA the caching allocator
counts what is allocated and reserved, by everything in the process. On a CPU the allocator keeps no
counts, and the resident memory of a process is something else, so there memory stays None.
"""

import functools
import importlib
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from memlab._util.checks import checked
from memlab._util.units import format_seconds
from memlab.config import StepConfig
from memlab.devices.here import describe, synchronize, versions_here
from memlab.errors import ConfigError, UnsupportedError
from memlab.result import Outcome, Source, StepResult
from memlab.store.database import RunArguments, StoredRun, with_note, write

INSTALL = 'pip install "lightning!=2.6.2,!=2.6.3"'
NO_MEMORY = (
    "Memory was not measured: PyTorch's allocator on a CPU keeps no counts; memlab.measure of the "
    "same step finds it."
)
OF_PROCESS = (
    "Peaks are those of the whole process in a training step of Lightning, what other code there "
    "holds included."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerStep:
    """What one update of a Trainer cost in this process.

    Attributes:
        seconds: of the Trainer's work on the batches of the update; loading them is not counted.
        peak_allocated_bytes: of CUDA's caching allocator; None on other devices.
        peak_reserved_bytes: of CUDA's caching allocator; None on other devices.
    """

    seconds: float
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None


@checked()
def step_recorder(workload_name: str, config: StepConfig) -> Any:
    """Return a callback for `lightning.Trainer(callbacks=[...])`.

    When training ends, rank 0 writes one measured result to memlab's store: the time of every
    update, their median without the first, and on CUDA the highest peak. `callback.steps` holds
    every update, and `callback.result` what was written.

    Args:
        workload_name: under which `memlab.results()` lists it.
        config: how the Trainer trains, for that table; `memlab.from_trainer(trainer, module)` reads
            it. Nothing is set by it.

    Raises:
        UnsupportedError: Lightning is not installed.

    >>> recorder = step_recorder("my model", StepConfig(batch_size=8))
    >>> recorder.steps  # before any training
    []
    """
    return _recorder_class()(workload_name, config)


@functools.cache
def _recorder_class() -> Any:
    try:  # an optional package, which takes seconds to import
        library: Any = importlib.import_module("lightning.pytorch")
    except ImportError:
        raise UnsupportedError(
            f"step_recorder needs Lightning, which is not installed; {INSTALL}"
        ) from None

    class StepRecorder(library.Callback):  # type: ignore[misc]
        """Records each update; see `step_recorder`."""

        def __init__(self, workload_name: str, config: StepConfig) -> None:
            self.workload_name, self.config = workload_name, config
            self.steps: list[TrainerStep] = []
            self.result: StepResult | None = None
            self._seconds, self._begun_at, self._updates = 0.0, 0.0, 0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            """Check that the config is that of as many ranks."""
            if trainer.world_size != self.config.world_size:
                raise ConfigError(
                    f"config has world_size={self.config.world_size}, and the Trainer has "
                    f"{trainer.world_size} ranks; pass the config of this Trainer"
                )
            self.steps.clear()
            self._seconds, self._updates = 0.0, trainer.global_step

        def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            """Start the clock."""
            device = pl_module.device
            synchronize(device)
            if self._seconds == 0.0 and device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            self._begun_at = time.perf_counter()

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            """Stop the clock; with the last micro-batch of an update, keep what it cost."""
            device = pl_module.device
            synchronize(device)
            self._seconds += time.perf_counter() - self._begun_at
            is_update = trainer.global_step > self._updates or not pl_module.automatic_optimization
            if is_update:
                self.steps.append(_recorded(self._seconds, device))
                self._seconds, self._updates = 0.0, trainer.global_step

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            """Write the result, in rank 0."""
            if trainer.is_global_zero and self.steps:
                versions = {"lightning": str(library.__version__)}
                result = _result(self, pl_module.device, versions)
                run = StoredRun(stored_at=time.time(), result=result, asked=RunArguments())
                problem = write(run)
                self.result = result if problem is None else with_note(result, problem)

    return StepRecorder


def _recorded(seconds: float, device: torch.device) -> TrainerStep:
    is_counted = device.type == "cuda"
    return TrainerStep(
        seconds=seconds,
        peak_allocated_bytes=torch.cuda.max_memory_allocated(device) if is_counted else None,
        peak_reserved_bytes=torch.cuda.max_memory_reserved(device) if is_counted else None,
    )


def _result(recorder: Any, device: torch.device, versions: dict[str, str]) -> StepResult:
    """Return what the updates cost. The first is apart: it makes the optimizer's state."""
    steps: list[TrainerStep] = recorder.steps
    config: StepConfig = recorder.config
    later = steps[1:] or steps
    median = statistics.median(step.seconds for step in later)
    allocated, reserved, first = None, None, None
    if device.type == "cuda":
        allocated = max(step.peak_allocated_bytes or 0 for step in later)
        reserved = max(step.peak_reserved_bytes or 0 for step in later)
        first = steps[0].peak_allocated_bytes
    ranks = f" of {config.world_size}" if config.world_size > 1 else ""
    note = f"Recorded in a Trainer of Lightning, in rank 0{ranks}, over {len(steps)} updates."
    return StepResult(
        outcome=Outcome.OK,
        message=f"{format_seconds(median)} a step",
        source=Source.MEASURED,
        device=str(device),
        config=config,
        workload_name=recorder.workload_name,
        versions={
            **versions_here(),
            "device_name": describe(device),
            "threads": str(torch.get_num_threads()),
            **versions,
        },
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        first_step_peak_bytes=first,
        step_seconds=median,
        step_seconds_all=tuple(step.seconds for step in later),
        samples_per_second=config.batch_size / median,
        notes=(note, OF_PROCESS if device.type == "cuda" else NO_MEMORY),
        rank_numbers=(0,) if config.world_size > 1 else (),
    )
