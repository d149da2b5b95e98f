"""Exercises of chapter 6: what micro-batches change of a peak, and of a gradient."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from memlab._util.units import is_a, shown
from memlab.api import predict
from memlab.config import StepConfig
from memlab.course.exercise import Exercise, always, judge_named, turned
from memlab.course.steps import BATCH, mlp, mlp_step
from memlab.result import StepResult
from memlab.running import require_ok

PADDING = -100  # a label that cross entropy leaves out
NUM_WORDS, LENGTHS = 32, (16, 3, 9, 1)  # of the samples of exercise 6.2
NUM_SAMPLES, NUM_PARTS, WIDTH = 16, 4, 8  # of the training steps of exercise 6.3
ALLOWED = 1e-9  # of a gradient in fp64
Accumulate = Callable[[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]], Any]
LossOf = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


@functools.cache
def _in_two() -> dict[str, int]:
    config = StepConfig(batch_size=BATCH, accumulation_steps=2)
    return _sizes(require_ok(predict(mlp(), config, "cpu", progress=False)))


def _whole() -> dict[str, int]:
    return _sizes(mlp_step())


def _sizes(step: StepResult) -> dict[str, int]:
    return {"peak": step.peak_allocated_bytes or 0, **(step.peak_by_category or {})}


def _reads() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(NUM_WORDS, WIDTH), nn.Linear(WIDTH, NUM_WORDS)).double()


def texts_in_parts() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the micro-batches of exercise 6.2, one text each: words and labels of (1, length)."""
    generator = torch.Generator().manual_seed(0)
    longest, parts = max(LENGTHS), []
    for length in LENGTHS:
        words = torch.randint(NUM_WORDS, (2, 1, longest), generator=generator)
        words[1, :, length:] = PADDING
        parts.append((words[0], words[1]))
    return parts


def _loss(model: nn.Module, words: torch.Tensor, labels: torch.Tensor, how: str = "mean") -> Any:
    scores = model(words).flatten(0, 1)
    return cross_entropy(scores, labels.flatten(), ignore_index=PADDING, reduction=how)


def _gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
                      for p in model.parameters()])  # fmt: skip


def _gradient_of(accumulate: Accumulate) -> torch.Tensor:
    model = _reads()
    accumulate(model, texts_in_parts())
    return _gradient(model)


def _at_once(model: nn.Module, parts: Any) -> None:
    words, labels = map(torch.cat, zip(*parts, strict=True))
    _loss(model, words, labels).backward()


def _right(model: nn.Module, parts: Any) -> None:
    total = sum((labels != PADDING).sum() for _, labels in parts)
    for words, labels in parts:
        (_loss(model, words, labels, "sum") / total).backward()


def _mean_of_means(model: nn.Module, parts: Any) -> None:
    for words, labels in parts:
        (_loss(model, words, labels) / len(parts)).backward()


def _no_division(model: nn.Module, parts: Any) -> None:
    for words, labels in parts:
        _loss(model, words, labels).backward()


def _sums(model: nn.Module, parts: Any) -> None:
    for words, labels in parts:
        _loss(model, words, labels, "sum").backward()


def _by_padded(model: nn.Module, parts: Any) -> None:
    total = sum(labels.numel() for _, labels in parts)
    for words, labels in parts:
        (_loss(model, words, labels, "sum") / total).backward()


def _last_alone(model: nn.Module, parts: Any) -> None:
    for words, labels in parts:
        model.zero_grad()
        (_loss(model, words, labels) / len(parts)).backward()


SLIPS: dict[str, Accumulate] = {
    "mean_of_means": _mean_of_means, "no_division": _no_division, "sums": _sums,
    "by_padded": _by_padded, "last_alone": _last_alone,
}  # fmt: skip


def _judge_loop(asked: Exercise, given: Any) -> str:
    """Return the hint for a loop over micro-batches, by the gradient that it leaves."""
    if not callable(given) or is_a(given, nn.Module):
        return asked.hints["no_function"].format(given=shown(given))
    try:
        found = _gradient_of(given)
    except Exception as error:  # of a person's own function
        return asked.hints["raises"].format(given=f"{type(error).__name__}: {error}")
    if not found.any():
        return asked.hints["no_gradient"]
    if _is_same(found, _gradient_of(_at_once)):
        return ""
    for name, slip in SLIPS.items():
        if _is_same(found, _gradient_of(slip)):
            return asked.hints[name]
    return asked.hints["another"]


def _is_same(found: torch.Tensor, right: torch.Tensor) -> bool:
    return bool((found - right).norm() <= ALLOWED * right.norm())


class _Mixed(nn.Module):
    """A model of two layers with something between them."""

    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.between = nn.Linear(WIDTH, WIDTH), between or nn.ReLU()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.between(self.first(x)))
        return out


def _mean(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mse_loss(model(x), y)


def _total(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mse_loss(model(x), y, reduction="sum")


def _pairs(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(x) @ y.T, torch.arange(len(x)))


STEPS: dict[str, tuple[Callable[[], nn.Module], LossOf]] = {
    "mean": (_Mixed, _mean),
    "sum": (_Mixed, _total),
    "layer_norm": (lambda: _Mixed(nn.LayerNorm(WIDTH)), _mean),
    "batch_norm": (lambda: _Mixed(nn.BatchNorm1d(WIDTH)), _mean),
    "contrastive": (_Mixed, _pairs),
}


@functools.cache
def _is_divisible(name: str) -> bool:
    """Return whether the gradients of equal parts, averaged, are that of the whole batch."""
    torch.manual_seed(0)
    make, loss_of = STEPS[name]
    model, (x, y) = make().double(), torch.randn(2, NUM_SAMPLES, WIDTH, dtype=torch.double)
    loss_of(model, x, y).backward()
    whole = _gradient(model)
    model.zero_grad()
    for part in zip(x.chunk(NUM_PARTS), y.chunk(NUM_PARTS), strict=True):
        (loss_of(model, *part) / NUM_PARTS).backward()
    return _is_same(_gradient(model), whole)


def _all_divisible() -> dict[str, bool]:
    return {name: _is_divisible(name) for name in STEPS}


EXERCISES = [
    Exercise(
        number="6.1",
        reference=lambda: _in_two()["peak"],
        mistakes={
            "half_of_all": lambda: _whole()["peak"] // 2,
            "batch_too": lambda: _in_two()["peak"] - _in_two()["inputs"] // 2,
            "last_gradients": lambda: (
                _in_two()["peak"] - _in_two()["gradients"] + _whole()["gradients"]
            ),
            "as_before": lambda: _whole()["peak"],
        },
        fraction=1e-4,
    ),
    Exercise(
        number="6.2",
        reference=lambda: _right,
        mistakes={
            **{name: always(slip) for name, slip in SLIPS.items()},
            "no_gradient": always(lambda model, parts: None),
            "no_function": always(len(LENGTHS)),
        },
        judge=_judge_loop,
    ),
    Exercise(
        number="6.3",
        reference=_all_divisible,
        mistakes=turned(_all_divisible, STEPS),
        judge=judge_named,
    ),
]
