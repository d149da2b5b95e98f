"""`Values`: the real values of a few small fake tensors, those that follow from constants and data.

Models branch on them: on whether a mask is full, on positions made by `arange`. Small tensors that
no parameter had a part in are computed for real beside the fake ones, outside of the model; where
anything unknown had a part in one, it is unknown.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

MOST_ELEMENTS = 65536
aten = torch.ops.aten
CONSTANTS = frozenset(
    getattr(aten, packet).__getattr__(overload)
    for packet, overload in (
        ("arange", "default"), ("arange", "start"), ("arange", "start_step"),
        ("linspace", "default"), ("zeros", "default"), ("ones", "default"), ("full", "default"),
        ("eye", "default"), ("eye", "m"), ("scalar_tensor", "default"),
    )
)  # fmt: skip


@contextlib.contextmanager
def for_real() -> Iterator[None]:
    """Run operators on real tensors, inside a run over fake ones."""
    with unset_fake_temporarily(), torch._C._DisableTorchDispatch():
        yield


class Values:
    """What is known of fake tensors, by identity; it keeps none of them alive."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], torch.Tensor]] = {}

    def learn(self, fake: Any, real: torch.Tensor) -> None:
        """Remember what a fake tensor holds, if it is small."""
        if real.numel() <= MOST_ELEMENTS:
            key = id(fake)
            forget = functools.partial(self._forget, key)
            self._known[key] = (weakref.ref(fake, forget), real)

    def knows(self, fake: Any) -> bool:
        """Return whether the values of a fake tensor are known."""
        return id(fake) in self._known

    def of(self, fake: torch.Tensor) -> torch.Tensor | None:
        """Return what a fake tensor holds, None if that is not known; a small real one, itself."""
        if not isinstance(fake, FakeTensor):
            return fake if fake.numel() <= MOST_ELEMENTS else None
        known = self._known.get(id(fake))
        return None if known is None else known[1]

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what an operator gives on known values, None if they are not known.

        An operator in place changes what is known of its argument.
        """
        if not self._known and func not in CONSTANTS:
            return None
        real_args = self._real(args)
        real_kwargs = None if real_args is None else self._real(list(kwargs.values()))
        if real_args is None or real_kwargs is None or _is_random(func):
            if func._schema.is_mutable:
                self.forget_written(func, args, kwargs)
            return None
        if func not in CONSTANTS and not _has_tensor(real_args):
            return None
        with for_real():
            return func(*real_args, **dict(zip(kwargs, real_kwargs, strict=True)))

    def sum_of(self, fake: Any) -> int | None:
        """Return the sum of what a fake tensor holds, None if that is not known."""
        real = self.of(fake)
        if real is None:
            return None
        with for_real():
            return int(real.sum())

    def _real(self, values: Sequence[Any]) -> list[Any] | None:
        """Return arguments with real tensors in place of fake ones, None if one is not known."""
        found: list[Any] = []
        for value in values:
            real: Any = value
            if isinstance(value, torch.Tensor):
                real = self.of(value)
            elif isinstance(value, list | tuple):
                real = self._real(value)
            elif isinstance(value, torch.device):
                real = torch.device("cpu")
            elif value is None:
                found.append(None)
                continue
            if real is None:
                return None
            found.append(real)
        return found

    def forget_written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Forget all that shares memory with what an operator writes."""
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, list | tuple) else (value,):
                real = self.of(tensor) if isinstance(tensor, torch.Tensor) else None
                if real is None:
                    continue
                storage = real.untyped_storage()._cdata
                self._known = {
                    key: (ref, other)
                    for key, (ref, other) in self._known.items()
                    if other.untyped_storage()._cdata != storage
                }

    def _forget(self, key: int, ref: object) -> None:
        known = self._known.get(key)
        if known is not None and known[0] is ref:  # the id may be another tensor's by now
            del self._known[key]


def _has_tensor(values: Sequence[Any]) -> bool:
    return any(
        isinstance(v, torch.Tensor) or (isinstance(v, list | tuple) and _has_tensor(v))
        for v in values
    )


@functools.cache
def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags
