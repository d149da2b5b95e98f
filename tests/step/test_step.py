"""The step against gradients of the undivided batch and of plain PyTorch loops."""

import dataclasses
import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import memlab
from memlab import MemlabError, StepConfig, training_step
from memlab.techniques import checkpoints
from memlab.techniques.step import build_step, set_seed
from memlab.trace import Phase
from tests.models import blocks, ignored_labels, linear, made_of, run_gradients
from tests.rank_parts import faulty
from tests.rank_training import batches
from tests.store_parts import Forked


def assert_same_gradients(found, expected, tolerance=1e-6):
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("steps", [2, 3, 4, 6])
def test_uneven_micro_batches_give_the_gradient_of_the_whole_batch(steps):
    whole = run_gradients(blocks(), StepConfig(batch_size=6))
    split = run_gradients(blocks(), StepConfig(batch_size=6, accumulation_steps=steps))
    assert_same_gradients(split, whole)


@pytest.mark.parametrize("steps", [2, 3, 7])
def test_a_mean_over_tokens_is_weighted_by_its_tokens(steps):
    workload = ignored_labels()
    whole = run_gradients(workload, StepConfig(batch_size=7))
    config = StepConfig(batch_size=7, accumulation_steps=steps)
    assert_same_gradients(run_gradients(workload, config), whole)
    unweighted = dataclasses.replace(workload, num_loss_terms=None)
    wrong = run_gradients(unweighted, config)
    assert not torch.allclose(wrong["weight"], whole["weight"], rtol=1e-3, equal_nan=False)


def test_no_loss_terms_at_all_is_refused():
    workload = dataclasses.replace(ignored_labels(), num_loss_terms=lambda batch: 0)
    with pytest.raises(MemlabError, match="num_loss_terms"):
        build_step(workload, StepConfig(), "cpu")


def test_gradients_are_none_after_the_optimizer_and_phases_are_marked_in_order():
    seen = []
    config = StepConfig(batch_size=3, accumulation_steps=2)
    step = build_step(blocks(), config, "cpu", mark=lambda *at: seen.append(at))
    step(lambda *at: seen.append(at))
    assert seen == [
        (Phase.BUILD, 0), (Phase.DATA, 0),
        (Phase.FORWARD, 0), (Phase.BACKWARD, 0), (Phase.FORWARD, 1), (Phase.BACKWARD, 1),
        (Phase.OPTIMIZER, 1),
    ]  # fmt: skip
    assert all(p.grad is None for p in step.model.parameters())


def test_the_seed_fixes_model_batch_and_dropout():
    workload, config = blocks(dropout=0.5), StepConfig()
    first, second = run_gradients(workload, config, 1), run_gradients(workload, config, 1)
    assert_same_gradients(first, second, 0)
    other = run_gradients(workload, config, 2)
    assert not torch.equal(first["0.0.weight"], other["0.0.weight"])


def test_precisions_compute_in_their_format():
    seen = {}

    def loss(model, x):
        out = model(x)
        seen["output"], seen["weight"], seen["input"] = out.dtype, model.weight.dtype, x.dtype
        return out.square().mean()

    workload = dataclasses.replace(linear(), compute_loss=loss)
    expected = {
        "fp32": (torch.float32, torch.float32, torch.float32),
        "bf16-mixed": (torch.bfloat16, torch.float32, torch.float32),
        "fp16-mixed": (torch.float16, torch.float32, torch.float32),
        "bf16": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    }
    for precision, dtypes in expected.items():
        build_step(workload, StepConfig(batch_size=2, precision=precision), "cpu")()
        assert (seen["output"], seen["weight"], seen["input"]) == dtypes, precision


def test_fp16_mixed_scales_its_loss_and_undoes_it():
    step = build_step(blocks(), StepConfig(precision="fp16-mixed"), "cpu")
    assert step.loss_scale == 2**16
    step.accumulate()
    scaled = step.model[-1].weight.grad.clone()
    step.scaler.unscale_(step.optimizer)
    assert scaled.norm() / step.model[-1].weight.grad.norm() == pytest.approx(2**16, rel=1e-3)


def test_a_budget_of_one_is_the_plain_step_whatever_the_engine():
    step = build_step(linear(), StepConfig(budget_engine="compile"), "cpu")
    assert step.run_model is step.model


@pytest.mark.parametrize(
    ("make_batch", "said"),
    [
        (lambda n: torch.randn(4, 300), "(4, 300)"),
        (lambda n: {"x": torch.randn(n, 300), "y": torch.tensor(1.0)}, "['y']"),
        (lambda n: None, "no tensor"),
        (lambda n: (torch.randn(n, 300), np.zeros(n)), "ndarray at batch[1]"),
        (lambda n: torch.randn(n, 300).to_sparse(), "sparse"),
    ],
)
def test_a_batch_that_ignores_n_is_named(make_batch, said):
    workload = dataclasses.replace(linear(), make_batch=make_batch)
    with pytest.raises(MemlabError) as caught:
        build_step(workload, StepConfig(accumulation_steps=2), "cpu")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda model, x: model(x), "shape (8, 200)"),
        (lambda model, x: 0.5, "float"),
        (lambda model, x: model(x).detach().mean(), "detach"),
    ],
)
def test_a_loss_that_cannot_be_trained_is_named(loss, said):
    step = build_step(dataclasses.replace(linear(), compute_loss=loss), StepConfig(), "cpu")
    with pytest.raises(MemlabError) as caught:
        step()
    assert said in str(caught.value)


def test_what_is_no_model_is_named():
    workload = dataclasses.replace(linear(), build_model=lambda: "model")
    with pytest.raises(MemlabError, match="build_model returned str"):
        build_step(workload, StepConfig(), "cpu")
    frozen = dataclasses.replace(
        linear(), build_model=lambda: nn.Linear(2, 2).requires_grad_(False)
    )
    with pytest.raises(MemlabError, match="no trainable parameter"):
        build_step(frozen, StepConfig(), "cpu")


def test_a_batch_may_hold_what_is_no_tensor():
    workload = made_of(
        lambda: nn.Linear(3, 1),
        lambda n: {"x": torch.randn(n, 3), "scale": 2.0, "names": None},
        lambda model, batch: (model(batch["x"]) * batch["scale"]).mean(),
    )
    assert build_step(workload, StepConfig(batch_size=5, accumulation_steps=2), "cpu")() != 0


# `training_step` in one process: the updates of `build_step`, its checkpoints, its errors


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
    pair = made_of(
        lambda: nn.Linear(2, 2),
        lambda n: (torch.ones(n, 2), torch.ones(n, 2)),
        lambda model, batch: model(batch[0]).sub(batch[1]).square().mean(),
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
