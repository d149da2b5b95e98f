"""`memlab.from_trainer` of Lightning's Trainer: the imported step against the Trainer's own."""

import inspect

import pytest
import torch
from torch.nn import functional

import memlab
from memlab.integrations.reading import UNKNOWN, FieldStatus
from memlab.techniques.step import build_step
from tests.import_parts import needs_lightning, worst_error

pytestmark = pytest.mark.slow  # importing lightning takes seconds


def samples():
    drawn = torch.Generator().manual_seed(0)
    return [(torch.randn(6, generator=drawn), i % 3) for i in range(12)]


def module_of(**methods):
    """Return a small LightningModule, with methods beside its own."""
    lightning = needs_lightning()

    class Small(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(
                torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
            )

        def training_step(self, batch, batch_idx):
            loss = functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return {"loss": loss}

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

        def train_dataloader(self):
            return torch.utils.data.DataLoader(samples(), batch_size=4)

    return type("Mine", (Small,), methods)()


def trainer_of(tmp_path, **settings):
    lightning = needs_lightning()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
             "enable_model_summary": False, "accelerator": "cpu", "devices": 1,
             "default_root_dir": str(tmp_path), "max_steps": 1}  # fmt: skip
    return lightning.Trainer(**(quiet | settings))


def field(imported, name):
    return next(each for each in imported.fields if each.name == name)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_imported_step_is_the_trainers_own(tmp_path, accumulation):
    lightning = needs_lightning()
    found = {}

    class Note(lightning.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            found.update({f"module.{n}": p.grad.clone() for n, p in module.named_parameters()})

    module = module_of()
    trainer = trainer_of(tmp_path, accumulate_grad_batches=accumulation, callbacks=[Note()])
    imported = memlab.from_trainer(trainer, module)
    assert imported.config.batch_size == 4 * accumulation
    assert imported.config.optimizer == "sgd-momentum"
    step = build_step(imported.workload, imported.config, "cpu")
    step.accumulate()
    gradients = {name: p.grad for name, p in step.model.named_parameters()}

    assert all(p.grad is None for p in module.parameters())
    trainer.fit(module)
    assert worst_error(found, gradients) < 1e-6
    with pytest.raises(memlab.MemlabError, match="has been run"):
        memlab.from_trainer(trainer, module)


def test_every_argument_of_the_trainer_is_reported(tmp_path):
    lightning = needs_lightning()
    imported = memlab.from_trainer(trainer_of(tmp_path))
    names = set(inspect.signature(lightning.Trainer.__init__).parameters) - {"self"}
    assert names <= {each.name for each in imported.fields}
    assert [each.name for each in imported.fields if each.why == UNKNOWN] == []
    assert imported.workload is None
    assert {each.name for each in imported.not_imported} == {"module", "dataloader"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"precision": "bf16-mixed"}, {"precision": "bf16-mixed"}),
        ({"precision": "bf16-true"}, {"precision": "bf16"}),
        ({"precision": "32-true"}, {"precision": "as-built"}),
        ({"gradient_clip_val": 0.5}, {"max_grad_norm": 0.5}),
        ({"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}, {"max_grad_norm": None}),
        ({"accumulate_grad_batches": 16}, {"accumulation_steps": 16, "batch_size": 16}),
    ],
)
def test_arguments_become_settings(tmp_path, settings, expected):
    config = memlab.from_trainer(trainer_of(tmp_path, **settings)).config
    assert {name: getattr(config, name) for name in expected} == expected


def test_what_a_module_does_beside_its_loss_is_said(tmp_path):
    def on_after_backward(self):
        pass

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.Adam(self.parameters())]

    module = module_of(
        on_after_backward=on_after_backward, configure_optimizers=configure_optimizers
    )
    imported = memlab.from_trainer(trainer_of(tmp_path), module)
    names = {each.name for each in imported.not_imported}
    assert {"module.on_after_backward", "module.configure_optimizers"} <= names
    assert imported.workload is not None


def test_manual_optimization_gives_no_workload(tmp_path):
    module = module_of()
    module.automatic_optimization = False
    imported = memlab.from_trainer(trainer_of(tmp_path), module)
    assert imported.workload is None
    assert field(imported, "module.training_step").status is FieldStatus.NOT_IMPORTED
    assert not any(each.became.startswith("workload") for each in imported.fields)


def test_a_loader_beside_the_module(tmp_path):
    loader = torch.utils.data.DataLoader(samples(), batch_size=6)
    imported = memlab.from_trainer(trainer_of(tmp_path), module_of(), dataloader=loader)
    assert imported.config.batch_size == 6
    assert imported.workload.make_batch(2)[0].shape == (2, 6)


def test_the_workload_reaches_a_worker(tmp_path):
    imported = memlab.from_trainer(trainer_of(tmp_path), module_of())
    result = memlab.predict(imported.workload, imported.config, "cpu", timeout_seconds=900)
    assert result.outcome == "ok", result.message


def test_a_module_of_another_kind_is_a_sentence(tmp_path):
    with pytest.raises(memlab.MemlabError, match="is not a LightningModule"):
        memlab.from_trainer(trainer_of(tmp_path), torch.nn.Linear(1, 1))


def test_a_trainer_of_several_ranks(tmp_path):
    trainer = trainer_of(tmp_path, devices=2, strategy="ddp", accumulate_grad_batches=2)
    found = memlab.from_trainer(trainer, module_of(), world_size=2)
    config = found.config
    assert (config.sharding, config.world_size, config.batch_size) == ("ddp", 2, 16)
    assert not config.sync_each_micro_batch
    assert field(found, "strategy").status is FieldStatus.IMPORTED
    assert "BatchNorm sees the samples of one rank" in field(found, "sync_batchnorm").why
    assert found.workload is not None
    other = memlab.from_trainer(trainer, module_of(), world_size=4)
    assert other.config.sharding == "none"
    assert "for 2 ranks, and world_size=4" in field(other, "strategy").why

    strategies = pytest.importorskip("lightning.pytorch.strategies")
    strategy = strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    own = trainer_of(tmp_path, devices=2, strategy=strategy)
    assert "configure_model" in field(memlab.from_trainer(own, world_size=2), "strategy").why
