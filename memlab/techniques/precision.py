"""Number formats: as built, casts of the whole model, autocast, TF32, fp8 and loss scaling.

fp8 comes from torchao: linear layers whose sizes are multiples of 16 multiply in fp8 with one scale
for each tensor; everything else is as in bf16-mixed. Left out: how bf16 weights keep small updates,
which is in `optimizers/`.
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any

import torch

from memlab._util.torch_private.tensors import parts_of
from memlab._util.units import format_bytes
from memlab.config import Precision, StepConfig
from memlab.errors import UnsupportedError
from memlab.techniques.batches import is_own_kind, map_tensors, tensors_of
from memlab.techniques.source import BACKWARD, ScriptLines, inlined, together
from memlab.techniques.technique import Control, Equivalence, Refusal, Setup, Technique

# Cast weights to another number format.
#
# It is plain PyTorch, of which exported scripts contain what they call.


def can_be_cast(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds plain real numbers, which can be cast to another format."""
    kind = getattr(tensor, "_kind", type(tensor))  # a fake tensor knows the class of the real one
    # bitsandbytes' 4-bit weights, for instance, may be packed into floats
    is_packed = issubclass(kind, torch.nn.Parameter) and kind is not torch.nn.Parameter
    # torchao's weights wrap integers; a DTensor wraps plain numbers
    is_packed |= hasattr(kind, "__tensor_flatten__") and not hasattr(kind, "to_local")
    return tensor.is_floating_point() and tensor.itemsize > 1 and not is_packed


