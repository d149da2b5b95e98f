"""Packed sequences of different lengths over fake tensors.

PyTorch's kernels read lengths from memory, or write them to memory, that a fake tensor does not
have. Lengths that come from the batch are known, so this file computes the results itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from memlab.recording.values import Values, for_real
from memlab.torch_private.fakes import FakeTensor
from memlab.torch_private.python_device import PAD_PACKED_SEQUENCE, functions

LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def packed(
    data: torch.Tensor, counts: torch.Tensor, batch_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed sequences with all their elements, and the batch size of each time step.

    Args:
        data: padded sequences, (steps, samples, ...), or (samples, steps, ...) if `batch_first`.
        counts: int64, (samples,), how long each is; real.
        batch_first: which of the two.
    """
    with for_real():  # a layer's kernel reads how many sequences each time step has
        batch_sizes = (counts[:, None] > torch.arange(int(counts.max()))).sum(0)
        rows = int(counts.sum())
    return data.new_empty((rows, *data.shape[2:])), batch_sizes


@contextlib.contextmanager
def lengths_known(values: Values) -> Iterator[None]:
    """Make padding, recurrent layers and the CTC loss work with known lengths of sequences.

    Calls with unknown lengths fail as they would without this.
    """
    torch_module: Any = torch
    pad = getattr(functions, PAD_PACKED_SEQUENCE)
    ctc_loss = torch_module.ctc_loss
    layers = {name: getattr(functions, name) for name in LAYERS}

    def padded(
        data: torch.Tensor, batch_sizes: Any, batch_first: bool, value: float, total: int
    ) -> Any:
        known = values.of(batch_sizes)
        if known is None or not isinstance(data, FakeTensor):
            return pad(data, batch_sizes, batch_first, value, total)
        with for_real():
            sizes = known.tolist()
        return _padded(data, sizes, batch_first, value, total)

    def run(name: str) -> Callable[..., Any]:
        def layer(x: torch.Tensor, second: Any, *rest: Any) -> Any:
            # packed sequences come with the batch size of each step, others with a hidden state
            is_batch = isinstance(second, FakeTensor) and second.dtype is torch.int64
            known = values.of(second) if is_batch else None
            return layers[name](x, second if known is None else known, *rest)

        return layer

    def aligned(scores: Any, targets: Any, steps: Any, letters: Any, *rest: Any) -> Any:
        # PyTorch turns lists into tensors without its dispatcher, where no mode sees them
        both = [
            given if isinstance(given, torch.Tensor) else torch.tensor(given, device=scores.device)
            for given in (steps, letters)
        ]
        return ctc_loss(scores, targets, *both, *rest)

    setattr(functions, PAD_PACKED_SEQUENCE, padded)
    torch_module.ctc_loss = aligned
    for name in LAYERS:
        setattr(functions, name, run(name))
    try:
        yield
    finally:
        torch_module.ctc_loss = ctc_loss
        for name in (PAD_PACKED_SEQUENCE, *LAYERS):
            delattr(functions, name)


def _padded(
    data: torch.Tensor, sizes: Sequence[int], batch_first: bool, value: float, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return padded sequences and their lengths.

    Source: `_pad_packed_sequence` in ATen/native/PackedSequence.cpp, which copies the steps that
    have as many sequences at once.
    """
    steps, most = len(sizes), sizes[0]
    if 0 < total < steps:
        raise RuntimeError(
            "Expected total_length to be at least the length of the longest sequence in input, but "
            f"got total_length={total} and max sequence length being {steps}"
        )

    out = torch.full(
        (max(total, steps), most, *data.shape[1:]), value, dtype=data.dtype, device=data.device
    )
    lengths: list[int] = []
    done = first = 0

    for step in range(1, steps + 1):
        # as long as no sequence ends, the steps are collected for one copy
        size, following = sizes[step - 1], sizes[step] if step < steps else 0
        if following == size:
            continue

        rows = data[done : done + size * (step - first)]
        out[first:step, :size].copy_(rows.view(step - first, size, *data.shape[1:]))
        done, first = done + len(rows), step
        lengths = [step] * (size - following) + lengths

    return out.transpose(0, 1) if batch_first else out, torch.tensor(lengths)
