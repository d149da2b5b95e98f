"""`measure_loading`, the public function for data loading. The measurement runs in the worker."""

import threading
from typing import Any

import torch
from torch.utils.data import Dataset

from memlab.arguments.checks import anything, checked, count, seconds
from memlab.arguments.quoting import shown
from memlab.config import StepConfig
from memlab.devices.here import resolve_device
from memlab.errors import WorkloadError
from memlab.loading import LoadingConfig, LoadingResult
from memlab.planning.plans import plan_for
from memlab.records.targets import target_for
from memlab.running import Ended
from memlab.worker.bar import shows_progress
from memlab.worker.isolation import OnProgress, runner
from memlab.workload import Workload


@checked(dataset=anything, num_steps=count(1), timeout_seconds=seconds)
@shows_progress
def measure_loading(
    workload: Workload,
    config: StepConfig,
    dataset: Dataset[Any],
    loading: LoadingConfig | None = None,
    device: str | torch.device | None = None,
    *,
    num_steps: int = 8,
    seed: int = 0,
    timeout_seconds: float = 120,
    on_progress: OnProgress | None = None,
    progress: bool = True,
    cancel: threading.Event | None = None,
) -> LoadingResult:
    """Measure a training step together with the loader that feeds it.

    The result says how long a step takes with and without loading, how much of that it waits for
    its batch, and how much memory the loader's processes hold.

    Args:
        workload: gives the model and the loss; batches come from `dataset` instead.
        config: how it is trained; `batch_size` is also the loader's.
        dataset: map-style (`__getitem__` and `__len__`), such as `memlab.workloads.JpegDigits()`.
        loading: how the loader works; None is PyTorch's default, loading in the training process.
        device: as for `measure`.
        num_steps: number of timed steps; one untimed step runs before them.
        seed: set before the model and before each step; it also orders the samples.
        timeout_seconds: the run ends as `timed_out` after this time.
        on_progress: as for `measure`.
        progress: as for `measure`.
        cancel: as for `measure`.

    Raises:
        MemlabError: an argument is not allowed. What goes wrong during the run is the `outcome`.

    A batch of 4 samples, each of 64 and 8 numbers of 4 bytes:

    >>> model, samples = torch.nn.Linear(64, 8), (torch.zeros(16, 64), torch.zeros(16, 8))
    >>> workload = Workload.from_module(model, samples, torch.nn.functional.mse_loss)
    >>> dataset = torch.utils.data.TensorDataset(*samples)
    >>> config = StepConfig(batch_size=4)
    >>> measure_loading(workload, config, dataset, device="cpu", num_steps=2).batch_bytes
    1152
    """
    loading = LoadingConfig() if loading is None else loading
    if not (_has(dataset, "__getitem__") and _has(dataset, "__len__")):
        raise WorkloadError(
            f"dataset={shown(dataset)} is not map-style; give it __getitem__ and __len__, as "
            "torch.utils.data.Dataset describes"
        )

    _check_length(dataset)
    target = resolve_device(device)
    arguments: dict[str, Any] = {
        "workload": workload,
        "config": config,
        "dataset": dataset,
        "loading": loading,
        "device": target,
        "num_steps": num_steps,
        "seed": seed,
    }

    run = runner(True, timeout_seconds, on_progress, cancel)

    try:
        plan = plan_for(
            workload, config, target_for(target, config), seed=arguments["seed"], run=run
        )
        found: LoadingResult = run("loading", arguments | {"plan": plan})
    except Ended as ended:
        return LoadingResult(
            outcome=ended.outcome,
            message=str(ended),
            device=str(target),
            config=config,
            loading=loading,
            workload_name=workload.name,
        )

    return found


def _has(dataset: Any, method: str) -> bool:
    try:
        return hasattr(dataset, method)
    except Exception:  # a person's own __getattr__ may raise anything
        return False


def _check_length(dataset: Any) -> None:
    """Raise WorkloadError if the dataset has no samples or cannot count them."""
    try:
        length = len(dataset)
    except Exception as error:
        raise WorkloadError(
            f"dataset={shown(dataset)}: its __len__ raised {type(error).__name__}: {error}; return "
            "the number of samples"
        ) from error

    if not isinstance(length, int) or length < 1:
        raise WorkloadError(f"dataset={shown(dataset)} has no samples; give it at least one")
