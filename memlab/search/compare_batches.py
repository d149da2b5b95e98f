"""`predict_batches`: what a step would cost with each batch size, from few predictions.

Left out: which of them is best; other fields than the batch size.
"""

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from memlab._util.checks import checked, seconds, size
from memlab.api import predict_with_forecast
from memlab.config import StepConfig
from memlab.prediction.interpolation import interpolated
from memlab.result import StepResult
from memlab.runtime.bar import shows_progress
from memlab.runtime.isolation import OnProgress
from memlab.store.frames import ResultList
from memlab.workload import Workload

if TYPE_CHECKING:
    from memlab.prediction.predict import Prediction


@checked(memory_limit=size, timeout_seconds=seconds)
@shows_progress
def predict_batches(
    workload: Workload,
    config: StepConfig,
    batch_sizes: Sequence[int],
    device: str | torch.device | None = None,
    *,
    seed: int = 0,
    memory_limit: int | str | None = None,
    timeout_seconds: float = 120,
    on_progress: OnProgress | None = None,
    progress: bool = True,
    cancel: threading.Event | None = None,
) -> list[StepResult]:
    """Return what one training step would cost with each batch size, in the order of these.

    `config` is predicted as it is. That prediction is arithmetic for most other batch sizes: such a
    result takes milliseconds, says "interpolated" in its message and states a larger uncertainty. A
    batch size that no prediction covers is predicted as `memlab.predict` does it.

    Args:
        workload: what is trained.
        config: how it is trained; results differ from it in `batch_size` alone.
        batch_sizes: samples per optimizer update.
        device: as for `predict`.
        seed: as for `predict`.
        memory_limit: as for `predict`; `fits` of each result says whether it fits.
        timeout_seconds: after which a single prediction ends as `timed_out`.
        on_progress: as for `measure`.
        progress: as for `measure`.
        cancel: as for `measure`.

    Raises:
        MemlabError: an argument is not allowed; the message names it and what is allowed.

    >>> model, batch = torch.nn.Linear(64, 8), (torch.zeros(4, 64), torch.zeros(4, 8))
    >>> workload = Workload.from_module(model, batch, torch.nn.functional.mse_loss)
    >>> results = predict_batches(workload, StepConfig(batch_size=256), [256, 512, 1024], "t4")
    >>> [result.peak_by_category["inputs"] for result in results]  # (64 + 8) * 4 bytes a sample
    [73728, 147456, 294912]
    """
    configs = [replace(config, batch_size=batch_size) for batch_size in batch_sizes]

    def predicted(asked: StepConfig) -> "Prediction":
        return predict_with_forecast(
            workload,
            asked,
            device,
            seed=seed,
            memory_limit=memory_limit,
            timeout_seconds=timeout_seconds,
            on_progress=on_progress,
            cancel=cancel,
        )

    made = {config: predicted(config)}
    results = ResultList()
    for asked in configs:
        if asked in made:
            results.append(made[asked].result)
            continue
        base = _covering(list(made.values()), asked)
        if base is None:
            made[asked] = predicted(asked)
            results.append(made[asked].result)
        else:
            assert base.forecast is not None  # it covers this config
            result = interpolated(base, asked)
            results.append(base.forecast.against_limit(result, base.result.memory_limit_bytes))
    return results


def _covering(made: Sequence["Prediction"], asked: StepConfig) -> "Prediction | None":
    """Return the first prediction whose forecast can tell of this config; None if none can."""
    for base in made:
        if base.forecast is not None and base.forecast.covers(asked.micro_batch_sizes):
            return base
    return None
