"""Correct what PyTorch and libraries do differently with fake tensors.

Autograd never adds to a fake gradient in place. A module of fake tensors cannot be converted to
another device or dtype in place. Optimizers do not use their foreach implementation, and
Transformers builds masks that it would skip. Each of these changes what a step allocates.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from memlab._util.torch_private.tensors import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    are_tensors_fake,
    buffers_of,
    convert,
    converted_by,
    current_node,
    foreach_types,
    found_as,
    indices_of,
    innermost_saved_tensors_hooks,
    num_holders_of_storage,
    num_references,
    parameters_of,
    parts_of,
    remember_constant,
    storage_key,
    unset_fake_temporarily,
    without_python,
)
from memlab.errors import UnsupportedError
from memlab.tracing.fakify import (
    Changed,
    as_own_format,
    attributes_of,
    carried,
    follow,
    kind_of,
    place_in_memory,
)
from memlab.tracing.values import Values, for_real, tensors_in

aten = torch.ops.aten

_PICKS = ("Max", "Min", "Kthvalue", "Mode", "Median", "Nanmedian", "Sort", "Topk")
# what PyTorch runs in a backward to write into a tensor that the backward has made, and where
WRITES: dict[Any, tuple[Any, tuple[str, ...]]] = {
    aten.index_add.default: (aten.index_add_.default, ("IndexSelect",)),
    aten.scatter_add.default: (aten.scatter_add_.default, ("Gather", "Cummax", "Cummin")),
    aten.scatter.src: (aten.scatter_.src, _PICKS),
    aten.put.default: (aten.put_.default, ("Take",)),
    aten.index_fill.int_Tensor: (aten.index_fill_.int_Tensor, ("Trace",)),
    aten.masked_fill.Scalar: (aten.masked_fill_.Scalar, ("Atan2",)),
    aten.sub.Tensor: (aten.sub_.Tensor, ("BinaryCrossEntropyWithLogits",)),
    aten.mul.Tensor: (
        aten.mul_.Tensor, ("BinaryCrossEntropyWithLogits", "BinaryCrossEntropy"),
    ),
}  # fmt: skip


class _NoFakeTensor:
    """The class that libraries find under the name `FakeTensor`."""


@contextlib.contextmanager
def unnoticed() -> Iterator[None]:
    """Make libraries treat fake tensors like real ones (Transformers' masks, for instance)."""
    with found_as(_NoFakeTensor):
        foreach_types.append(FakeTensor)
        try:
            yield
        finally:
            foreach_types.remove(FakeTensor)


@contextlib.contextmanager
def read_as(
    number_of: Callable[[Any], Any], values_of: Callable[[Any], torch.Tensor]
) -> Iterator[None]:
    """Let Python read fake tensors: as a text, a list, or an array of NumPy.

    Args:
        number_of: returns the number to write into a text, such as the name of a module.
        values_of: returns a real tensor of the same shape and format.
    """

    def as_text(self: Any, spec: str) -> str:
        return object.__format__(self, spec) if self.dim() else format(number_of(self), spec)

    def as_array(self: Any, *, force: bool = False) -> Any:
        tensor = self.detach().cpu() if force else self
        if tensor.requires_grad:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() "
                "instead."
            )
        if tensor.device.type != "cpu":
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the "
                "tensor to host memory first."
            )
        real = values_of(tensor)
        with unset_fake_temporarily(), without_python():
            return real.numpy()

    def as_list(self: Any) -> Any:
        if not self.dim():
            return self.item()
        real = values_of(self)
        with unset_fake_temporarily(), without_python():
            return real.tolist()

    own: Any = FakeTensor
    read = {"__format__": as_text, "numpy": as_array, "tolist": as_list}
    for name, method in read.items():
        setattr(own, name, method)
    try:
        yield
    finally:
        for name in read:
            delattr(own, name)