def cast_weights(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters and buffers of real numbers, in place; quantised ones stay as they are."""
    # model.to(dtype) would drop the imaginary part of a complex buffer
    model._apply(lambda t: t.to(dtype) if can_be_cast(t) else t)


# Find the layers of a model that can multiply in fp8.
#
# It is plain PyTorch, of which exported scripts contain what they call.


def can_be_fp8(module: torch.nn.Module, _: str) -> bool:
    """Return whether a module is a linear layer of sizes that fp8 products allow."""
    if type(module) is not torch.nn.Linear:
        return False
    return module.in_features % 16 == 0 and module.out_features % 16 == 0


AUTOCAST_DTYPE = {
    Precision.BF16_MIXED: torch.bfloat16,
    Precision.FP16_MIXED: torch.float16,
    Precision.FP8_MIXED: torch.bfloat16,
}
CASTS_TO_FP32 = (
    Precision.FP32,
    Precision.TF32,
    Precision.BF16_MIXED,
    Precision.FP16_MIXED,
    Precision.FP8_MIXED,
)
MODEL_DTYPE = {
    Precision.BF16: torch.bfloat16,
    Precision.BF16_MASTER: torch.bfloat16,
    Precision.BF16_STOCHASTIC: torch.bfloat16,
    Precision.FP16: torch.float16,
}
NEEDS_BF16 = (
    Precision.BF16,
    Precision.BF16_MIXED,
    Precision.BF16_MASTER,
    Precision.BF16_STOCHASTIC,
    Precision.FP8_MIXED,
)
TO_FP8 = "convert_to_float8_training(model, module_filter_fn=can_be_fp8)"
ADA = (8, 9)  # compute capability of the first cards with fp8
TF32_REASON = "TF32 needs the tensor cores of Ampere or newer CUDA cards"
FP8_REASON = "fp8 needs the tensor cores of Ada, Hopper or newer CUDA cards"


def refusals(setup: Setup) -> Iterator[Refusal]:
    """Refuse a precision that the device cannot compute in, or whose package is not installed."""
    precision, device, card = setup.config.precision, setup.device, setup.card
    said = f"precision={str(precision)!r}"
    bf16, fp16 = {"precision": Precision.BF16_MIXED}, {"precision": Precision.FP16_MIXED}
    fp32 = {"precision": Precision.FP32}
    if precision is Precision.FP8_MIXED and device.type == "cpu":
        yield Refusal(why=f"{said} on a CPU: {FP8_REASON}", remedies=(bf16,))
    if precision is Precision.TF32 and device.type == "cpu":
        yield Refusal(why=f"{said} on a CPU: {TF32_REASON}", remedies=(fp32, bf16))
    if card is not None and (capability := card.compute_capability):
        if precision is Precision.FP8_MIXED and capability < ADA:
            yield Refusal(why=f"{said} on {card.title}: {FP8_REASON}", remedies=(bf16,))
        if precision is Precision.TF32 and card.is_before_ampere:
            yield Refusal(why=f"{said} on {card.title}: {TF32_REASON}", remedies=(fp32, fp16))
        if precision in NEEDS_BF16 and not card.has_bf16:
            yield Refusal(why=f"{said}: {card.title} has no bfloat16 arithmetic", remedies=(fp16,))

    if precision is Precision.FP8_MIXED and find_spec("torchao") is None:
        yield Refusal(
            why=f"{said} needs torchao, which is not installed",
            remedies=(bf16,),
            otherwise="pip install 'memlab[fp8]'",
        )


def notes(setup: Setup) -> list[str]:
    """Return what a reader of the numbers must know about this precision on this device."""
    precision, device = setup.config.precision, setup.device
    said = []
    if precision is Precision.FP16_MIXED and device.type == "cpu":
        said.append("fp16-mixed on a CPU is many times slower than fp32; bf16-mixed is faster.")
    if precision is Precision.FP16:
        said.append(
            "fp16 has no loss scaler and rounds AdamW's eps (1e-8) to zero: gradients below 6e-8 "
            "vanish, and a weight whose gradient is zero becomes NaN. Use fp16-mixed or bf16."
        )

    if precision is Precision.FP8_MIXED:
        said.append("memlab's tests have not run on an fp8 card, so these numbers are unchecked.")

    return said


def weight_dtype(precision: Precision) -> torch.dtype | None:
    """Return the format that weights are cast to; None if they stay as they were built."""
    return torch.float32 if precision in CASTS_TO_FP32 else MODEL_DTYPE.get(precision)


def number_formats(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the formats of a model's parameters by torch's names, ordered by bytes."""
    sizes = Counter[str]()
    for part in itertools.chain.from_iterable(map(parts_of, model.parameters())):
        sizes[_name(part.dtype)] += part.nbytes
    return tuple(sorted(sizes, key=lambda name: (-sizes[name], name)))


def bytes_of(model: torch.nn.Module, precision: Precision) -> int:
    """Return the bytes of a model's parameters once they are cast for this precision."""
    dtype = weight_dtype(precision)
    return sum(
        p.numel() * dtype.itemsize
        if dtype and can_be_cast(p)
        else sum(part.nbytes for part in parts_of(p))
        for p in model.parameters()
    )


def cast_model(model: torch.nn.Module, precision: Precision) -> list[str]:
    """Cast the model's real parameters and buffers to the format of the weights, in place.

    Returns a note about casts from formats other than fp32; an empty list if there were none.
    """
    dtype = weight_dtype(precision)
    if dtype is None:
        return []

    cast = [
        *_counted("parameter", model.parameters(), dtype),
        *_counted("buffer", model.buffers(), dtype),
    ]
    cast_weights(model, dtype)
    if not cast:
        return []

    return [
        f"precision={str(precision)!r} cast {' and '.join(cast)} to {_name(dtype)}; "
        "precision='as-built' keeps the formats that the model was built in."
    ]


def _counted(noun: str, tensors: Iterable[torch.Tensor], dtype: torch.dtype) -> list[str]:
    """Return in words how many tensors of each format a cast changes, without those in fp32."""
    by_format: dict[torch.dtype, list[int]] = {}
    for tensor in tensors:
        if can_be_cast(tensor) and tensor.dtype not in (dtype, torch.float32):
            by_format.setdefault(tensor.dtype, []).append(tensor.nbytes)

    return [
        f"{len(sizes)} {noun}{'s' * (len(sizes) != 1)} of {_name(found)} "
        f"({format_bytes(sum(sizes))})"
        for found, sizes in by_format.items()
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def multiply_in_fp8(model: torch.nn.Module, *, emulate: bool = False) -> None:
    """Replace the linear layers of a model by torchao's fp8 layers, in place.

    Args:
        model: its parameters stay the same objects.
        emulate: compute in fp32 with values rounded to fp8, on any device.

    Raises:
        UnsupportedError: no layer has sizes that are multiples of 16, which fp8 needs.
    """
    from torchao.float8 import (  # an optional package
        Float8LinearConfig,
        convert_to_float8_training,
    )

    if not any(can_be_fp8(module, "") for module in model.modules()):
        raise UnsupportedError(
            f"precision='fp8-mixed': {type(model).__name__} has no nn.Linear whose sizes are "
            "multiples of 16; use 'bf16-mixed'"
        )

    fp8 = Float8LinearConfig(emulate=emulate)
    convert_to_float8_training(model, config=fp8, module_filter_fn=can_be_fp8)


def batch_notes(batch: Any, precision: Precision) -> list[str]:
    """Return a note about tensors of a batch that `cast_batch` casts and that are not fp32."""
    dtype = weight_dtype(precision)
    if dtype is None or not (cast := _counted("tensor", tensors_of(batch), dtype)):
        return []
    return [
        f"precision={str(precision)!r} cast {' and '.join(cast)} of the batch to {_name(dtype)}."
    ]


def cast_batch(batch: Any, precision: Precision) -> Any:
    """Return the batch with its floating-point tensors in the format of the weights."""
    dtype = weight_dtype(precision)
    if dtype is None:
        return batch
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, batch)


def autocast(config: StepConfig, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return the context of a forward pass: autocast for the mixed formats, otherwise nothing.

    With offloaded weights the cache of autocast is off, because it would hold the casts of all
    weights until the forward ends.
    """
    if config.precision not in AUTOCAST_DTYPE:
        return contextlib.nullcontext()
    dtype = AUTOCAST_DTYPE[config.precision]
    return torch.autocast(device.type, dtype, cache_enabled=not config.offload_parameters)


@contextlib.contextmanager
def matrix_products(precision: Precision) -> Iterator[None]:
    """Multiply fp32 matrices in TF32 if the precision asks for it, in forward and backward."""
    if precision is not Precision.TF32:
        yield
        return

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def make_scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler | None:
    """Return the loss scaler that fp16-mixed needs, else None."""
    return torch.amp.GradScaler(device.type) if precision is Precision.FP16_MIXED else None


TF32_WHY = "# matrix products of fp32 on tensor cores, which read ten bits of each mantissa"
CAST_WHY = "# weights, gradients and optimizer state have this format"
AUTOCAST_WHY = "# matrix products in half precision; weights and sums stay in fp32"
SCALER_WHY = "# small gradients would be zero in fp16, so the loss is scaled up"


def source(setup: Setup) -> ScriptLines:
    """Return the casts, the autocast and the loss scaler of a script.

    `map_tensors` casts batches whose tensors may be inside objects.
    """
    config, precision = setup.config, setup.config.precision
    in_objects = setup.workload is not None and is_own_kind(setup.workload)
    dtype = weight_dtype(precision)
    is_tf32, has_scaler = precision is Precision.TF32, precision is Precision.FP16_MIXED
    is_fp8 = precision is Precision.FP8_MIXED
    called = [*[cast_weights] * bool(dtype), *[can_be_fp8] * is_fp8]
    cache = ", cache_enabled=False" if config.offload_parameters else ""
    context = f"torch.autocast(device.type, {AUTOCAST_DTYPE.get(precision)}{cache})"

    lines = ScriptLines(
        imports=("from torchao.float8 import convert_to_float8_training",) if is_fp8 else (),
        before=(TF32_WHY, 'torch.set_float32_matmul_precision("high")') if is_tf32 else (),
        built=(CAST_WHY, f"cast_weights(model, {dtype})") if dtype else (),
        model=(TO_FP8,) if is_fp8 else (),
        batch=_batch_lines(dtype, in_objects) if dtype else (),
        optimizer=(SCALER_WHY, "scaler = torch.amp.GradScaler(device.type)") if has_scaler else (),
        contexts=(AUTOCAST_WHY, context) if precision in AUTOCAST_DTYPE else (),
        backward=("loss = scaler.scale(loss)", BACKWARD) if has_scaler else (),
        update=("scaler.step(optimizer)", "scaler.update()") if has_scaler else (),
    )
    return together([inlined(*called), lines]) if called else lines


def _batch_lines(dtype: torch.dtype, in_objects: bool) -> tuple[str, ...]:
    """Return the lines of a script that cast the floating-point tensors of `batch`."""
    cast = f"lambda t: t.to({dtype}) if t.is_floating_point() else t"
    why = "# real numbers of the batch get the format of the weights"
    if in_objects:
        return (
            why,
            f"batch = map_tensors({cast}, batch)",
        )
    return (why, "batch = tree_map_only(", f"    torch.Tensor, {cast}, batch", ")")


PRECISION = Technique(
    fields=("precision",),
    equivalence=Equivalence.NUMERICAL,
    examples={
        name: {"precision": name}
        for name in ("bf16-mixed", "fp16-mixed", "bf16", "bf16-master", "bf16-stochastic")
    },
    refusals=refusals,
    source=source,
    notes=notes,
    controls=(Control(field="precision", label="Precision"),),
    may_be_faster=True,
)
