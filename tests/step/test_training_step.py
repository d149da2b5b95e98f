"""`training_step` in one process: the updates of `build_step`, its checkpoints, its errors."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import memlab
from memlab import MemlabError, StepConfig, Workload, training_step
from memlab.techniques import checkpoints
from memlab.techniques.step import build_step, set_seed
from tests.models import blocks, linear
from tests.rank_parts import faulty
from tests.rank_training import batches
from tests.store_parts import Forked


def test_it_trains_as_the_step_that_is_measured():
    workload, config = blocks(), StepConfig(batch_size=6, accumulation_steps=4, max_grad_norm=1.0)
    measured, training = build_step(workload, config, "cpu"), training_step(workload, config, "cpu")
    set_seed(0)
    batch = workload.make_batch(6)
    for _ in range(3):
        assert training(batch) == measured()
    for ours, theirs in zip(training.model.parameters(), measured.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert training.num_updates == 3


def test_a_smaller_batch_gives_the_gradient_of_its_mean():
    workload, config = linear(), StepConfig(batch_size=8, accumulation_steps=4, optimizer="sgd")
    step = training_step(workload, config, "cpu")
    before = step.model.weight.detach().clone()
    batch = workload.make_batch(3)
    loss = step(batch)
    weight = before.clone().requires_grad_()
    expected = (batch @ weight.T).square().mean()
    expected.backward()
    assert loss == pytest.approx(expected.item())
    rate = step.optimizer.param_groups[0]["lr"]
    torch.testing.assert_close(step.model.weight.detach(), before - rate * weight.grad)


@pytest.mark.parametrize("fields", [
    {}, {"optimizer": "sgd-momentum"}, {"precision": "bf16-master"}, {"precision": "fp16-mixed"},
    {"optimizer": "adafactor"}, {"optimizer_in_backward": True},
    {"optimizer_implementation": "fused"}, {"memory_budget": 0.5},
])  # fmt: skip
def test_training_continues_bit_for_bit_from_a_checkpoint(tmp_path, fields):
    workload, config = blocks(dropout=0.1), StepConfig(batch_size=4, **fields)
    step = training_step(workload, config, "cpu")
    data = [workload.make_batch(4) for _ in range(6)]
    for batch in data[:3]:
        step(batch)
    path = step.save(tmp_path)
    assert path.name == "update-00000003"
    losses = [step(batch) for batch in data[3:]]

    again = training_step(workload, config, "cpu", seed=9)
    assert again.load(tmp_path) == 3
    assert [again(batch) for batch in data[3:]] == losses


def test_a_kill_during_a_save_loses_nothing_that_was_saved(tmp_path, monkeypatch):
    step = training_step(faulty(), StepConfig(batch_size=8), "cpu")
    step(batches(is_of_words=False)[0])
    step.save(tmp_path)
    step(batches(is_of_words=False)[1])

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    def save_and_die():
        monkeypatch.setattr(checkpoints, "_wait", iter([lambda: None, die]).__next__())
        monkeypatch.setattr(checkpoints, "save_state", die)
        step.save(tmp_path)

    process = Forked(save_and_die)
    process.wait()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[0] == "update-00000001"
    fresh = training_step(faulty(), StepConfig(batch_size=8), "cpu")
    assert fresh.load(tmp_path) == 1
    # what the kill left behind is in nobody's way
    assert step.save(tmp_path).name == "update-00000002"
    assert fresh.load(tmp_path) == 2


def test_a_folder_without_a_checkpoint_and_another_model_are_named(tmp_path):
    step = training_step(blocks(), StepConfig(batch_size=4), "cpu")
    with pytest.raises(MemlabError, match="no complete checkpoint"):
        step.load(tmp_path / "nowhere")
    step.save(tmp_path)
    other = training_step(blocks(width=16), StepConfig(batch_size=4), "cpu")
    with pytest.raises(MemlabError, match=r"another model: .* has shape"):
        other.load(tmp_path)


def test_batches_that_cannot_be_used_are_errors():
    step = training_step(linear(), StepConfig(batch_size=4), "cpu")
    with pytest.raises(MemlabError, match="no samples"):
        step(torch.ones(0, 64))
    pair = Workload(
        name="pair",
        build_model=lambda: nn.Linear(2, 2),
        make_batch=lambda n: (torch.ones(n, 2), torch.ones(n, 2)),
        compute_loss=lambda model, batch: model(batch[0]).sub(batch[1]).square().mean(),
    )
    with pytest.raises(MemlabError, match=r"\[3, 4\] samples"):
        training_step(pair, StepConfig(batch_size=4), "cpu")((torch.ones(3, 2), torch.ones(4, 2)))
    with pytest.raises(MemlabError, match="torchrun"):
        memlab.training_step(linear(), StepConfig(sharding="ddp", world_size=2), "cpu")


def test_ranks_draw_other_numbers_once_the_model_is_built(monkeypatch):
    found = []
    built = SimpleNamespace(
        sharded=object(), set_seed=found.append, model=None, optimizer=None, config=None,
        device=None,
    )  # fmt: skip
    monkeypatch.setattr("memlab.integrations.training_step.build_step", lambda *_, **__: built)
    training_step(linear(), StepConfig(batch_size=4), "cpu", seed=7)
    assert found == [7]  # of a step, to which the part of the rank is added
