"""A short training with Lightning; run it by torchrun in two ranks.

FOLDER, and "trainer" for the Trainer's own optimizer, or "step" for memlab's step inside of it.
"""

import faulthandler
import json
import os
import sys
import warnings

import lightning.pytorch as lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

import memlab
from memlab import StepConfig
from memlab.integrations.lightning_recorder import step_recorder
from tests.rank_parts import faulty
from tests.rank_training import BATCH, batches

CONFIG = StepConfig(batch_size=BATCH, sharding="zero3", world_size=2)
PATIENCE = 2


class OwnOptimizer(lightning.LightningModule):
    """Sharded in `configure_model`; its validation loss stops falling after the first epoch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.workload = faulty()
        self.model = self.workload.build_model()
        self.losses = []

    def configure_model(self):
        """Shard the blocks and then the rest, once."""
        if not isinstance(self.model, FSDPModule):
            for block in self.model.blocks:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        loss = self.workload.compute_loss(self.model, batch)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 1.0 + self.current_epoch, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)


class OwnStep(OwnOptimizer):
    """Trains with the step of memlab, which makes the update itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.model, self.step = None, None

    def configure_model(self):
        """Build the step, which shards the model, once."""
        if self.step is None:
            self.step = memlab.training_step(self.workload, CONFIG, "cpu")
            self.model = self.step.model

    def training_step(self, batch, batch_idx):
        self.losses.append(self.step(batch))

    def configure_optimizers(self):
        """Return nothing: the step has an optimizer."""


def main(folder, what):
    """Train, and print what became of it in the first rank."""
    faulthandler.dump_traceback_later(200, exit=True)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    module = OwnStep() if what == "step" else OwnOptimizer()
    recorder = step_recorder("in-lightning", CONFIG)
    best = ModelCheckpoint(dirpath=folder, monitor="val_loss", save_top_k=1)
    callbacks = [recorder, EarlyStopping("val_loss", patience=PATIENCE)]
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, max_epochs=9, logger=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, use_distributed_sampler=False,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        enable_checkpointing=what == "trainer",
        callbacks=[*callbacks, *([best] if what == "trainer" else [])],
    )  # fmt: skip
    size, rank = BATCH // 2, int(os.environ["RANK"])
    mine = [tuple(t[rank * size : (rank + 1) * size] for t in batch) for batch in batches()]
    trainer.fit(module, DataLoader(mine, batch_size=None), DataLoader(mine[:1], batch_size=None))
    losses = [torch.tensor(float(loss), dtype=torch.float64) for loss in module.losses]
    for loss in losses:
        dist.all_reduce(loss)
    if rank == 0:
        print(json.dumps({
            "losses": [(loss.item() / 2).hex() for loss in losses],
            "epochs": trainer.current_epoch,
            "best": os.path.basename(best.best_model_path),
            "files": sorted(os.listdir(best.best_model_path)) if best.best_model_path else [],
            "num_steps": len(recorder.steps),
            "notes": recorder.result.notes,
        }), flush=True)  # fmt: skip
    dist.barrier()
    os._exit(0)  # Gloo's threads can abort a process that ends in the ordinary way


if __name__ == "__main__":
    main(*sys.argv[1:])
