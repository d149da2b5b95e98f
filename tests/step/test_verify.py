"""`verify` against errors planted on purpose."""

import copy
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
from memlab.runtime import verify
from memlab.runtime.verify import relative_errors
from memlab.techniques import compilation
from memlab.techniques.checkpointing import changes
from memlab.techniques.optimizers import optimizers
from tests.models import blocks, ignored_labels, linear, made_of, unseen_count
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

    workload = made_of(Wrong, (4,))
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

    workload = made_of(Counts, (4,))
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
    return made_of(lambda: Checkpointed(**options), (8,))


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

    workload = made_of(lambda: nn.Sequential(*(Counts() for _ in range(2))), (8,))
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

    workload = made_of(lambda: nn.Sequential(*(Hooked() for _ in range(2))), (8,))
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


# how verify judges: rounding, losses that do not repeat, gradients that are nearly zero


class InBackward(nn.Module):
    """Multiplies by another factor when it is run again."""

    def __init__(self, factor):
        super().__init__()
        self.linear, self.factor = nn.Linear(8, 8), factor

    def forward(self, x):
        is_again = torch._C._current_graph_task_id() != -1
        return self.linear(x * self.factor if is_again else x * 1.0).tanh()


@pytest.mark.parametrize(
    ("precision", "factor", "ok"),
    [
        ("fp32", 1.0, True),
        ("fp32", 1 + 1e-6, False),  # the step without recomputing gives the same bits twice
        ("fp32", 1 + 1e-4, False),
        ("bf16-mixed", 1.0, True),
        ("bf16-mixed", 1.03, False),  # within the rounding of bf16-mixed, and not a rounding
    ],
)
def test_a_recompute_that_is_not_bitwise_is_wrong_at_any_precision(precision, factor, ok):
    workload = made_of(
        lambda: nn.Sequential(*(InBackward(factor) for _ in range(2))), (8,), name="again"
    )
    report = check(workload, precision=precision, checkpointing="blocks")
    assert report.ok is ok, report.why
    assert report.bitwise is (factor == 1.0)
    said = "recomputing changes no bit" if factor == 1.0 else "recomputing changes bits"
    assert said in report.why
    if precision == "bf16-mixed":
        assert report.global_relative_error <= report.tolerance


def test_a_loss_that_differs_is_caught_though_no_gradient_does():
    def compute_loss(model, batch):
        is_recomputed = hasattr(model[0].forward, "keeps")
        return model(batch).square().mean() + 100.0 * is_recomputed

    workload = made_of(
        lambda: torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(2)]), (4,), compute_loss
    )
    report = check(workload, batch_size=2, checkpointing="blocks", checkpoint_modules="0")
    assert not report.ok
    assert "the loss is" in report.why


def test_a_rounding_is_allowed_where_the_step_does_not_repeat_its_own_bits():
    noise = unseen_count()

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x).tanh() * (1 + 1e-7 * (noise() % 7))

    workload = made_of(lambda: nn.Sequential(*(Noisy() for _ in range(3))), (8,))
    report = check(workload, checkpointing="blocks")
    assert (report.ok, report.bitwise) == (True, False), report.why
    assert "from run to run" in report.why


def test_the_formats_that_a_model_was_built_in_say_what_is_allowed():
    workload = dataclasses.replace(
        blocks(),
        build_model=lambda: blocks().build_model().bfloat16(),
        compute_loss=lambda model, batch: nn.functional.cross_entropy(
            model(batch[0].to(next(model.parameters()).dtype)).float(), batch[1]
        ),
    )
    report = check(workload, precision="fp32")
    assert (report.ok, report.tolerance) == (True, 5e-2), report.why
    assert report.max_relative_error > 1e-4


class NearlyZero(nn.Module):
    """Gradients that are zero but for rounding: before a norm, of keys, of what softmax ignores."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 16), nn.GroupNorm(1, 16, affine=False)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 4)
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        hidden = self.norm((self.inner(x) + self.shift).flatten(0, 1)).view(*x.shape[:2], -1)
        mixed, _ = self.attention(hidden, hidden, hidden, need_weights=False)
        return (self.head(mixed) + self.shift).softmax(-1)


def of_nearly_zero(loss=lambda out: out.square().mean(), **fields):
    return Workload(
        name="nearly zero",
        build_model=NearlyZero,
        make_batch=lambda n: 100 * torch.randn(n, 6, 8),
        compute_loss=lambda model, x: loss(model(x)),
        **fields,
    )


def test_gradients_that_are_rounding_are_judged_in_fp64(monkeypatch):
    monkeypatch.setattr(verify, "TOLERANCE", 0.0)  # or the floor hides them at random
    report = check(of_nearly_zero(), accumulation_steps=4)
    assert report.same_as_full_batch == "yes"
    assert "vanishes in fp64" in report.why


def pairs(out):
    return out.flatten(1) @ out.flatten(1).T


@pytest.mark.parametrize(
    ("loss", "fields", "words"),
    [
        (
            lambda out: out.square().sum(),
            {"num_loss_terms": len},
            "terms that num_loss_terms counts",
        ),
        (lambda out: out.square().sum(), {}, "not a mean over the samples"),
        (lambda out: pairs(out).square().mean(), {}, "depends on the rest of its batch"),
        (lambda out: nn.functional.dropout(out, 0.3).square().mean(), {}, "draws random numbers"),
    ],
    ids=["sum with terms", "sum", "pairs", "dropout"],
)
def test_a_true_difference_has_a_true_reason(loss, fields, words):
    report = check(of_nearly_zero(loss, **fields), accumulation_steps=4)
    assert report.same_as_full_batch == "no"
    assert words in report.why


@pytest.mark.parametrize(("scale", "verdict"), [(1.0, "unknown"), (4.0, "no")])
def test_a_model_that_knows_one_format_alone_is_not_guessed_about(monkeypatch, scale, verdict):
    def loss(out):
        return nn.functional.linear(out, torch.ones(4, 4)).square().mean() * (
            scale if len(out) == 8 else 1.0
        )

    monkeypatch.setattr(verify, "TOLERANCE", 0.0)
    report = check(of_nearly_zero(loss), accumulation_steps=4)
    assert report.same_as_full_batch == verdict
    assert ("Only fp64 would show" in report.why) is (verdict == "unknown")


@pytest.mark.parametrize("keeps", ["a number", "a teacher"])
def test_what_a_loss_keeps_is_the_same_for_each_run(keeps):
    held = {}

    def compute_loss(model, batch):
        held["calls"] = held.get("calls", 0) + 1
        out = model(batch[0])
        if keeps == "a number":
            return out.square().mean() * held["calls"]
        teacher = held.setdefault("teacher", copy.deepcopy(model).requires_grad_(False))
        with torch.no_grad():
            for own, other in zip(teacher.parameters(), model.parameters(), strict=True):
                own.lerp_(other, 0.1)
        return (out - teacher(batch[0]) + 0.1).square().mean()

    report = check(dataclasses.replace(blocks(), compute_loss=compute_loss), checkpointing="blocks")
    assert report.ok
    assert report.bitwise


def test_a_loss_that_does_not_repeat_is_said_to_be_one():
    count = unseen_count()

    def compute_loss(model, batch):
        return model(batch[0]).square().mean() * (1 + count())

    report = check(dataclasses.replace(blocks(), compute_loss=compute_loss), checkpointing="blocks")
    assert not report.ok
    assert report.bitwise is None
    assert "the reference step itself gives another result" in report.why
