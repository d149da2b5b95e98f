"""`verify` against errors planted on purpose."""

import dataclasses

import pytest
import torch
from torch import nn

from memlab import StepConfig, Workload, verify
from memlab._verify import _errors
from tests.models import blocks, ignored_labels, linear


def check(workload, **fields):
    return verify(workload, StepConfig(**fields), "cpu", isolate=False)


def test_the_plain_step_is_the_reference():
    report = check(blocks())
    assert report.ok
    assert report.max_relative_error == 0.0
    assert report.same_as_full_batch == "yes"


def test_the_error_is_the_contracts():
    reference = {"a": torch.tensor([3.0, 4.0]), "tiny": torch.tensor([0.0])}
    found = {"a": torch.tensor([3.0, 4.5]), "tiny": torch.tensor([1e-4])}
    worst, largest, together = _errors(found, reference)
    floor = 1e-3 * 5.0 / 2**0.5
    assert worst == "a"
    assert largest == pytest.approx(max(0.5 / 5.0, 1e-4 / floor))
    assert together == pytest.approx((0.25 + 1e-8) ** 0.5 / 5.0)


def test_planted_wrong_gradients_are_caught_and_named():
    """A model that scales its gradient when it runs under autocast or checkpointing, not else."""
    calls = []

    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(3)))

        def forward(self, x):
            calls.append(1)
            out = self.layers(x)
            return out * 2 if len(calls) > 1 else out  # the second step is another one

    workload = Workload(
        name="wrong",
        build_model=Wrong,
        make_batch=lambda n: torch.randn(n, 4),
        compute_loss=lambda model, x: model(x).square().mean(),
    )
    report = check(workload, checkpointing="blocks")
    assert not report.ok
    assert report.max_relative_error == pytest.approx(3.0, rel=1e-3)  # (2x)**2 is 4 times x**2
    assert report.worst_parameter.startswith("layers.")
    assert report.worst_parameter in report.why


@pytest.mark.parametrize(
    ("workload", "verdict", "word"),
    [
        (blocks(), "yes", "undivided gradient"),
        (blocks(norm=True), "no", "0.1 normalises over 4 samples, not 8"),
        (blocks(dropout=0.1), "no", "0.3 draws other random numbers"),
        (ignored_labels(), "yes", "undivided gradient"),
        (dataclasses.replace(ignored_labels(), num_loss_terms=None), "no", "num_loss_terms"),
    ],
)
def test_same_as_full_batch_names_the_reason(workload, verdict, word):
    report = check(workload, accumulation_steps=2)
    assert report.same_as_full_batch == verdict
    assert word in report.why


def test_rounding_has_a_stated_tolerance():
    report = check(blocks(), precision="bf16-mixed")
    assert report.ok
    assert 0 < report.global_relative_error <= report.tolerance == 5e-2
    assert "bf16-mixed" in report.why


def test_an_overflow_is_skipped_as_training_would():
    def big_loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1]) * 1000

    workload = dataclasses.replace(blocks(), compute_loss=big_loss)
    report = check(workload, precision="fp16-mixed")
    assert report.ok, report.why


def test_what_cannot_run_is_not_called_the_same():
    report = check(linear(), checkpointing="blocks")
    assert not report.ok
    assert report.outcome == "unsupported"
    assert report.max_relative_error is None
    assert "not checked" in str(report)


def test_a_buffer_that_differs_is_named():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*(Counted() for _ in range(2)))

        def forward(self, x):
            return self.layers(x)

    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.count = 0  # state in Python, which a recompute changes again
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.count += 1
            self.calls.fill_(self.count)
            return self.linear(x)

    workload = Workload(
        name="counts",
        build_model=Counts,
        make_batch=lambda n: torch.randn(n, 4),
        compute_loss=lambda model, x: model(x).square().mean(),
    )
    report = check(workload, checkpointing="blocks", accumulation_steps=2)
    assert not report.ok
    assert report.buffers_equal is False
    assert report.bitwise is False
    assert "layers.0.calls" in report.why


def test_dropout_under_compile_is_not_called_a_difference():
    report = check(blocks(dropout=0.3), compile=True)
    assert report.outcome == "unsupported"
    assert "0.3 draws other random numbers" in report.why


def test_gradients_that_are_not_finite_are_said_so():
    def nan_loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1]) * float("nan")

    report = check(dataclasses.replace(blocks(), compute_loss=nan_loss))
    assert not report.ok
    assert "not finite" in report.why
