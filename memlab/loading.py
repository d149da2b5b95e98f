"""`LoadingConfig` and `LoadingResult`: how batches are loaded, and what that cost.

They are not fields of `StepConfig`, because a step begins when its batch has been loaded.
`memlab.measure_loading` measures the loading around the step.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any

from memlab._util.checks import check_fields, count, of_type
from memlab.config import StepConfig
from memlab.errors import ConfigError
from memlab.result import Outcome

PREFETCH_FACTOR = 2  # PyTorch's own default
MOST_WORKERS, MOST_PREFETCHED = 1024, 10**6  # a mistyped number must not exhaust the machine


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadingConfig:
    """How a `torch.utils.data.DataLoader` loads batches, with its own names and defaults.

    Attributes:
        num_workers: number of processes that decode samples; with 0 the training process does.
        prefetch_factor: batches that each worker keeps ready. None is PyTorch's default: 2 with
            workers, nothing without.
        pin_memory: copy each batch to page-locked host memory, from which the copy to a card is
            faster and can overlap with computation.
        non_blocking: do not wait for the copy to the card, which needs pinned memory.

    Raises:
        ConfigError: a value is not allowed; the message names field, value and remedy.

    >>> LoadingConfig(num_workers=2, prefetch_factor=4).num_queued_batches
    8
    """

    num_workers: int = 0
    prefetch_factor: int | None = None
    pin_memory: bool = False
    non_blocking: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "num_workers":
                value = count(0, MOST_WORKERS)(field.name, value)
            elif field.name == "prefetch_factor" and value is not None:
                value = count(1, MOST_PREFETCHED)(field.name, value)
            else:
                value = of_type(field.name, value, field.type)

            object.__setattr__(self, field.name, value)

        if self.prefetch_factor is not None and self.num_workers == 0:
            raise ConfigError(
                f"prefetch_factor={self.prefetch_factor} does nothing with num_workers=0; add "
                "num_workers=2, or leave it out"
            )

        if self.non_blocking and not self.pin_memory:
            raise ConfigError(
                "non_blocking=True does nothing with pin_memory=False: only a copy from pinned "
                "memory is asynchronous; add pin_memory=True, or leave it out"
            )

    @property
    def num_queued_batches(self) -> int:
        """The most batches that the workers keep ready."""
        return self.num_workers * (self.prefetch_factor or PREFETCH_FACTOR)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadingResult:
    """What loading the batches cost. A field that was not measured is None.

    Attributes:
        outcome: how the run ended, as in a `StepResult`.
        message: one sentence.
        device: where the step ran.
        config: of the step.
        loading: how the batches were loaded.
        workload_name: what was trained; its own `make_batch` is not used.
        step_alone_seconds: mean time of a step whose batch is already loaded, with no workers
            running.
        step_seconds: mean time of a step including the wait for its batch.
        waiting_fraction: the share of `step_seconds` that was spent waiting for the batch.
        first_batch_seconds: time until the first batch, which includes starting the workers.
        samples_per_second: with loading.
        batch_bytes: size of one batch on the host.
        queued_bytes: the most shared memory that the queued batches take, computed from
            `batch_bytes`.
        main_resident_bytes: resident memory of the training process after the last step (Linux).
        workers_resident_bytes: resident memory of all loader workers together; a page that they
            share is counted once for each of them.
        workers_private_bytes: the part of it that is not shared, which the workers add.
        peak_allocated_bytes: of the card over the steps; None on a CPU.

    What a result says of a step that waits for its batch a quarter of its time:

    >>> result = LoadingResult(
    ...     outcome=Outcome.OK, message="", device="cpu", config=StepConfig(batch_size=4),
    ...     loading=LoadingConfig(), workload_name="mine", step_seconds=0.2, waiting_fraction=0.25,
    ... )
    >>> result.step_seconds * result.waiting_fraction
    0.05
    """

    outcome: Outcome
    message: str
    device: str
    config: StepConfig
    loading: LoadingConfig
    workload_name: str
    step_alone_seconds: float | None = None
    step_seconds: float | None = None
    waiting_fraction: float | None = None
    first_batch_seconds: float | None = None
    samples_per_second: float | None = None
    batch_bytes: int | None = None
    queued_bytes: int | None = None
    main_resident_bytes: int | None = None
    workers_resident_bytes: int | None = None
    workers_private_bytes: int | None = None
    peak_allocated_bytes: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON types."""
        return {
            **asdict(self),
            "outcome": str(self.outcome),
            "config": self.config.to_dict(),
            "loading": asdict(self.loading),
        }

    def __str__(self) -> str:
        """Return outcome and message."""
        return f"{self.outcome}: {self.message}"
