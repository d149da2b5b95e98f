"""Number formats: autocast over fp32 weights, whole-model casts, and the loss scaler of fp16."""

import contextlib
from typing import Any

import torch
from torch.utils import _pytree as pytree

from memlab.config import Precision, StepConfig
from memlab.errors import UnsupportedError
from memlab.techniques.source import BACKWARD, Source

AUTOCAST_DTYPE = {Precision.BF16_MIXED: torch.bfloat16, Precision.FP16_MIXED: torch.float16}
MODEL_DTYPE = {Precision.BF16: torch.bfloat16}
NOT_BUILT = {Precision.TF32: Precision.FP32, Precision.FP16: Precision.FP16_MIXED}


def check(precision: Precision, device: torch.device) -> None:
    """Raise UnsupportedError where this precision is not built or the device cannot do it."""
    if precision in NOT_BUILT:
        raise UnsupportedError(
            f"precision={str(precision)!r} is not built yet; use {str(NOT_BUILT[precision])!r}"
        )
    wants_bf16 = precision in (Precision.BF16_MIXED, Precision.BF16)
    if wants_bf16 and device.type == "cuda" and not _cuda_has_bf16(device):
        raise UnsupportedError(
            f"precision={str(precision)!r}: {torch.cuda.get_device_name(device)} has no bfloat16 "
            "arithmetic; use 'fp16-mixed'"
        )


def notes(precision: Precision, device: torch.device) -> list[str]:
    """Return what a reader of the numbers must know about this precision on this device."""
    if precision is Precision.FP16_MIXED and device.type == "cpu":
        return ["fp16-mixed on a CPU is many times slower than fp32; bf16-mixed is the fast one."]
    return []


def cast_model(model: torch.nn.Module, precision: Precision) -> None:
    """Give the model's real parameters and buffers the format of the weights, in place."""
    dtype = MODEL_DTYPE.get(precision, torch.float32)
    # not model.to(dtype), which takes the imaginary part off a complex buffer
    model._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)


def cast_batch(batch: Any, precision: Precision) -> Any:
    """Return the batch with its floating-point tensors in the format of the weights."""
    dtype = MODEL_DTYPE.get(precision, torch.float32)
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, batch
    )


def autocast(
    precision: Precision, device: torch.device
) -> contextlib.AbstractContextManager[object]:
    """Return the context of a forward pass: autocast for the mixed formats, else nothing."""
    if precision not in AUTOCAST_DTYPE:
        return contextlib.nullcontext()
    return torch.autocast(device.type, AUTOCAST_DTYPE[precision])


def make_scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler | None:
    """Return the loss scaler that fp16-mixed needs, else None."""
    return torch.amp.GradScaler(device.type) if precision is Precision.FP16_MIXED else None


def source(config: StepConfig) -> Source:
    """Return the casts, the autocast and the loss scaler of a script."""
    precision = config.precision
    dtype = MODEL_DTYPE.get(precision, torch.float32)
    cast = {torch.float32: "float()", torch.bfloat16: "bfloat16()"}[dtype]
    has_scaler = precision is Precision.FP16_MIXED
    autocast = f"torch.autocast(device.type, {AUTOCAST_DTYPE.get(precision)})"
    return Source(
        model=(f"model.{cast}",),
        batch=(
            "batch = tree_map_only(",
            f"    torch.Tensor, lambda t: t.to({dtype}) if t.is_floating_point() else t, batch",
            ")",
        ),
        optimizer=("scaler = torch.amp.GradScaler(device.type)",) if has_scaler else (),
        contexts=(autocast,) if precision in AUTOCAST_DTYPE else (),
        backward=("loss = scaler.scale(loss)", BACKWARD) if has_scaler else (),
        update=("scaler.step(optimizer)", "scaler.update()") if has_scaler else (),
    )


def _cuda_has_bf16(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
