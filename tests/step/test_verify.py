"""`verify` against errors planted on purpose."""

import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from memlab import Workload
from memlab.config import OptimizerImplementation
from memlab.runtime.verify import relative_errors
from memlab.techniques import compilation
from memlab.techniques.checkpointing import changes
from memlab.techniques.optimizers import optimizers
from tests.models import blocks, ignored_labels, linear, unseen_count
from tests.verify_parts import check


def test_the_plain_step_is_the_reference():
    report = check(blocks())
    assert report.ok
    assert report.max_relative_error == 0.0
    assert report.same_as_full_batch == "yes"


def test_the_error_is_the_contracts():
    reference = {"a": torch.tensor([3.0, 4.0]), "tiny": torch.tensor([0.0])}
    found = {"a": torch.tensor([3.0, 4.5]), "tiny": torch.tensor([1e-4])}
    worst, largest, together = relative_errors(found, reference)
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
        (blocks(), "yes", "gradient of the whole batch"),
        (blocks(norm=True), "no", "0.1 normalises over 4 samples, not 8"),
        (blocks(dropout=0.1), "no", "0.3 draws other random numbers"),
        (ignored_labels(), "yes", "gradient of the whole batch"),
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
            self.register_buffer("calls", torch.zeros(()))
            self.count = unseen_count()

        def forward(self, x):
            self.calls.fill_(self.count())  # state outside, which a recompute changes again
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


def test_a_mode_of_inductor_is_refused_as_when_it_is_run():
    report = check(blocks(), compile=True, compile_mode="max-autotune")
    assert report.outcome == "unsupported"
    assert "'max-autotune' tunes the code" in report.why


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


class Noise(nn.Module):
    """Two random masks; in a model of its own the first may be saved and the second drawn again."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        hidden = self.up(x).tanh()
        hidden = hidden * (torch.rand_like(hidden) > 0.3)
        out = self.down(hidden).tanh()
        return x + out * (torch.rand_like(out) > 0.3)


def save_the_first_mask(context, op, *args, **kwargs):
    first = op is torch.ops.aten.rand_like.default and args[0].shape[-1] == 32
    matmul = op is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if first or matmul else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(nn.Module):
    """A model that checkpoints its blocks itself, as `options` say."""

    def __init__(self, **options):
        super().__init__()
        self.layers, self.options = nn.ModuleList(Noise() for _ in range(2)), options

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, **self.options) if self.options else layer(x)
        return x


def noisy(**options):
    return Workload(
        name="noisy",
        build_model=lambda: Checkpointed(**options),
        make_batch=lambda n: torch.randn(n, 8),
        compute_loss=lambda model, x: model(x).square().mean(),
    )


def test_pytorchs_wrong_gradients_of_a_compiled_budget_are_caught(monkeypatch):
    """Pytorch issue 190758, planted by taking away the guard that refuses it."""
    workload = noisy()
    budget = {"budget_engine": "compile", "memory_budget": 0.0}
    assert "190758" in check(workload, **budget).why
    assert check(workload, compile=True).ok
    monkeypatch.setattr(compilation, "_draws", lambda node: False)
    report = check(workload, **budget)
    assert report.outcome == "ok", report.why
    assert not report.ok
    assert report.max_relative_error > 0.1
    assert str(report).startswith("gradients differ on cpu: largest relative error")


def test_pytorchs_wrong_random_numbers_of_a_selective_policy_are_caught():
    contexts = functools.partial(create_selective_checkpoint_contexts, save_the_first_mask)
    report = check(noisy(use_reentrant=False, context_fn=contexts))
    assert report.outcome == "ok", report.why
    assert (report.ok, report.bitwise) == (False, False)
    assert report.max_relative_error > 0.1
    assert "recomputing changes bits" in report.why
    assert "the model's own checkpointing is off in the reference step" in report.why


def test_the_same_policy_given_to_memlab_is_right():
    report = check(noisy(), checkpointing="blocks", checkpoint_policy=save_the_first_mask)
    assert (report.ok, report.bitwise) == (True, True), report.why


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("preserve", [True, False])
def test_a_models_own_checkpointing_is_compared_with_the_model_without(use_reentrant, preserve):
    own = noisy(use_reentrant=use_reentrant, preserve_rng_state=preserve)
    if use_reentrant:  # which loses gradients of a module none of whose inputs needs one
        own = dataclasses.replace(own, make_batch=lambda n: torch.randn(n, 8).requires_grad_())
    report = check(own, accumulation_steps=2)
    assert (report.ok, report.bitwise) == (preserve, preserve), report.why


def test_a_recompute_that_goes_wrong_in_the_second_update_is_caught():
    """A counter that nothing puts back, of which only the first values agree."""

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls = nn.Linear(8, 8), unseen_count()

        def forward(self, x):
            return self.linear(x * (1.0 if self.calls() < 2 else 2.0))

    workload = Workload(
        name="late",
        build_model=lambda: nn.Sequential(*(Counts() for _ in range(2))),
        make_batch=lambda n: torch.randn(n, 8),
        compute_loss=lambda model, x: model(x).square().mean(),
    )
    report = check(workload, checkpointing="blocks")
    assert (report.ok, report.bitwise, report.num_updates) == (False, False, 3)
    assert report.first_different_update == 2
    assert "(update 2)" in report.why


def test_hooks_that_pile_up_are_caught_though_no_gradient_differs(monkeypatch):
    class Hooked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            if not hasattr(self, "installed"):
                self.installed = True
                self.linear.register_forward_hook(lambda *_: None)
            return self.linear(x).tanh()

    workload = Workload(
        name="hooked",
        build_model=lambda: nn.Sequential(*(Hooked() for _ in range(2))),
        make_batch=lambda n: torch.randn(n, 8),
        compute_loss=lambda model, x: model(x).square().mean(),
    )
    assert check(workload, checkpointing="blocks").ok
    monkeypatch.setattr(changes, "_set_registries", lambda *_: None)
    report = check(workload, checkpointing="blocks")
    assert (report.ok, report.max_relative_error) == (False, 0.0)
    assert "first in the hooks of 0.linear: _forward_hooks" in report.why


def test_an_optimizer_that_takes_other_steps_is_caught(monkeypatch):
    fields = {"optimizer_implementation": "foreach"}
    assert check(blocks(), **fields).ok
    options = {"foreach": True, "lr": 1.2e-3}
    monkeypatch.setitem(optimizers.IMPLEMENTATIONS, OptimizerImplementation.FOREACH, options)
    report = check(blocks(), **fields)
    assert (report.ok, report.max_relative_error) == (False, 0.0)
    assert "after the update the reference step differs in weights" in report.why
