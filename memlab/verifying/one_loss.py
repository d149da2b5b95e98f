"""Whether `compute_loss` returns one loss, as its forward over fake tensors shows."""

from typing import Any

import torch

from memlab.config import StepConfig
from memlab.errors import MemlabError
from memlab.recording.fake_workload import tried_over_fakes
from memlab.running import Progress, Report, explain
from memlab.techniques.contract import check_loss
from memlab.techniques.loss.several_losses import several_losses
from memlab.workload import Workload

SAMPLES = 2


def loss_in_process(workload: Workload, *, report: Report) -> tuple[str, str]:
    """Return "one", "several", "wrong" or "unknown", and why it is wrong or unknown."""
    report(Progress(text=f"looking at the loss of {workload.name}", fraction=0.0))
    try:
        return tried_over_fakes(workload, _judged)
    except Exception as error:  # whatever a model or a loss raises over fake tensors
        return "unknown", explain(error, "compute_loss over fake tensors")[1]


def _judged(fake: Workload, model: torch.nn.Module) -> tuple[str, str]:
    loss: Any = fake.compute_loss(model, fake.make_batch(SAMPLES))
    try:
        if isinstance(loss, torch.Tensor):
            check_loss(loss)
            return "one", ""
        several_losses(loss, StepConfig(batch_size=SAMPLES), {})
    except MemlabError as error:
        return "wrong", str(error)
    return "several", ""
