"""Whether `compute_loss` returns one loss, as its forward over fake tensors shows."""

from typing import Any

import torch

from memlab.config import StepConfig
from memlab.errors import MemlabError
from memlab.recording.fake_workload import over_fakes
from memlab.recording.tracker import Tracker, record_fake
from memlab.running import Progress, Report, explain
from memlab.step import set_seed
from memlab.techniques.contract import check_loss
from memlab.techniques.loss.several_losses import several_losses
from memlab.torch_private.fakes import FakeTensorMode
from memlab.trace import Phase
from memlab.workload import Workload

SAMPLES = 2


def loss_in_process(workload: Workload, *, report: Report) -> tuple[str, str]:
    """Return "one", "several", "wrong" or "unknown", and why it is wrong or unknown."""
    report(Progress(text=f"looking at the loss of {workload.name}", fraction=0.0))
    tracker, losses = Tracker("cpu"), list[Any]()

    def run(mode: FakeTensorMode) -> None:
        fake = over_fakes(workload, mode, tracker)
        tracker.mark(-1, Phase.BUILD, 0)
        set_seed(0)
        losses.append(fake.compute_loss(fake.build_model().train(), fake.make_batch(SAMPLES)))

    try:
        record_fake(run, tracker)
    except Exception as error:  # whatever a model or a loss raises over fake tensors
        return "unknown", explain(error, "compute_loss over fake tensors")[1]
    [loss] = losses
    try:
        if isinstance(loss, torch.Tensor):
            check_loss(loss)
            return "one", ""
        several_losses(loss, StepConfig(batch_size=SAMPLES), {})
    except MemlabError as error:
        return "wrong", str(error)
    return "several", ""
