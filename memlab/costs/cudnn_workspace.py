"""Workspace of cuDNN's convolutions, by a rule, since cuDNN does not publish it.

PyTorch asks cuDNN's heuristics for a plan and allocates the workspace that it wants
(ATen/native/cudnn/Conv_v8.cpp, `benchmark` off). If there is not enough memory, the next plan is
tried, so a step can run with less than is predicted here. On tensor cores cuDNN computes in
channels-last. Given contiguous (NCHW) tensors, it copies input, output and weight to that layout in
its workspace.

In which pass it copies was decided with the 25 convnets of `benchmarks/gpu_peaks.py` (torch 2.6,
cuDNN 9, fp32 with TF32, RTX 3060 and 4060): one yes or no each for forward and backward of dense
and of grouped kernels larger than 1x1. Only VGG16 decided the dense ones (errors -3.3 to -0.8 %
instead of -3.1 to 4.8 %; ResNet-101 fits both), and only RegNetX the grouped ones (-1.3 to 2.3 %
instead of -4.5 to -0.1 %). 1x1 convolutions are matrix products, and depthwise ones use PyTorch's
own kernels; both take no workspace (with copies MnasNet and MobileNetV2 would be 6 to 15 % too
high).

One more plan is known only by its size: the gradient of the weight of a first, strided 3x3 layer
takes a patch of R x S values for each output value, on compute capability 8.6 and for inputs below
2**23 values. It was found on four runs of MobileNetV2 and MnasNet, which are 12 to 18 % too low
without it and 0.2 to 2.3 % too high with it. The runs of either model predict those of the other,
and seven larger runs of both and four of RegNetX with the same layer confirm the limits. Why cuDNN
prefers this plan is not known.
"""

from __future__ import annotations

import math

from memlab.devices.cards import Card
from memlab.operators.signatures import TensorSpec
from memlab.recording.recording import Operator

HALF_BYTES = 2
FIRST_LAYER_CHANNELS = 4  # images: tensor-core kernels pad three channels to four
PATCH_PLAN_CAPABILITY = (8, 6)
PATCH_PLAN_BELOW = 2**23  # values in the input


def convolution_bytes(operator: Operator, card: Card | None) -> int:
    """Return the workspace of an `aten::convolution` or an `aten::convolution_backward`.

    Args:
        operator: with a signature.
        card: None for a card with tensor cores for every format.
    """
    assert operator.signature is not None
    args = operator.signature[1]
    is_backward = operator.name.endswith("backward")
    x, weight, stride, groups = (
        (args[1], args[2], args[4], args[9])
        if is_backward
        else (args[0], args[1], args[3], args[8])
    )

    y = args[0] if is_backward else operator.outputs[0]
    channels, window = x.shape[1], math.prod(weight.shape[2:])
    if groups == channels > 1 or window == 1 or _is_channels_last(x, weight):
        return 0
    if channels <= FIRST_LAYER_CHANNELS:
        takes = is_backward and _takes_patches(x, weight, stride, card)
        return _bytes(y) * window if takes else 0
    if not _has_tensor_cores(x, card) or is_backward != (groups > 1):
        return 0

    return _bytes(x) + _bytes(y) + _bytes(weight)


def _takes_patches(
    x: TensorSpec, weight: TensorSpec, stride: tuple[int, ...], card: Card | None
) -> bool:
    is_strided_3x3 = weight.shape[2:] == (3, 3) and set(stride) == {2}
    is_card = card is not None and card.compute_capability == PATCH_PLAN_CAPABILITY
    return is_card and is_strided_3x3 and math.prod(x.shape) < PATCH_PLAN_BELOW


def _has_tensor_cores(x: TensorSpec, card: Card | None) -> bool:
    """Return whether the card multiplies this format on tensor cores: fp32 as TF32 from 8.0 on."""
    if card is None or card.compute_capability is None:
        return True
    return card.compute_capability >= ((7, 0) if x.dtype.itemsize == HALF_BYTES else (8, 0))


def _is_channels_last(*specs: TensorSpec) -> bool:
    return any(len(spec.shape) > 3 and spec.shape[1] > 1 and spec.stride[1] == 1 for spec in specs)


def _bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize
