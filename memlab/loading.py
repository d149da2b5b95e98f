"""The nouns of data loading: how batches are fetched, and what that did to a step and to memory.

They are no fields of `StepConfig`, since a step begins with a batch at hand; what fetching costs is
measured around it by `memlab.measure_loading`.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any

from memlab.arguments.checks import check_fields, count, of_type
from memlab.config import StepConfig
from memlab.errors import ConfigError
from memlab.result import Outcome

PREFETCH_FACTOR = 2  # PyTorch's own default
MOST_WORKERS, MOST_PREFETCHED = 1024, 10**6  # more would only exhaust the machine


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadingConfig:
    """How a `torch.utils.data.DataLoader` fetches batches; its own terms and defaults.

    Attributes:
        num_workers: processes that decode samples; 0 decodes in the training process.
        prefetch_factor: batches that each worker holds ready; None is PyTorch's 2, or without
            workers none.
        pin_memory: copy each batch to page-locked memory of the host, from which a card reads it
            faster and while others work.
        non_blocking: do not wait for the copy to the card; only pinned memory allows that.

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
                "non_blocking=True does nothing with pin_memory=False: a copy from memory that is "
                "not pinned is waited for; add pin_memory=True, or leave it out"
            )

    @property
    def num_queued_batches(self) -> int:
        """Batches that the workers hold ready at most."""
        return self.num_workers * (self.prefetch_factor or PREFETCH_FACTOR)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadingResult:
    """What fetching batches did to a step; None is what was not measured.

    Attributes:
        outcome: as of a `StepResult`.
        message: one sentence.
        device: where the step ran.
        config: of the step.
        loading: how its batches were fetched.
        workload_name: what was trained; its own `make_batch` is not used.
        step_alone_seconds: a step on one batch that is at hand, while no worker runs; mean.
        step_seconds: a step and all that it waited for its batch; mean.
        waiting_fraction: of `step_seconds`, the share in which no batch was there.
        first_batch_seconds: until the first batch, workers being started.
        samples_per_second: of steps with their batches.
        batch_bytes: of one batch on the host.
        queued_bytes: what batches held ready by workers take of shared memory at most, counted
            from `batch_bytes`.
        main_resident_bytes: resident memory of the training process, by Linux, after the last step.
        workers_resident_bytes: of all loader workers together; pages that they share count in each.
        workers_private_bytes: the part of it that nobody shares, which the workers add.
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
