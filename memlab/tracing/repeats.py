"""`Repeats`: make the outputs of operators that were dispatched before without dispatching again.

A model repeats its blocks, and a step repeats its operators. FakeTensorMode has a cache of its own,
but building its key takes longer than everything else. The tracker has the signature of each call
anyway, which serves as the key here. Left out: views, and operators whose outputs depend on more
than the signature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memlab._util.torch_private.tensors import (
    FakeTensor,
    FakeTensorMode,
    schema_of,
    shapes_alone,
    storage_key,
    without_python,
)
from memlab.devices.operators import Signature, TensorSpec
from memlab.tracing.values import Values

PlainCall = tuple[Signature, tuple[torch.device, ...], Any, torch.dtype]
"""A signature, the devices of its tensors, the device that it asks for, and the default format."""


@dataclass(frozen=True, slots=True)
class _Outputs:
    """How to make an operator's outputs; without specs it returns its first argument."""

    specs: tuple[tuple[TensorSpec, torch.device], ...] | None
    container: type | None  # tuple or list, where it returns several
    mode: FakeTensorMode


class Repeats:
    """Outputs by call, for calls whose tensors are all fake."""

    def __init__(self) -> None:
        self._outputs: dict[PlainCall, _Outputs] = {}

    def learn(self, call: PlainCall, func: Any, args: Sequence[Any], out: Any) -> None:
        """Remember an operator that allocates all its outputs, or changes its first argument.

        Args:
            call: from `plain_call`, before it has run.
            func: the operator.
            args: its arguments.
            out: what it has returned.
        """
        tensors = list(out) if isinstance(out, tuple | list) else [out]
        if not tensors or not all(map(is_fake, tensors)):
            return

        specs: tuple[tuple[TensorSpec, torch.device], ...] | None = None
        if schema_of(func).is_mutable:
            if torch.Tag.inplace_view in func.tags:  # it changes its argument's shape
                return
            if len(tensors) != 1 or out is not args[0]:
                return
        else:
            storages = {storage_key(t.untyped_storage()) for t in tensors}
            storages -= {storage_key(t.untyped_storage()) for t in _flat(args)}
            if len(storages) != len(tensors) or not all(_is_whole(t) for t in tensors):
                return
            specs = tuple(
                (TensorSpec(t.dtype, tuple(t.shape), t.stride()), t.fake_device) for t in tensors
            )

        container = type(out) if isinstance(out, tuple | list) else None
        self._outputs[call] = _Outputs(specs, container, tensors[0].fake_mode)

    def outputs_of(self, call: PlainCall | None, args: Sequence[Any]) -> Any:
        """Return an operator's outputs, None if it has to be dispatched."""
        known = self._outputs.get(call) if call is not None else None
        if known is None:
            return None
        if known.specs is None:
            return args[0]
        with without_python():
            made = [
                FakeTensor(
                    known.mode,
                    torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta"),
                    device,
                )
                for spec, device in known.specs
            ]

        return made[0] if known.container is None else known.container(made)


def plain_call(
    signature: Signature | None, args: Sequence[Any], kwargs: Mapping[str, Any], values: Values
) -> PlainCall | None:
    """Return a call by all that its outputs depend on; None where they depend on values."""
    if signature is None or any(isinstance(arg, torch.device) for arg in args):
        return None
    tensors = _flat((*args, *kwargs.values())) if kwargs else _flat(args)
    if not are_plain(tensors, values):
        return None
    devices = tuple([tensor.fake_device for tensor in tensors])
    return signature, devices, kwargs.get("device"), torch.get_default_dtype()


def are_plain(tensors: Sequence[Any], values: Values) -> bool:
    """Return whether all tensors are fake, without values."""
    return not any(not is_fake(tensor) or values.knows(tensor) for tensor in tensors)


def is_fake(tensor: Any) -> bool:
    """Return whether this is a fake tensor without a value of its own."""
    return (
        isinstance(tensor, FakeTensor) and tensor.constant is None and not tensor.dtype.is_complex
    )


def _flat(args: Sequence[Any]) -> list[Any]:
    tensors: list[Any] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            tensors.append(arg)
        elif isinstance(arg, list | tuple):
            tensors += [item for item in arg if isinstance(item, torch.Tensor)]

    return tensors


def _is_whole(tensor: Any) -> bool:
    """Return whether a tensor covers its whole storage."""
    if tensor.layout is not torch.strided or tensor.storage_offset():
        return False
    spec = TensorSpec(tensor.dtype, tuple(tensor.shape), tensor.stride())
    return bool(tensor.untyped_storage().nbytes() == spec.nbytes)


# `Views`: look at the memory of a fake tensor in another way, without dispatching.
#
# A quarter of a step's operators are views. FakeTensorMode spends ten times as long on the
# question what it has to mind as on the view itself. These operators have nothing to mind:
# what they return depends on shapes alone, and PyTorch's own kernel for tensors without
# memory says what that is. Left out: tensors whose values are known, since those of the
# view would be.

aten = torch.ops.aten
BY_SHAPE = frozenset(
    (
        aten._unsafe_view.default, aten.as_strided.default, aten.detach.default,
        aten.expand.default, aten.permute.default, aten.select.int, aten.slice.Tensor,
        aten.split_with_sizes.default, aten.t.default, aten.transpose.int, aten.unsqueeze.default,
        aten.view.default,
    )
)  # fmt: skip


def view_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], values: Values) -> Any:
    """Return what a view of a fake tensor returns, None if it has to be dispatched."""
    if func not in BY_SHAPE or not are_plain(_flat(args), values):
        return None
    base = args[0]
    with without_python():
        with shapes_alone(base.fake_mode):
            made = func(*args, **kwargs)
        if isinstance(made, torch.Tensor):
            return FakeTensor(base.fake_mode, made, base.fake_device)
        return [FakeTensor(base.fake_mode, each, base.fake_device) for each in made]
