"""The batch finders that `recommend` is compared with, on this CPU under a memory limit.

The peers are Lightning's BatchSizeFinder and accelerate's find_executable_batch_size. Both find a
batch by running out of memory. Here each of their trials is a step that memlab measures under the
limit, in fp32 with the default optimizer; if that is out of memory the trial raises the message of
PyTorch's CPU allocator, which both recognise. The micro-batch that they find is then run with as
many accumulation steps as the same effective batch needs.
"""

import logging
import tempfile
import warnings
from typing import Any

import torch
from torch import nn

import memlab
from memlab import Outcome, StepConfig, Workload

ALLOCATOR = "DefaultCPUAllocator: can't allocate memory: the limit is reached"


class Trials:
    """The steps that a peer runs to find its batch, and how many of them ran out of memory."""

    def __init__(self, workload: Workload, limit_bytes: int, batch_size: int) -> None:
        self.workload, self.limit_bytes, self.batch_size = workload, limit_bytes, batch_size
        self.count = self.num_out_of_memory = 0

    def run(self, num_samples: int) -> None:
        """Run a step; raise what PyTorch's CPU allocator raises if it is out of memory."""
        self.count += 1
        config = StepConfig(batch_size=num_samples)
        result = memlab.measure(
            self.workload, config, "cpu", repeats=1, warmup=0, memory_limit=self.limit_bytes
        )
        if result.outcome is Outcome.OUT_OF_MEMORY:
            self.num_out_of_memory += 1
            raise RuntimeError(ALLOCATOR)

    def answer(self, micro_batch: int) -> StepConfig:
        """Return the setting with this micro-batch at the same effective batch."""
        size = self.batch_size
        return StepConfig(batch_size=size, accumulation_steps=-(-size // micro_batch))


def by_lightning(trials: Trials) -> StepConfig:
    """Return what Lightning's BatchSizeFinder finds, doubling from 2."""
    import lightning.pytorch as pl
    from lightning.pytorch.tuner import Tuner

    class Trial(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size, self.weight = 2, nn.Parameter(torch.zeros(()))

        def train_dataloader(self) -> Any:
            # more data than a batch: of a batch as large as its data Lightning does not go down
            samples = torch.zeros(4 * trials.batch_size, 1)
            return torch.utils.data.DataLoader(samples, self.batch_size)

        def training_step(self, batch: Any, index: int) -> Any:
            trials.run(len(batch))
            return self.weight * 1.0

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(accelerator="cpu", max_epochs=1, logger=False, default_root_dir=folder,
                             enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
        found = Tuner(trainer).scale_batch_size(Trial(), mode="power", steps_per_trial=1)
    return trials.answer(int(found or 1))


def by_accelerate(trials: Trials) -> StepConfig:
    """Return what accelerate's find_executable_batch_size finds, going down from the batch."""
    from accelerate.utils import find_executable_batch_size

    def train(batch_size: int) -> int:
        trials.run(batch_size)
        return batch_size

    found = find_executable_batch_size(train, starting_batch_size=trials.batch_size)()
    return trials.answer(found)
