"""What cuDNN's convolutions may take as workspace: a few hypotheses, since nobody publishes it.

PyTorch asks cuDNN's heuristics for plans and allocates the workspace that the first one wants
(ATen/native/cudnn/Conv_v8.cpp, `benchmark` off). If there is not enough memory, the next plan is
tried. So a step *needs* no workspace, but *takes* some where there is room, and how much depends on
plans that nobody outside of NVIDIA knows. What is known:

- On tensor cores cuDNN computes in channels-last. Given contiguous (NCHW) tensors, a plan may copy
  input, output and weight to that layout: in forward, in backward, or in both.
- A plan may lay out the patches of a strided layer: R x S values for each output value.
- 1x1 convolutions are matrix products, and depthwise ones use PyTorch's own kernels.

No rule chooses between these: one that was fitted to six convnets missed others by 45 %. Instead a
prediction replays the caching allocator with each of them and takes the weighted median of the
peaks. `benchmarks/calibrate_memory.py` finds the weights, and how wrong the median is for models
that were left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum

from memlab.devices.cards import Card
from memlab.operators.signatures import TensorSpec
from memlab.recording.assembly import Effect
from memlab.recording.recording import Operator

HALF_BYTES = 2
FORWARD, BACKWARD = "aten::convolution", "aten::convolution_backward"


class Workspaces(StrEnum):
    """One hypothesis about what the convolutions of a step take."""

    NONE = "none"
    COPIES_IN_FORWARD = "copies in forward"
    COPIES_IN_BACKWARD = "copies in backward"
    COPIES = "copies in both"
    PATCHES = "patches"


def with_workspaces(
    effects: Sequence[Effect | None],
    operators: Sequence[Operator],
    card: Card | None,
    hypothesis: Workspaces,
) -> list[Effect | None]:
    """Return the memory of each operator's kernel, with what its convolutions take.

    Args:
        effects: of each operator, without any workspace of convolutions.
        operators: of the same recording.
        card: None for a card with tensor cores for every format.
        hypothesis: about the workspaces.
    """
    found = list(effects)
    for number, operator in enumerate(operators):
        if operator.signature is not None and operator.name in (FORWARD, BACKWARD):
            size = _bytes_of(operator, card, hypothesis)
            found[number] = Effect(workspace_bytes=size) if size else None
    return found


def take_workspace(operators: Sequence[Operator], card: Card | None) -> bool:
    """Return whether the hypotheses differ for a step: it has a convolution that may take some."""
    every = (Workspaces.COPIES, Workspaces.PATCHES)
    return any(
        _bytes_of(operator, card, hypothesis) > 0
        for operator in operators
        if operator.signature is not None and operator.name in (FORWARD, BACKWARD)
        for hypothesis in every
    )


def middle(peaks: Mapping[Workspaces, int], weights: Mapping[Workspaces, float]) -> Workspaces:
    """Return the hypothesis whose peak is the weighted median; of equal peaks the first one.

    Args:
        peaks: bytes by hypothesis.
        weights: of each, at least 0, and above 0 for one of them.

    >>> peaks = {Workspaces.NONE: 100, Workspaces.COPIES: 130, Workspaces.PATCHES: 180}
    >>> str(middle(peaks, dict.fromkeys(peaks, 1.0)))
    'copies in both'
    """
    half, sum_so_far = sum(weights[hypothesis] for hypothesis in peaks) / 2, 0.0
    for hypothesis in sorted(peaks, key=lambda hypothesis: peaks[hypothesis]):
        sum_so_far += weights[hypothesis]
        if sum_so_far >= half:
            break
    return hypothesis


def _bytes_of(operator: Operator, card: Card | None, hypothesis: Workspaces) -> int:
    assert operator.signature is not None
    args = operator.signature[1]
    is_backward = operator.name == BACKWARD
    x, weight, stride, groups = (
        (args[1], args[2], args[4], args[9])
        if is_backward
        else (args[0], args[1], args[3], args[8])
    )
    y = args[0] if is_backward else operator.outputs[0]
    channels, window = x.shape[1], math.prod(weight.shape[2:])
    if groups == channels > 1 or window == 1 or _is_channels_last(x, weight):
        return 0
    if hypothesis is Workspaces.PATCHES:
        is_strided = any(step > 1 for step in stride)
        return _bytes(y) * window if is_backward and is_strided and groups == 1 else 0

    copies = (Workspaces.COPIES, Workspaces.COPIES_IN_FORWARD)
    if is_backward:
        copies = (Workspaces.COPIES, Workspaces.COPIES_IN_BACKWARD)
    if hypothesis not in copies or not _has_tensor_cores(x, card):
        return 0
    return _bytes(x) + _bytes(y) + _bytes(weight)


def _has_tensor_cores(x: TensorSpec, card: Card | None) -> bool:
    """Return whether the card multiplies this format on tensor cores: fp32 as TF32 from 8.0 on."""
    if card is None or card.compute_capability is None:
        return True
    return card.compute_capability >= ((7, 0) if x.dtype.itemsize == HALF_BYTES else (8, 0))


def _is_channels_last(*specs: TensorSpec) -> bool:
    return any(len(spec.shape) > 3 and spec.shape[1] > 1 and spec.stride[1] == 1 for spec in specs)


def _bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize
