"""The forward of a linear head whose cross entropy a package computes, without all logits.

As in `lazy_logits.py`, the head returns logits without memory. Their cross entropy calls a function
that takes the hidden states and the weight of the head instead of the logits. One file each has the
function of one package: `of_trl.py`, `of_liger.py`, `of_cut.py`.

This file imports nothing from memlab but errors and a file beside it, because an exported script
contains a copy of both.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memlab.errors import UnsupportedError
from memlab.techniques.loss.lazy_logits import ChunkedHead

Options = tuple[torch.dtype, int, float]  # the format of the logits, the ignored index, smoothing


class FusedHead(ChunkedHead):
    """The forward of a linear head that waits for its loss.

    Attributes:
        kernel: the name of the function.
        compute: takes the head, hidden states (tokens, features), targets (tokens,), options and
            the reduction, and returns the loss.
    """

    field, off = "loss_kernel", "loss_kernel='as-built'"

    def __init__(self, linear: nn.Linear, kernel: str, compute: Callable[..., Any]) -> None:
        super().__init__(linear, 0)
        self.kernel, self.compute = kernel, compute

    @property
    def asked(self) -> str:
        """The setting as a person writes it."""
        return f"loss_kernel={self.kernel!r}"

    def loss(
        self, hidden: torch.Tensor, target: torch.Tensor, options: Options, reduction: str
    ) -> torch.Tensor:
        """Return the cross entropy of some tokens."""
        if options[0] is torch.float64:
            raise UnsupportedError(f"{self.asked} computes in fp32, not in fp64; use {self.off}")
        loss: torch.Tensor = self.compute(self.linear, hidden, target, options, reduction)
        return loss

    def check(self, is_possible: bool, what: str) -> None:
        """Raise UnsupportedError for what the package does not compute."""
        if not is_possible:
            raise UnsupportedError(f"{self.asked} {what}; use {self.off}")
