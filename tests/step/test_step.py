"""The step against gradients of the undivided batch and of plain PyTorch loops."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from memlab import MemlabError, StepConfig, Workload
from memlab.errors import UnsupportedError
from memlab.techniques.step import build_step, set_seed
from memlab.trace import Phase
from tests.models import blocks, ignored_labels, linear, run_gradients


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


@pytest.mark.parametrize("optimizer", ["sgd", "sgd-momentum", "adam", "adamw"])
def test_training_equals_a_plain_loop(optimizer):
    step = build_step(linear(), StepConfig(batch_size=4, optimizer=optimizer), "cpu")
    set_seed(0)
    model = nn.Linear(300, 200, bias=False)
    set_seed(0)
    batch = torch.randn(4, 300)
    make = {
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-3),
        "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    }
    plain = make[optimizer](model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(plain, T_max=1000)
    for _ in range(4):
        loss = model(batch).square().mean()
        loss.backward()
        plain.step()
        plain.zero_grad()
        if optimizer == "sgd-momentum":
            schedule.step()
        assert step() == loss.item()
    assert torch.equal(step.model.weight, model.weight)


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


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"precision": "tf32"}, "use precision='fp32', or precision='bf16-mixed'"),
        ({"memory_budget": 0.5}, "budget_engine='compile'"),
    ],
)
def test_what_is_not_possible_here_is_unsupported_with_a_remedy(fields, word):
    with pytest.raises(UnsupportedError) as caught:
        build_step(linear(), StepConfig(**fields), "cpu")
    assert word in str(caught.value)
    assert "use" in str(caught.value)


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
    workload = Workload(
        name="dict",
        build_model=lambda: nn.Linear(3, 1),
        make_batch=lambda n: {"x": torch.randn(n, 3), "scale": 2.0, "names": None},
        compute_loss=lambda model, batch: (model(batch["x"]) * batch["scale"]).mean(),
    )
    assert build_step(workload, StepConfig(batch_size=5, accumulation_steps=2), "cpu")() != 0
