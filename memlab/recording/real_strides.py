"""The strides of outputs of CPU kernels, for operators whose fake outputs have other strides.

For instance, a batch norm over a transposed input returns a contiguous tensor on a CPU, but its
fake output is transposed like the input. A later `.contiguous()` then copies in one run and not in
the other, so whole tensors would be missed. Therefore an operator with a non-contiguous input runs
once for real, on ones or on a part of them. Only the order of its outputs' dimensions is used. Left
out: outputs with gaps, formats and sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from memlab.operators.signatures import Signature, tensors_of
from memlab.operators.standalone import as_in_training, prepare, smaller, tensors_in
from memlab.recording.values import for_real
from memlab.torch_private import pytree
from memlab.torch_private.operators import schema_of

aten = torch.ops.aten
MOST_BYTES = 2**22  # of all arguments; a larger call runs on a part of them
# outputs that are always contiguous; these operators often have a transposed weight
CONTIGUOUS = frozenset(
    (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
)

Order = tuple[int, ...]  # dimensions, from the largest stride to the smallest


def as_on_cpu(func: Any, signature: Signature, out: Any) -> Any:
    """Return an operator's fake outputs with the order of dimensions that a CPU gives them."""
    if func in CONTIGUOUS or schema_of(func).is_mutable or torch.Tag.pointwise in func.tags:
        return out

    specs = [spec for spec in tensors_of(signature) if len(spec.stride) == len(spec.shape)]
    # dimensions of size one count too: their strides show whether an image is channels last
    if all(spec.stride == _strides(spec.shape, range(len(spec.shape))) for spec in specs):
        return out

    orders = _orders(signature)
    if len(orders) != len(tensors_in(out)):
        return out

    each = iter(orders)
    return pytree.tree_map_only(torch.Tensor, lambda fake: _ordered(fake, next(each)), out)


@functools.lru_cache(maxsize=4096)
def _orders(signature: Signature) -> tuple[Order | None, ...]:
    """Return the order of each output of a real run, None of one with gaps; none if it fails."""
    nbytes = sum(spec.nbytes for spec in tensors_of(signature))
    try:
        if nbytes > MOST_BYTES:
            largest = max(tensors_of(signature), key=lambda spec: spec.nbytes)
            # at least two rows, since the stride of a dimension of size one shows nothing
            part = smaller(signature, max(MOST_BYTES / nbytes, 2 / max(2, largest.shape[0])))
            signature = signature if part is None else part[0]

        with for_real(), as_in_training():
            return tuple(_order_of(tensor) for tensor in tensors_in(prepare(signature)()()))
    except Exception:  # an operator that cannot run alone keeps its fake strides
        return ()


def _order_of(tensor: torch.Tensor) -> Order | None:
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride()[dim], dim)))
    return order if _matches(tensor.shape, tensor.stride(), order) else None


def _ordered(fake: torch.Tensor, order: Order | None) -> torch.Tensor:
    """Return a fake tensor whose dimensions lie in memory in this order."""
    if order is None or len(order) != fake.dim() or not fake.numel():
        return fake
    strides = _strides(fake.shape, order)
    return fake if fake.stride() == strides else fake.new_empty_strided(fake.shape, strides)


def _matches(shape: Sequence[int], stride: Sequence[int], order: Sequence[int]) -> bool:
    """Return whether a tensor is dense and its dimensions lie in this order."""
    wanted = _strides(shape, order)
    return all(n == 1 or a == b for n, a, b in zip(shape, stride, wanted, strict=True))


def _strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    strides, step = [1] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(1, shape[dim])
    return tuple(strides)