@contextlib.contextmanager
def copied_as_fakes() -> Iterator[None]:
    """Make `copy.deepcopy` of a module with real tensors return fake ones.

    If PyTorch knows the value of a fake tensor, the copy gets a copy of that value.
    """
    deepcopy = torch.Tensor.__deepcopy__

    def new_deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        if isinstance(self, FakeTensor) and self.constant is not None and id(self) not in memo:
            with unset_fake_temporarily(), without_python():
                memo[id(self.constant)] = self.constant.clone()
            copied = deepcopy(self, memo)  # type: ignore[no-untyped-call]
            # PyTorch then forgets the value when the copy is changed in place
            remember_constant(copied)
            return copied

        if type(self) is not torch.Tensor or not self.is_leaf:
            return deepcopy(self, memo)  # type: ignore[no-untyped-call]

        if id(self) not in memo:
            memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)

        return memo[id(self)]

    torch.Tensor.__deepcopy__ = new_deepcopy  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.__deepcopy__ = deepcopy  # type: ignore[method-assign]


@contextlib.contextmanager
def replaced_parameters(mode: FakeTensorMode) -> Iterator[None]:
    """Convert modules by making new parameters, since fake ones cannot be converted in place."""
    replaced: Changed = {}  # tied parameters stay tied
    depth = 0

    def new_apply(apply: Callable[..., Any], self: Any, fn: Any, recurse: bool) -> Any:
        nonlocal depth
        if not are_tensors_fake():  # a model that is built for real
            return apply(self, fn, recurse)

        depth += 1
        try:
            for child in self.children() if recurse else ():
                convert(child, fn)

            parameters, buffers = parameters_of(self), buffers_of(self)
            for name, old in parameters.items():
                if old is not None:
                    parameters[name] = _converted(old, fn, mode, replaced)

            for name, buffer in buffers.items():
                if buffer is not None:
                    buffers[name] = fn(buffer)
        finally:
            depth -= 1
            if not depth:
                follow(self, replaced)
                replaced.clear()

        return self

    with converted_by(new_apply):
        yield


def _converted(parameter: Any, fn: Any, mode: FakeTensorMode, replaced: Changed) -> Any:
    """Return the parameter itself if `fn` does not change it, otherwise a new one.

    Attributes that were set on the parameter are set on the new one, as in a conversion in place.
    Tensors in these attributes are converted by `fn` too. One that is the parameter's own memory,
    as in 8-bit weights of bitsandbytes, stays so.
    """
    if id(parameter) in replaced:
        return replaced[id(parameter)][1]

    is_fake = all(isinstance(part, FakeTensor) for part in parts_of(parameter))
    with torch.no_grad():
        data = parameter if is_fake else mode.from_tensor(parameter)
        new: torch.Tensor = fn(data)

    result = parameter if new is parameter else torch.nn.Parameter(new, parameter.requires_grad)
    replaced[id(parameter)] = (parameter, result)
    if result is not parameter and isinstance(parameter, FakeTensor):
        with torch.no_grad():
            memory = place_in_memory(parameter)

            def converted(tensor: torch.Tensor) -> torch.Tensor:
                return new if place_in_memory(tensor) == memory else fn(tensor)

            vars(result).update(carried(attributes_of(parameter), converted, replaced))
        as_own_format(result, kind_of(parameter))

    return result


def as_for_real(func: Any, args: Any) -> tuple[Any, Any]:
    """Return the operator and the arguments that a backward would have if tensors were real.

    For a subclass of Tensor the backward of `x[index]`, for instance, makes a copy of its zeros to
    add to, and fake tensors are one.
    Source: `isTensorSubclassLike` in ATen/native/TensorAdvancedIndexing.cpp, ReduceOps.cpp and
    torch/csrc/autograd/FunctionsManual.cpp. Left out: formulas that ask for values when tensors are
    real, as those of `prod` and `cumprod` do.
    """
    node = current_node()
    if node is None:
        return func, args
    of, _, _ = node.name().partition("Backward")
    if func is aten.index_put.default and of == "Index":
        return aten._index_put_impl_.default, (*args[:3], True, True)
    writing, backwards = WRITES.get(func, (func, ()))
    if of not in backwards:
        return func, args
    uses, holders = uses_of_own_gradient()
    if func is aten.mul.Tensor and _uses(args[0]) > (uses + 1, holders):
        return func, args  # weights of positives times the target: the weights stay as they are
    return writing, args


