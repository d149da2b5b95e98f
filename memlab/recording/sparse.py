"""Sparse gradients over fake tensors.

A sparse tensor has no memory of its own: it holds a tensor of indices and a tensor of values. A
fake sparse tensor does not hold them, so they are stored with it here. The operators that a step
with SGD runs on sparse tensors are called as the dense operators that their kernels consist of, so
that each is recorded and has a cost. The sum of two sparse tensors is as long as both together, so
a sum over micro-batches, or a momentum over steps, grows. Left out: all other operators, such as
merging equal indices (`coalesce`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from memlab.errors import UnsupportedError
from memlab.recording.faking import accumulates_in_place
from memlab.recording.values import Values, for_real, tensors_in
from memlab.torch_private.autograd import current_node
from memlab.torch_private.tensors import indices_of

aten = torch.ops.aten
MAKES = aten._sparse_coo_tensor_with_dims_and_tensors.default
BAG = aten._embedding_bag_backward.default
# autograd calls the parts of these operators instead, but not inside the backward of a bag
COMPOSITES = (aten.embedding_sparse_backward.default, aten._sparse_coo_tensor_unsafe.default)
IS_SPARSE = 9  # the position of that argument of a bag's backward


def are_sparse(tree: Any) -> bool:
    """Return whether any of these tensors is not strided."""
    return any(tensor.layout is not torch.strided for tensor in tensors_in(tree))


class Sparse:
    """The sparse tensors of one attempt.

    Attributes:
        has_sums: whether two of them were added; the size of a sum depends on values.

    Args:
        values: the known values of dense tensors.
        device_type: where the step runs; CPU and CUDA kernels add in different ways.
        assume: called with what the run does, what is assumed, and what that decides.
        place: returns where the run is.
    """

    def __init__(
        self,
        values: Values,
        device_type: str,
        assume: Callable[[str, str, str], None],
        place: Callable[[], object],
    ) -> None:
        self._values = values
        self._device_type = device_type
        self._assume = assume
        self._place = place
        self._has_any = False
        self.has_sums = False
        self._runs: dict[Any, Callable[..., Any]] = {
            BAG: _bag_backward,
            **{func: func.decompose for func in COMPOSITES},
            aten._indices.default: lambda x: x.parts[0].detach(),
            aten._values.default: lambda x: x.parts[1].detach(),
            aten._nnz.default: lambda x: x.parts[1].shape[0],
            aten.is_coalesced.default: lambda _: False,
            aten.detach.default: lambda x: self._of(x, *x.parts),
            aten.clone.default: self._clone,
            aten.add.Tensor: self._add,
            aten.add_.Tensor: self._add_in_place,
            aten.mul_.Tensor: self._scale_in_place,
            # kernels for lists leave sparse tensors to those for one
            aten._foreach_mul_.Scalar: self._scale_each,
            aten._foreach_add_.List: self._add_to_each,
        }

    def concerns(self, func: Any, args: Sequence[Any]) -> bool:
        """Return whether an operator takes a sparse tensor, or makes one of its own."""
        makes_one = func in COMPOSITES or (func is BAG and args[IS_SPARSE])
        return makes_one or (self._has_any and are_sparse(args))

    def made(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return a sparse tensor that holds its parts until it is given others.

        PyTorch's own fake sparse tensor would hold its parts forever, so it gets other tensors of
        the same sizes.
        """
        sparse_dim, dense_dim, shape, indices, values = args[:5]
        if sparse_dim != 1:
            raise self.refusal(MAKES)
        likes = torch.empty_like(indices), torch.empty_like(values)
        made = MAKES(sparse_dim, dense_dim, shape, *likes, *args[5:], **kwargs)
        made.parts = indices, values
        self._has_any = True
        return made

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operator by calling dense operators instead of it."""
        if func not in self._runs:
            raise self.refusal(func)
        with torch.no_grad():
            return self._runs[func](*args, **kwargs)

    def refusal(self, func: Any) -> UnsupportedError:
        """Return the error for an operator whose bytes are not known here."""
        return UnsupportedError(
            f"{self._place()}: a prediction does not know how many bytes {func} takes with sparse "
            "tensors; it only supports sparse gradients that SGD adds to a weight. Use dense "
            "gradients (nn.Embedding and nn.EmbeddingBag with sparse=False), or memlab.measure"
        )

    def _of(self, like: Any, indices: Any, values: Any) -> Any:
        """Return a sparse tensor of the same shape that holds these."""
        options = {"dtype": like.dtype, "layout": like.layout, "device": like.device}
        return MAKES(1, like.dim() - 1, list(like.shape), indices, values, **options)

    def _clone(self, x: Any, memory_format: Any = None) -> Any:
        """Return a copy, except where autograd would not copy a real gradient.

        Autograd does not copy a gradient that nothing else refers to. It copies a fake one, because
        Python always holds a reference to it.
        Source: `accumulateGrad` in torch/csrc/autograd/functions/accumulate_grad.h.
        """
        node = current_node()
        is_first = node is not None and node.name().endswith("AccumulateGrad")
        if is_first and all(part.is_contiguous() for part in x.parts):
            return self._of(x, *x.parts)
        indices, values = x.parts
        return self._of(x, indices.clone(), values.clone())

    def _add(self, x: Any, other: Any, alpha: float = 1) -> Any:
        if not are_sparse(x):
            result = x if accumulates_in_place((x, other)) else x.clone()
            return _scattered(result, other, alpha)
        if not are_sparse(other) or alpha != 1:
            raise self.refusal(aten.add.Tensor)
        return self._of(x, *self._sum(x, other))

    def _add_in_place(self, x: Any, other: Any, alpha: float = 1) -> Any:
        if not are_sparse(x):
            return _scattered(x, other, alpha)
        if not are_sparse(other) or alpha != 1:
            raise self.refusal(aten.add_.Tensor)
        x.parts = self._sum(x, other)
        return x

    def _scale_in_place(self, x: Any, factor: Any) -> Any:
        if isinstance(factor, torch.Tensor):
            raise self.refusal(aten.mul_.Tensor)
        x.parts[1].mul_(factor)
        return x

    def _scale_each(self, tensors: Sequence[Any], factor: Any) -> None:
        for x in tensors:
            x.mul_(factor)

    def _add_to_each(self, tensors: Sequence[Any], others: Sequence[Any], alpha: float = 1) -> None:
        for x, other in zip(tensors, others, strict=True):
            x.add_(other, alpha=alpha)

    def _sum(self, x: Any, other: Any) -> tuple[Any, Any]:
        """Return indices and values of both; equal indices are kept apart.

        Source: `add_out_sparse_cpu` in ATen/native/sparse/SparseTensorMath.cpp, and
        `add_out_sparse_cuda` in ATen/native/sparse/cuda/SparseCUDATensorMath.cu.
        """
        self.has_sums = True
        (indices, values), (new_indices, new_values) = x.parts, other.parts
        most = values.shape[0] + new_values.shape[0]
        are_contiguous = values.is_contiguous() and new_values.is_contiguous()
        if self._device_type == "cpu" and are_contiguous:
            # the kernel allocates for all rows; if two have the same index, the end stays unused
            room = indices.new_empty((1, most)), values.new_zeros((most, *values.shape[1:]))
            merged = self._merged(x.shape[0], indices, new_indices)
            count = most if merged is None else merged.shape[1]
            summed = room if count == most else (room[0][:, :count], room[1][:count])
            if merged is not None:
                self._values.learn(summed[0], merged)

            return summed

        if most > x.numel():  # both kernels then merge equal indices
            raise self.refusal(aten.add_.Tensor)

        return torch.cat([indices, new_indices], 1), torch.cat([values, new_values])

    def _merged(self, rows: int, first: Any, second: Any) -> torch.Tensor | None:
        """Return the indices of a sum on a CPU, (1, count), None where they are not known."""
        known = [self._values.of(indices) for indices in (first, second)]
        certain = [indices for indices in known if indices is not None]
        if len(certain) < len(known):
            self._assume(
                "sparse gradients are added",
                "assumed that no two rows have the same index",
                "value",
            )
            return None

        with for_real():
            a, b = (
                torch.sparse_coo_tensor(indices, torch.zeros(indices.shape[1], 1), (rows, 1))
                for indices in certain
            )
            return indices_of(a + b).clone()


def _scattered(dense: Any, x: Any, alpha: float) -> Any:
    """Add a sparse tensor to a dense one like CUDA's kernel; a CPU's takes as many bytes."""
    indices, values = x.parts
    dense.index_add_(0, indices[0], values, alpha=alpha)
    return dense


def _bag_backward(
    gradient: Any, indices: Any, offsets: Any, bag_of: Any, sizes: Any, _: Any, *rest: Any
) -> Any:
    """Return the sparse gradient of an embedding bag, by the operators that it consists of.

    Source: `_embedding_bag_backward` in ATen/native/EmbeddingBag.cpp.
    """
    rows, scale, mode, _, weights, *padding = rest
    if indices.numel() and not bag_of.numel():  # a sum on a CPU has not needed it
        counts = offsets.new_zeros(indices.shape[0] + 1)
        counts.index_add_(0, offsets, torch.ones_like(offsets))
        bag_of = counts.cumsum(0)[:-1]
        del counts  # the kernel holds their sums alone

    backward = aten._embedding_bag_sparse_backward.default
    return backward.decompose(
        gradient, indices, offsets, bag_of, sizes, rows, scale, mode, weights, *padding
    )
