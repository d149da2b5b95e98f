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


@dataclass(frozen=True, slots=True)
class _Outputs:
    """How to make an operator's outputs; without specs it returns its first argument."""

    specs: tuple[TensorSpec, ...] | None
    container: type | None  # tuple or list, where it returns several
    mode: FakeTensorMode
    device: torch.device


class Repeats:
    """Outputs by signature, for calls whose tensors are all fake and on one device."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._outputs: dict[Signature, _Outputs] = {}

    def learn(
        self,
        signature: Signature,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: Any,
    ) -> None:
        """Remember an operator that allocates all its outputs, or changes its first argument."""
        tensors = list(out) if isinstance(out, tuple | list) else [out]
        is_plain = are_plain(args, kwargs, None, self.device_type)
        if not tensors or not is_plain or not all(is_fake(t, self.device_type) for t in tensors):
            return

        specs: tuple[TensorSpec, ...] | None = None
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
            specs = tuple(TensorSpec(t.dtype, tuple(t.shape), t.stride()) for t in tensors)

        self._outputs[signature] = _Outputs(
            specs,
            type(out) if isinstance(out, tuple | list) else None,
            tensors[0].fake_mode,
            tensors[0].fake_device,
        )

    def outputs_of(
        self,
        signature: Signature | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        values: Values,
    ) -> Any:
        """Return an operator's outputs, None if it has to be dispatched."""
        known = self._outputs.get(signature) if signature is not None else None
        if known is None or not are_plain(args, kwargs, values, self.device_type):
            return None
        if known.specs is None:
            return args[0]
        with without_python():
            made = [
                FakeTensor(
                    known.mode,
                    torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta"),
                    known.device,
                )
                for spec in known.specs
            ]

        return made[0] if known.container is None else known.container(made)


def are_plain(
    args: Sequence[Any], kwargs: Mapping[str, Any], values: Values | None, device_type: str
) -> bool:
    """Return whether the outputs of a call depend only on its signature."""
    if kwargs.get("device") is not None:
        return False
    return all(
        is_fake(tensor, device_type) and (values is None or not values.knows(tensor))
        for tensor in _flat((*args, *kwargs.values()))
    )


def is_fake(tensor: Any, device_type: str) -> bool:
    """Return whether this is a fake tensor on such a device, without a value of its own."""
    return (
        isinstance(tensor, FakeTensor)
        and tensor.fake_device.type == device_type
        and tensor.constant is None
        and not tensor.dtype.is_complex
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
# view would be, and calls whose fake tensors belong to another device.

aten = torch.ops.aten
BY_SHAPE = frozenset(
    (
        aten._unsafe_view.default, aten.as_strided.default, aten.detach.default,
        aten.expand.default, aten.permute.default, aten.select.int, aten.slice.Tensor,
        aten.split_with_sizes.default, aten.t.default, aten.transpose.int, aten.unsqueeze.default,
        aten.view.default,
    )
)  # fmt: skip


def view_of(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    values: Values,
    device_type: str,
) -> Any:
    """Return what a view of a fake tensor returns, None if it has to be dispatched."""
    if func not in BY_SHAPE or not are_plain(args, kwargs, values, device_type):
        return None
    base = args[0]
    with without_python():
        with shapes_alone(base.fake_mode):
            made = func(*args, **kwargs)
        if isinstance(made, torch.Tensor):
            return FakeTensor(base.fake_mode, made, base.fake_device)
        return [FakeTensor(base.fake_mode, each, base.fake_device) for each in made]
