"""How verify judges: rounding, losses that do not repeat, gradients that are nearly zero."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from memlab import Workload
from memlab.runtime import verify
from tests.models import blocks, unseen_count
from tests.verify_parts import check


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
    workload = Workload(
        name="again",
        build_model=lambda: nn.Sequential(*(InBackward(factor) for _ in range(2))),
        make_batch=lambda n: torch.randn(n, 8),
        compute_loss=lambda model, x: model(x).square().mean(),
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

    workload = Workload(
        name="offset",
        build_model=lambda: torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(2)]),
        make_batch=lambda n: torch.randn(n, 4),
        compute_loss=compute_loss,
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

    workload = Workload(
        name="noisy",
        build_model=lambda: nn.Sequential(*(Noisy() for _ in range(3))),
        make_batch=lambda n: torch.randn(n, 8),
        compute_loss=lambda model, x: model(x).square().mean(),
    )
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
