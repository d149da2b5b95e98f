"""How memory is laid out: channels last in tensors, expandable segments in the allocator."""

import dataclasses

import pytest
import torch
from torch import nn

import memlab
from memlab import Outcome, StepConfig, Workload, measure, predict, verify, workloads
from memlab._util.units import MIB
from memlab.errors import UnsupportedError
from memlab.techniques.script import script
from memlab.techniques.step import build_step
from tests.models import linear, made_of

LAST = StepConfig(batch_size=8, channels_last=True)


def convolutions(dimensions: int = 2, channels: int = 24) -> Workload:
    kind = {2: nn.Conv2d, 3: nn.Conv3d}[dimensions]
    size = {2: 24, 3: 8}[dimensions]

    def build() -> nn.Module:
        layers = [kind(channels, channels, 3, padding=1) for _ in range(3)]
        return nn.Sequential(*(layer for conv in layers for layer in (conv, nn.ReLU())))

    return made_of(build, (channels, *[size] * dimensions))


@pytest.mark.parametrize(
    ("dimensions", "form"), [(2, torch.channels_last), (3, torch.channels_last_3d)]
)
def test_weights_and_results_lie_channels_last(dimensions, form):
    step = build_step(convolutions(dimensions), LAST, "cpu")
    assert all(p.is_contiguous(memory_format=form) for p in step.model.parameters() if p.ndim > 1)
    assert step.run_model(step.micro_batches[0]).is_contiguous(memory_format=form)
    step()
    weight = step.model[0].weight
    assert step.optimizer.state[weight]["exp_avg"].is_contiguous(memory_format=form)


@pytest.mark.slow
@pytest.mark.parametrize("config", [LAST, StepConfig(channels_last=True, compile=True)], ids=str)
def test_the_gradient_is_that_of_the_reference(config):
    for workload in (
        convolutions(),
        convolutions(3),
        workloads.get("resnet-digits", depths=(1, 1, 1, 1)),
    ):
        report = verify(workload, config, "cpu", isolate=False)
        assert report.ok, report.why


def test_the_prediction_is_what_is_measured():
    workload = convolutions(channels=64)
    found = measure(workload, LAST, "cpu", repeats=1)
    guess = predict(workload, LAST, "cpu")
    assert guess.outcome == found.outcome == "ok", (guess.message, found.message)
    plain = dataclasses.replace(LAST, channels_last=False)
    missed = [found.peak_allocated_bytes - guess.peak_allocated_bytes]
    found, guess = measure(workload, plain, "cpu", repeats=1), predict(workload, plain, "cpu")
    missed.append(found.peak_allocated_bytes - guess.peak_allocated_bytes)
    assert missed[0] == missed[1]  # a few bytes of counters, and no more than without
    assert missed[0] < 100


def test_a_model_without_convolutions_is_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"channels_last=True does nothing for Linear"):
        build_step(linear(), LAST, "cpu")


# expandable segments


@pytest.mark.slow
def test_less_is_reserved_and_the_same_allocated():
    workload = memlab.workloads.get("gpt-small")
    plain = memlab.predict(workload, StepConfig(batch_size=24), "t4")
    paged = memlab.predict(workload, StepConfig(batch_size=24, expandable_segments=True), "t4")
    assert paged.outcome is Outcome.OK
    assert paged.peak_allocated_bytes <= plain.peak_allocated_bytes
    assert paged.peak_reserved_bytes < plain.peak_reserved_bytes
    # one page of each pool is all that a growing segment can leave over, and holes between blocks
    assert paged.peak_reserved_bytes - paged.peak_allocated_bytes < 64 * MIB


def test_a_cpu_has_no_segments():
    workload = memlab.workloads.get("vit-digits")
    result = memlab.measure(workload, StepConfig(expandable_segments=True), "cpu")
    assert result.outcome is Outcome.UNSUPPORTED
    assert "no caching allocator" in result.message


def test_a_script_sets_them_before_the_model_is_built():
    text = script(StepConfig(expandable_segments=True), "cuda")
    assert text.index("expandable_segments:True") < text.index("build_model()")
