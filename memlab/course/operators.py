"""Exercises of chapter 3: what operators save for backward."""

import functools
from collections.abc import Callable

import torch
from torch import nn

from memlab.course.exercise import Exercise, judge_choice, judge_numbers, one_wrong

ROWS, WIDTH, HIDDEN = 64, 256, 1024
DROPPED = 0.1
ROUNDED = 0.05  # within which a number of sizes is right: statistics of a normalization are small
MADE: dict[str, Callable[[], Callable[[torch.Tensor], torch.Tensor]]] = {
    "add": lambda: lambda x: x + x.detach(),
    "mul": lambda: lambda x: x * (x + 1),
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "softmax": lambda: nn.Softmax(-1),
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "dropout": lambda: nn.Dropout(DROPPED),
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
}


class FeedForward(nn.Module):
    """The block of chapter 3: a norm, a layer four times as wide, a layer back, and a residual."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.widen, self.activation = nn.Linear(WIDTH, HIDDEN), activation
        self.narrow, self.dropout = nn.Linear(HIDDEN, WIDTH), nn.Dropout(DROPPED)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor like `x`, of shape (rows, width)."""
        hidden = self.activation(self.widen(self.norm(x)))
        out: torch.Tensor = x + self.dropout(self.narrow(hidden))
        return out


def saved_sizes(function: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Return how much autograd keeps of a call besides weights, in sizes of its input."""
    x = torch.zeros(ROWS, WIDTH, requires_grad=True) + 1
    weights = list(function.parameters()) if isinstance(function, nn.Module) else []
    known = {weight.untyped_storage().data_ptr() for weight in weights}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage  # alive, so that no other gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = function(x)
    del out
    return sum(each.nbytes() for each in kept.values()) / x.untyped_storage().nbytes()


@functools.cache
def _of_operators() -> dict[str, float]:
    return {name: round(saved_sizes(make()), 1) for name, make in MADE.items()}


@functools.cache
def _of_block() -> float:
    return saved_sizes(FeedForward(nn.GELU()))


EXERCISES = [
    Exercise(
        number="3.1",
        reference=_of_operators,
        mistakes=one_wrong(
            _of_operators,
            {"add": 1, "mul": 1, "relu": 2, "gelu": 2, "softmax": 2, "layer_norm": 2,
             "dropout": 0.25, "linear": 2},
        ),
        judge=judge_numbers,
        fraction=ROUNDED,
    ),
    Exercise(
        number="3.2",
        reference=_of_block,
        mistakes={
            "one_wide": lambda: _of_block() - HIDDEN / WIDTH,
            "input_twice": lambda: _of_block() + 1,
            "no_mask": lambda: _of_block() - 1,
            "narrow_output": lambda: _of_block() + 2,
        },
        fraction=0.01,
        unit="sizes of x",
    ),
    Exercise(
        number="3.3",
        reference=lambda: "relu",
        mistakes={"dropout": lambda: "dropout", "bias": lambda: "bias", "norm": lambda: "norm"},
        judge=judge_choice,
    ),
]  # fmt: skip
