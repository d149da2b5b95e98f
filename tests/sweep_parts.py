"""What tests and benchmark of sweeps share: a stand-in for `measure` that tells its runs."""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memlab import Outcome, StepConfig, StepResult, Workload
from tests.store_parts import a_result

WORKLOAD = Workload(
    name="stand-in",
    build_model=lambda: None,
    make_batch=lambda n: None,
    compute_loss=lambda model, batch: None,
)


@dataclass
class Runs:
    """Stands in for `measure`; a file tells which settings began and which ended.

    Attributes:
        file: a line a run, whichever process it ran in.
        doing: called with the batch size in the middle of a run; what it returns, if anything,
            replaces fields of the result.
    """

    file: Path
    doing: Callable[[int], dict[str, Any] | None] = field(default=lambda batch_size: None)

    def measure(self, workload: Workload, config: StepConfig, device: str, **_: Any) -> StepResult:
        """Return a result for a setting that nothing ran."""
        self._say("begin", config)
        fields = self.doing(config.batch_size) or {}
        result = a_result(
            config=config,
            device=device,
            workload_name=workload.name,
            peak_allocated_bytes=config.batch_size,
            **fields,
        )
        self._say("end", config)
        return result

    def begun(self) -> Counter[int]:
        """Return how often each batch size began."""
        return self._said("begin")

    def ended(self) -> Counter[int]:
        """Return how often each batch size ended."""
        return self._said("end")

    def _say(self, what: str, config: StepConfig) -> None:
        # one write of a short line is whole, also between processes and if one of them is killed
        number = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(number, f"{what} {config.batch_size}\n".encode())
        finally:
            os.close(number)

    def _said(self, what: str) -> Counter[int]:
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        return Counter(int(line.split()[1]) for line in lines if line.startswith(what))


def once(num_settings: int) -> dict[int, int]:
    """Return what `Runs` counts if each of these batch sizes ran once."""
    return dict.fromkeys(range(1, num_settings + 1), 1)


def sizes(num_settings: int) -> dict[str, list[int]]:
    """Return the settings of a sweep over batch sizes from 1 on."""
    return {"batch_size": list(range(1, num_settings + 1))}


CRASH: dict[str, Any] = {"outcome": Outcome.CRASHED, "message": "the worker was killed"}
