"""Correct what PyTorch and libraries do differently with fake tensors.

Autograd never adds to a fake gradient in place. A module of fake tensors cannot be converted to
another device or dtype in place. Optimizers do not use their foreach implementation, and
Transformers builds masks that it would skip. Each of these changes what a step allocates.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memlab.recording.built import (
    Changed,
    as_own_format,
    attributes_of,
    carried,
    follow,
    kind_of,
    place_in_memory,
)
from memlab.torch_private.autograd import current_node
from memlab.torch_private.dispatch import TorchDispatchMode, are_tensors_fake, without_python
from memlab.torch_private.fakes import (
    FakeTensor,
    FakeTensorMode,
    found_as,
    remember_constant,
    unset_fake_temporarily,
)
from memlab.torch_private.modules import (
    buffers_of,
    convert,
    converted_by,
    foreach_types,
    parameters_of,
)
from memlab.torch_private.tensors import (
    num_holders_of_storage,
    num_references,
    parts_of,
    storage_key,
)

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
