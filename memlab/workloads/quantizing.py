"""Quantize the linear layers of a model, as transformers does when it loads one.

With bitsandbytes the new layers hold the weights as they were until the model is moved to a device;
the move quantizes them. torchao quantizes at once. Output embeddings, and weights that they are
tied to, keep their number format.

Left out: torchao's weights in 4 bits. Their kernels have no backward, so that nothing below them
can be trained.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from memlab.errors import UnsupportedError, WorkloadError
from memlab.workloads.data import zoo_import

FOUR_BIT = ("nf4", "fp4")
FOUR_BIT_FROM = (torch.bfloat16, torch.float16, torch.float32)
WEIGHT_ONLY = {
    "int8-weight-only": "Int8WeightOnlyConfig",
    "fp8-weight-only": "Float8WeightOnlyConfig",
}  # torchao's
QUANTIZED = (*FOUR_BIT, "int8", *WEIGHT_ONLY)
OUTLIERS_ABOVE = 6.0  # llm_int8_threshold of transformers' BitsAndBytesConfig


finetune_import = partial(zoo_import, extra="finetune")


def quantize_linear_layers(model: Any, base: str, is_double: bool, label: str) -> None:
    """Replace the linear layers of a model of transformers by quantized ones, in place.

    Args:
        model: its weights are in the number format in which the layers will multiply.
        base: one of `QUANTIZED`.
        is_double: whether the scales of 4-bit weights are quantized too.
        label: the model's name, for the message.

    Raises:
        WorkloadError: no layer can be quantized, or one has weights in another number format.
    """
    transposed = finetune_import("transformers.pytorch_utils").Conv1D
    found = _linear_layers_of(model)
    if not found:
        kinds = sorted({type(layer).__name__ for layer in model.modules() if _has_own(layer)})
        raise WorkloadError(
            f"base={base!r} quantizes torch.nn.Linear layers, and {label} has none besides its "
            f"head: its parameters are in {', '.join(kinds)}; allowed for it are bf16, fp16, fp32"
        )
    if base in WEIGHT_ONLY:
        _quantize_weights(model, found, base, transposed)
        return
    _check_formats(found, base, label)
    modules = finetune_import("bitsandbytes.nn")
    for path, layer in found:
        model.set_submodule(path, _quantized(modules, layer, base, is_double, transposed))
    # peft reads this, and puts the layers that it has for bitsandbytes around those of a base
    setattr(model, "is_loaded_in_4bit" if base in FOUR_BIT else "is_loaded_in_8bit", True)


def loading_of(model: Any, base: str, is_double: bool, label: str) -> tuple[str, dict[str, Any]]:
    """Return what has transformers quantize a base when it loads one: a config, and its values.

    Args:
        model: on the meta device, not quantized; some of its layers may be replaced.
        base: one of `QUANTIZED`.
        is_double: whether the scales of 4-bit weights are quantized too.
        label: the model's name, for the message.

    Raises:
        UnsupportedError: transformers would quantize other layers than `quantize_linear_layers`.
    """
    name, values = _loading_arguments(base, is_double)
    own = {path for path, _ in _linear_layers_of(model)}
    kinds = {path: type(layer).__name__ for path, layer in model.named_modules()}
    how = getattr(finetune_import("transformers"), name)(**values)
    quantizer = finetune_import("transformers.quantizers").AutoHfQuantizer.from_config(how)
    quantizer.preprocess_model(model=model, device_map={"": "cpu"}, dtype=torch.bfloat16)
    loaded = {
        path
        for path, layer in model.named_modules()
        if isinstance(getattr(layer, "weight", None), nn.Parameter)
        and quantizer.param_needs_quantization(model, f"{path}.weight")
    }
    for path in sorted(own ^ loaded):
        does = "leaves as it is" if path in own else "quantizes too"
        raise UnsupportedError(
            f"base={base!r} of {label} cannot be exported: a script loads it by from_pretrained, "
            f"which {does} {path} ({kinds.get(path, 'a layer that it makes')}); use a base of "
            "bf16, fp16 or fp32"
        )
    return name, values


def _loading_arguments(base: str, is_double: bool) -> tuple[str, dict[str, Any]]:
    if base in WEIGHT_ONLY:
        torchao = zoo_import("torchao.quantization", extra="fp8")
        how = getattr(torchao, WEIGHT_ONLY[base])(set_inductor_config=False)
        return "TorchAoConfig", {"quant_type": how}
    if base not in FOUR_BIT:
        return "BitsAndBytesConfig", {"load_in_8bit": True}
    return "BitsAndBytesConfig", {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": base,
        "bnb_4bit_use_double_quant": is_double,
        "bnb_4bit_compute_dtype": torch.bfloat16,
    }


def _linear_layers_of(model: Any) -> list[tuple[str, Any]]:
    """Return the linear layers that are quantized, with their paths: all but the head."""
    transposed = finetune_import("transformers.pytorch_utils").Conv1D
    heads = {id(head) for head in (model.get_output_embeddings(),) if head is not None}
    kept = {id(parameter) for head in model.modules() if id(head) in heads
            for parameter in head.parameters()}  # fmt: skip
    return [
        (path, layer)
        for path, layer in model.named_modules()
        if type(layer) in (nn.Linear, transposed) and id(layer.weight) not in kept
    ]


def _quantize_weights(model: Any, found: list[tuple[str, Any]], base: str, transposed: Any) -> None:
    """Have torchao replace the weights of these layers by integers or fp8, and their scales."""
    torchao = zoo_import("torchao.quantization", extra="fp8")
    how = getattr(torchao, WEIGHT_ONLY[base])(set_inductor_config=False)
    for path, layer in found:
        made = layer
        if isinstance(layer, transposed):
            inputs, outputs = layer.weight.shape
            made = nn.Linear(inputs, outputs, bias=layer.bias is not None, device="meta")
            made.weight, made.bias = nn.Parameter(layer.weight.detach().t()), layer.bias
            model.set_submodule(path, made)
        torchao.quantize_(made.requires_grad_(False), how)


def _check_formats(found: Sequence[tuple[str, Any]], base: str, label: str) -> None:
    """Raise WorkloadError if bitsandbytes refuses the weights of a layer.

    It says so itself, but only when the model is moved, and without the layer's name.
    """
    for path, layer in found:
        if base in FOUR_BIT and layer.weight.dtype not in FOUR_BIT_FROM:
            raise WorkloadError(
                f"base={base!r} cannot quantize {path} of {label}: its weights are "
                f"{layer.weight.dtype}, and bitsandbytes takes bfloat16, float16 and float32; "
                "build that layer in one of these, or pass a base of bf16, fp16 or fp32"
            )


def _has_own(layer: nn.Module) -> bool:
    return next(layer.parameters(recurse=False), None) is not None


def _quantized(modules: Any, layer: Any, base: str, is_double: bool, transposed: type) -> nn.Module:
    weight = layer.weight
    if isinstance(layer, transposed):  # GPT-2 keeps its weights as (inputs, outputs)
        weight = nn.Parameter(weight.detach().t().contiguous(), False)
    bias = layer.bias
    made: nn.Module
    sizes = weight.shape[1], weight.shape[0], bias is not None
    if base in FOUR_BIT:
        made = modules.Linear4bit(
            *sizes, weight.dtype, compress_statistics=is_double, quant_type=base, device="meta"
        )
        how = {"compress_statistics": is_double, "quant_type": base, "module": made}
        made.weight = modules.Params4bit(weight.detach(), False, **how)
    else:
        how = {"has_fp16_weights": False}
        made = modules.Linear8bitLt(*sizes, **how, threshold=OUTLIERS_ABOVE, device="meta")
        made.weight = modules.Int8Params(weight.detach(), False, **how)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach(), False)
    return made.requires_grad_(False)
