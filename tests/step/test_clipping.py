"""Gradient clipping against `clip_grad_norm_` called by hand."""

import pytest
import torch

import memlab
from memlab import StepConfig
from memlab.errors import ConfigError, UnsupportedError
from memlab.techniques.step import build_step, set_seed
from tests.models import blocks

NORM = 0.05  # far below what the first gradients have


def weights_after(config, updates=3):
    step = build_step(blocks(), config, "cpu")
    for _ in range(updates):
        set_seed(0)
        step()
    return [p.detach().clone() for p in step.model.parameters()]


def weights_by_hand(config, updates=3):
    """Train with the clipping of PyTorch between accumulation and update."""
    plain = StepConfig(**{**config.to_dict(), "max_grad_norm": None})
    step = build_step(blocks(), plain, "cpu")
    norms = []
    for _ in range(updates):
        set_seed(0)
        step.accumulate()
        step.unscale()
        norms.append(torch.nn.utils.clip_grad_norm_(step.model.parameters(), NORM))
        step.update()
    assert max(norms) > NORM, "nothing was clipped"
    return [p.detach().clone() for p in step.model.parameters()]


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer": "sgd"},
        {"optimizer": "sgd-momentum", "accumulation_steps": 3},
        {"optimizer": "sgd", "precision": "fp16-mixed"},
        {"optimizer": "adamw", "precision": "bf16"},
        {"optimizer": "sgd", "checkpointing": "blocks"},
    ],
    ids=str,
)
def test_updates_are_those_of_clipping_by_hand(fields):
    config = StepConfig(batch_size=6, max_grad_norm=NORM, **fields)
    pairs = zip(weights_after(config), weights_by_hand(config), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.slow
def test_it_is_measured_predicted_and_verified():
    scaled = StepConfig(batch_size=6, max_grad_norm=NORM, precision="fp16-mixed")
    report = memlab.verify(blocks(), scaled, "cpu")
    assert report.ok, report.why

    config = StepConfig(batch_size=6, max_grad_norm=NORM, accumulation_steps=2)
    measured = memlab.measure(blocks(), config, "cpu", repeats=1)
    predicted = memlab.predict(blocks(), config, "cpu")
    assert measured.peak_allocated_bytes == predicted.peak_allocated_bytes
    report = memlab.verify(blocks(), config, "cpu")
    assert report.ok, report.why
    on_card = memlab.predict(blocks(), config, "rtx-4060")
    assert (on_card.outcome, on_card.fits) == ("ok", None)


def test_it_is_refused_where_gradients_are_used_one_by_one():
    config = StepConfig(max_grad_norm=NORM, optimizer_in_backward=True)
    with pytest.raises(UnsupportedError, match=r"max_grad_norm=0\.05 with optimizer_in_backward"):
        build_step(blocks(), config, "cpu")


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "1", True, [1.0]], ids=str)
def test_a_norm_that_cannot_be_is_named(value):
    with pytest.raises(ConfigError, match=r"max_grad_norm=.*; allowed is a number above 0"):
        StepConfig(max_grad_norm=value)
