"""Which weights another number format holds as well, and the cast of these.

An exported script holds this file as it stands, so it imports nothing of memlab.
"""

import torch


def can_be_cast(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds plain real numbers, which another format holds as well."""
    kind = getattr(tensor, "_kind", type(tensor))  # a fake tensor knows what it stands for
    # such as bitsandbytes' 4-bit weights, which may be packed into floats
    is_packed = issubclass(kind, torch.nn.Parameter) and kind is not torch.nn.Parameter
    return tensor.is_floating_point() and tensor.itemsize > 1 and not is_packed


def cast_weights(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters and buffers of real numbers, in place; quantised ones stay as they are."""
    # not model.to(dtype), which takes the imaginary part off a complex buffer
    model._apply(lambda t: t.to(dtype) if can_be_cast(t) else t)
