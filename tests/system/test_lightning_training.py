"""Lightning at work in two real ranks: strategy, checkpoints, early stopping, and a recorder."""

import json

import pytest

import memlab
from memlab import StepConfig
from memlab.errors import ConfigError
from memlab.integrations.lightning_recorder import step_recorder
from tests.exported_rank_parts import in_ranks
from tests.import_parts import needs_lightning
from tests.rank_parts import faulty
from tests.rank_training import BATCH, NUM_BATCHES, batches

EPOCHS = 3  # the first is the best, and two more are waited for


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMLAB_STORE", str(tmp_path / "store"))


def alone():
    """Return the losses of one process, which adds the halves of each batch as the ranks do."""
    step = memlab.training_step(faulty(), StepConfig(batch_size=BATCH, accumulation_steps=2), "cpu")
    return [step(batch) for _ in range(EPOCHS) for batch in batches()]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["trainer", "step"])
def test_a_short_training_with_lightning(what, tmp_path):
    needs_lightning()
    said = in_ranks(2, "-m", "tests.lightning_training", tmp_path / "files", what)
    found = json.loads(said.strip().splitlines()[-1])
    assert [float.fromhex(loss) for loss in found["losses"]] == pytest.approx(alone(), rel=1e-6)
    assert found["epochs"] == EPOCHS  # EarlyStopping has ended it
    if what == "trainer":
        assert found["best"].startswith("epoch=0-")
        assert {"__0_0.distcp", "__1_0.distcp"} <= set(found["files"])  # a part of each rank

    assert found["num_steps"] == EPOCHS * NUM_BATCHES
    [stored] = memlab.stored_results()
    assert (stored.workload_name, stored.source, stored.outcome) == (
        "in-lightning", "measured", "ok",
    )  # fmt: skip
    assert stored.peak_allocated_bytes is None
    assert stored.peak_reserved_bytes is None
    assert len(stored.step_seconds_all) == EPOCHS * NUM_BATCHES - 1
    assert min(stored.step_seconds_all) > 0
    assert any("Memory was not measured" in note for note in stored.notes)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_recorder_counts_updates(accumulation, tmp_path):
    lightning = needs_lightning()
    import torch

    class Small(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(6, 3)

        def training_step(self, batch, batch_idx):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(config):
        recorder = step_recorder("small", config)
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, callbacks=[recorder],
            accumulate_grad_batches=accumulation, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(Small(), torch.utils.data.DataLoader(torch.randn(24, 6), batch_size=2))
        return recorder

    config = StepConfig(batch_size=2 * accumulation, accumulation_steps=accumulation)
    recorder = fit(config)
    assert len(recorder.steps) == 12 // accumulation
    assert recorder.result.samples_per_second == pytest.approx(
        config.batch_size / recorder.result.step_seconds
    )
    with pytest.raises(ConfigError, match="world_size=2, and the Trainer has 1"):
        fit(StepConfig(sharding="ddp", world_size=2))
