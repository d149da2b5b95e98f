"""Cast weights to another number format.

This file imports nothing from memlab, because an exported script contains a copy of it.
"""

import torch


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
