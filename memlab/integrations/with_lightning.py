"""The flavor `lightning`: a LightningModule and a Trainer that does nothing but train."""

import torch

from memlab.config import FULLY_SHARDED, Precision, Sharding, StepConfig
from memlab.integrations.library_parts import REPORT as REPORT_RANKS
from memlab.integrations.library_parts import library_parts, of_ranks
from memlab.integrations.script_file import Loop
from memlab.techniques.sharding.sharding_source import sharded_lines
from memlab.techniques.technique import Plan
from memlab.workload import Workload

MODULE = '''
class Training(lightning.LightningModule):
    """The step, for Lightning's loop."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.losses = []  # of each micro-batch

{configure}    def training_step(self, batch, batch_idx):
        """Return the loss of a micro-batch; Lightning divides it by their number."""
        {sync}loss = compute_loss(self.model, batch)
        self.losses.append(loss.detach())
        return loss

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        """Update, and free the gradients at once; Lightning would do so after the next forward."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        optimizer.zero_grad()

    def configure_optimizers(self):
        """Return the optimizer; without a schedule the learning rate stays as it is."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        {optimizer}
        return optimizer
'''.strip()

AS_IT_IS = '''
def as_it_is(batch):
    """Return a batch unchanged; the loader's own function would make lists of its tuples."""
    return batch
'''.strip()

MAIN = '''
def main():
    """Train for NUM_STEPS updates, and print the loss of each."""
    set_seed(SEED)
    training = Training(make_model())
    trainer = lightning.Trainer(
        accelerator="{accelerator}",
        {devices}
        precision="{precision}",
        max_steps=NUM_STEPS,  # Lightning counts updates, not micro-batches
        accumulate_grad_batches=ACCUMULATION_STEPS,
        gradient_clip_val={norm},  # of the total norm of all gradients; None clips nothing
        # what Lightning does besides training
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
    loader = DataLoader(
        make_micro_batches() * NUM_STEPS,
        batch_size=None,  # they are batches already
        collate_fn=as_it_is,
        generator=torch.Generator(),  # so that no random number of the step is used up
    )
    trainer.fit(training, loader)
    {report}
'''.strip()

REPORT = """\
for step in range(NUM_STEPS):
        parts = training.losses[step * ACCUMULATION_STEPS : (step + 1) * ACCUMULATION_STEPS]
        print(f"step {step + 1}: loss {float(sum(parts)) / ACCUMULATION_STEPS}")"""

CONFIGURE = '''\
    def configure_model(self):
        """Divide the model over the ranks; Lightning calls this more than once."""
        if isinstance(self.model, FSDPModule):
            return
        model = self.model
        {lines}

'''
SYNC = """\
is_last = (batch_idx + 1) % ACCUMULATION_STEPS == 0
        self.model.set_requires_gradient_sync(is_last)  # until then nothing is sent
        """
DEVICES = """\
devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=NUM_RANKS // int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy={},"""
REPLICATED = "DDPStrategy()"
DIVIDED = "ModelParallelStrategy(data_parallel_size=NUM_RANKS, tensor_parallel_size=1)"
DEVICE = "device = self.trainer.strategy.root_device"
MESH = 'self.device_mesh["data_parallel"]'


def loop(workload: Workload, config: StepConfig, device: torch.device, plan: Plan | None) -> Loop:
    """Return the module and the Trainer of Lightning."""
    parts = library_parts(workload, config, device, plan)
    is_sharded = config.sharding is not Sharding.NONE
    strategy = DIVIDED if config.sharding in FULLY_SHARDED else REPLICATED
    main = MAIN.format(
        accelerator="cpu" if device.type == "cpu" else "gpu",
        precision="bf16-mixed" if config.precision is Precision.BF16_MIXED else "32-true",
        norm=config.max_grad_norm,
        devices=DEVICES.format(strategy) if is_sharded else "devices=1,",
        report="report(training.losses)" if is_sharded else REPORT,
    )
    module = MODULE.format(optimizer="\n        ".join(parts.optimizer), **_divided(config))
    found = Loop(
        title="Lightning",
        imports=[
            *parts.imports,
            "import lightning",
            "from torch.utils.data import DataLoader",
            *_imports(config),
        ],
        functions=[*parts.functions, *[REPORT_RANKS] * is_sharded, module, AS_IT_IS, main],
        calls=parts.calls,
        settings=(f"ACCUMULATION_STEPS = {config.accumulation_steps}  # micro-batches",),
        needs='Lightning: pip install "lightning!=2.6.2,!=2.6.3"',
    )
    return of_ranks(found, config) if is_sharded else found


def _divided(config: StepConfig) -> dict[str, str]:
    """Return the parts of the module that divide the model, and say when gradients are averaged."""
    if config.sharding not in FULLY_SHARDED:
        return {"configure": "", "sync": ""}
    is_hybrid = config.sharding is Sharding.HYBRID
    lines = sharded_lines(config, "" if is_hybrid else MESH).model
    if is_hybrid:
        lines = (DEVICE, *lines)
    is_late = config.accumulation_steps > 1 and not config.sync_each_micro_batch
    return {
        "configure": CONFIGURE.format(lines="\n        ".join(lines)),
        "sync": SYNC if is_late else "",
    }


def _imports(config: StepConfig) -> tuple[str, ...]:
    """Return the imports of a strategy."""
    strategies = "from lightning.pytorch.strategies import"
    if config.sharding in FULLY_SHARDED:
        fsdp = "from torch.distributed.fsdp import FSDPModule"
        own = sharded_lines(config, "" if config.sharding is Sharding.HYBRID else MESH).imports
        return (f"{strategies} ModelParallelStrategy", fsdp, *own)
    return () if config.sharding is Sharding.NONE else (f"{strategies} DDPStrategy",)