def accumulates_in_place(args: Any) -> bool:
    """Return whether autograd would add these two gradients in place if they were real.

    Its engine does so if nothing else refers to the gradient (`can_accumulate_inplace` in
    torch/csrc/autograd/input_buffer.cpp), but never for a subclass of Tensor.
    """
    if current_node() is None or torch.is_grad_enabled() or len(args) != 2:
        return False

    old, new = args
    return (
        isinstance(new, torch.Tensor)
        and old.dtype == new.dtype
        and old.shape == new.shape
        and _uses(old) == uses_of_own_gradient()
        and is_dense(old)
    )


def _uses(tensor: Any) -> tuple[int, int]:
    """Return how many references a tensor and its storage have."""
    return num_references(tensor), num_holders_of_storage(storage_key(tensor.untyped_storage()))


def is_dense(tensor: Any) -> bool:
    """Return whether the elements fill one range of memory without gaps or overlaps."""
    strides = [step for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return 0 not in strides and span == tensor.numel()


@functools.cache
def uses_of_own_gradient() -> tuple[int, int]:
    """Return the number of references to a gradient to which autograd may add in place."""
    counts: list[tuple[int, int]] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is aten.add.Tensor and current_node() is not None:
                counts.append(_uses(args[0]))
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), torch.enable_grad():
        x = torch.empty(2, requires_grad=True).sin()
        loss = (x * 2).sum() + (x * 3).sum()
        with Count():  # type: ignore[no-untyped-call]
            loss.backward()

    return counts[0]


# `SavedNumbers`: the small tensors that autograd saves for numbers in products and quotients.
#
# PyTorch turns `2.0` in `x * 2.0` into a CPU tensor before autograd saves it for backward.
# No mode sees this tensor, because the operator that a mode sees has the plain number
# again. Source: the formulas of `mul` and `div` in tools/autograd/derivatives.yaml, which
# save `other`.

SAVING = frozenset(
    (
        aten.mul.Tensor, aten.mul_.Tensor, aten.div.Tensor, aten.div_.Tensor,
        aten.div.Tensor_mode, aten.div_.Tensor_mode,
    )
)  # fmt: skip


class SavedNumbers:
    """The saved numbers that exist now.

    Args:
        begin: records a new block of this many bytes, made by the last operator, and returns it.
        end: records that a block is freed.
    """

    def __init__(self, begin: Callable[[int], int], end: Callable[[int], None]) -> None:
        self._begin, self._end = begin, end
        self._blocks: dict[int, int] = {}  # by the number of the forward operator
        self._at = -1
        self._last: tuple[int, int] | None = None  # of the last operator, which still holds it

    def note(self, number: int, func: Any, args: Sequence[Any]) -> None:
        """Record an operator, and what autograd keeps of the one before."""
        if self._last is not None:
            forward, nbytes = self._last
            self._blocks[forward] = self._begin(nbytes)
            self._last = None

        if func not in SAVING or isinstance(args[1], torch.Tensor):
            return

        is_saved = torch.is_grad_enabled() and args[0].requires_grad
        # hooks on saved tensors, such as those of a recompute, keep the number in their own way
        if is_saved and innermost_saved_tensors_hooks(True) is None:
            self._last = number, _nbytes(args[1])

    def move_on(self, forward: int) -> None:
        """Free what the last backward operator has used, once another one runs (-1: none)."""
        if forward != self._at and self._at in self._blocks:
            self._end(self._blocks.pop(self._at))
        self._at = forward

    def end_step(self) -> None:
        """Free the numbers that no backward has used."""
        for block in self._blocks.values():
            self._end(block)
        self._blocks.clear()
        self._last = None


def _nbytes(number: float) -> int:
    """Return the bytes of the tensor that PyTorch makes of a Python number."""
    if isinstance(number, bool):
        return 1
    return 16 if isinstance(number, complex) else 8


# Sparse gradients over fake tensors.
#
# A sparse tensor has no memory of its own: it holds a tensor of indices and a tensor of
# values. A fake sparse tensor does not hold them, so they are stored with it here. The
# operators that a step with SGD runs on sparse tensors are called as the dense operators
# that their kernels consist of, so that each is recorded and has a cost. The sum of two
# sparse tensors is as long as both together, so a sum over micro-batches, or a momentum
# over steps, grows. Left out: all other operators, such as merging equal indices
# (`coalesce`).

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
