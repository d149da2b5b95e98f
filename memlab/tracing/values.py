"""`Values`: the real values of small fake tensors that follow from constants and data.

Models branch on such values: on whether a mask is full, or on positions made by `arange`. Small
tensors that do not depend on a parameter are computed for real beside the fake ones, outside of the
model. A tensor that depends on anything unknown is unknown.

Two things are assumed about unknown values. Numbers are finite. And what a model picks by scores,
such as the experts of a token, is spread evenly. Such picks, and everything that follows from them,
are marked as assumed.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from memlab._util.torch_private.tensors import (
    FakeTensor,
    OpOverload,
    runs_for,
    schema_of,
    storage_key,
    unset_fake_temporarily,
    without_python,
)

# `check_formats`: raise the errors of real kernels for operands of different number formats.
#
# Fake kernels of these operators accept any formats, but real kernels raise an error, and a
# step that cannot run has no memory to predict. Source: the errors of CPU kernels in this
# torch. CUDA kernels raise them as well, except that norms on CUDA accept more
# combinations.

aten = torch.ops.aten
# the positions of the arguments that must have the same format
ALIKE: dict[Any, tuple[int, ...]] = {
    aten.mm.default: (0, 1),
    aten.mv.default: (0, 1),
    aten.addmm.default: (0, 1, 2),
    aten.addmv.default: (0, 1, 2),
    aten.index_put.default: (0, 2),
    aten.index_put_.default: (0, 2),
    aten.index_add.default: (0, 3),
    aten.index_add_.default: (0, 3),
    aten.binary_cross_entropy.default: (0, 1),
    aten.grid_sampler_2d.default: (0, 1),
    aten.grid_sampler_3d.default: (0, 1),
}
# positions of input and weight: the same format, or a 16-bit input and an fp32 weight
NORMS: dict[Any, tuple[int, int]] = {
    aten.native_layer_norm.default: (0, 2),
    aten.native_group_norm.default: (0, 1),
    aten.native_batch_norm.default: (0, 1),
}
HALVES = (torch.bfloat16, torch.float16)


def check_formats(func: Any, args: Sequence[Any]) -> None:
    """Raise RuntimeError if a real kernel would because of its operands' formats."""
    places = ALIKE.get(func)
    if places is not None:
        dtypes = {args[place].dtype for place in places if place < len(args)}
        if len(dtypes) > 1:
            names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            raise RuntimeError(f"{func}: operands must have the same dtype, but got {names}")

    if func in NORMS:
        value, weight = (args[place] for place in NORMS[func])
        if weight is None or value.device.type != "cpu" or value.dtype == weight.dtype:
            return

        if value.dtype not in HALVES or weight.dtype != torch.float32:
            raise RuntimeError(
                f"{func}: input and weight must have the same dtype, but got {value.dtype} and "
                f"{weight.dtype}"
            )


def in_fp64(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype
) -> torch.Tensor | None:
    """Return the result of an operator that a CPU has for other number formats, None if for none.

    For instance, `torch.histc` counts integers on a card alone, and models of experts do.
    """
    wide = [value.double() if isinstance(value, torch.Tensor) else value for value in args]
    try:
        result: torch.Tensor = func(*wide, **kwargs)
    except NotImplementedError:
        return None
    return result.to(dtype)


MOST_ELEMENTS = 2**16
# positions and masks, of which a model reads whether they are full: one for each token of a batch;
# and values that follow from picks, such as a one-hot tensor of experts
MOST_WHOLE = 2**20
CONSTANTS = frozenset(
    getattr(aten, packet).__getattr__(overload)
    for packet, overload in (
        ("arange", "default"), ("arange", "start"), ("arange", "start_step"),
        ("linspace", "default"), ("zeros", "default"), ("ones", "default"), ("full", "default"),
        ("eye", "default"), ("eye", "m"), ("scalar_tensor", "default"),
    )
)  # fmt: skip
REDUCTIONS = frozenset(
    (aten.all.default, aten.any.default, aten._is_all_true.default, aten._is_any_true.default)
)
# results of these operators if all numbers are finite, from the arguments; None if unknown
FINITE: dict[Any, Callable[[Sequence[Any]], bool | None]] = {
    aten.any.default: lambda _: True,  # of numbers
    aten.isnan.default: lambda _: False,
    aten.isinf.default: lambda _: False,
    aten.isposinf.default: lambda _: False,
    aten.isneginf.default: lambda _: False,
    aten.eq.Tensor: lambda args: True if args[0] is args[1] else None,  # x == x unless it is NaN
    aten.ne.Tensor: lambda args: False if args[0] is args[1] else None,
    aten.eq.Scalar: lambda args: False if math.isinf(args[1]) else None,
    aten.ne.Scalar: lambda args: True if math.isinf(args[1]) else None,
}
# results of comparing a random number in [0, 1) with a constant, if they do not depend on the draw
CHANCES: dict[Any, Callable[[float], bool | None]] = {
    aten.lt.Scalar: lambda p: False if p <= 0 else True if p >= 1 else None,
    aten.le.Scalar: lambda p: False if p < 0 else True if p >= 1 else None,
    aten.gt.Scalar: lambda p: True if p < 0 else False if p >= 1 else None,
    aten.ge.Scalar: lambda p: True if p <= 0 else False if p >= 1 else None,
}
# the position of the output that holds indices chosen by scores
PICKS = {
    aten.topk.default: 1,
    aten.sort.default: 1,
    aten.sort.stable: 1,
    aten.argmax.default: 0,
    aten.argmin.default: 0,
    aten.max.dim: 1,
    aten.min.dim: 1,
    aten.multinomial.default: 0,
}


@contextlib.contextmanager
def for_real() -> Iterator[None]:
    """Run operators on real tensors, inside a run over fake ones."""
    with unset_fake_temporarily(), without_python():
        yield


class Values:
    """The known values of fake tensors, by identity. It holds no fake tensor."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], torch.Tensor, bool]] = {}
        # random numbers from 0 to 1, by which a model may skip layers
        self._chances: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def learn(self, fake: Any, real: torch.Tensor, *, is_assumed: bool = False) -> None:
        """Remember the values of a fake tensor if it is small or has one value everywhere."""
        if real.numel() <= _most([real], is_assumed) or _is_uniform(real):
            key = id(fake)
            forget = functools.partial(self._forget, key)
            self._known[key] = (weakref.ref(fake, forget), real, is_assumed)

    def knows(self, fake: Any) -> bool:
        """Return whether the values of a fake tensor are known."""
        return id(fake) in self._known

    def of(self, fake: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a fake tensor, None if unknown; a small real tensor as it is."""
        if not isinstance(fake, FakeTensor):
            return fake if fake.numel() <= MOST_ELEMENTS else None
        known = self._known.get(id(fake))
        return None if known is None else known[1]

    def are_assumed(self, tree: Any) -> bool:
        """Return whether the values of any of these tensors depend on assumed values."""
        if isinstance(tree, list | tuple):
            return any(self.are_assumed(item) for item in tree)
        known = self._known.get(id(tree)) if isinstance(tree, FakeTensor) else None
        return known is not None and known[2]

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any = ()) -> Any:
        """Return the result of an operator on known values, None if they are unknown or too many.

        An operator in place changes what is known about its argument.

        Args:
            func: the operator.
            args: its arguments.
            kwargs: its keyword arguments.
            out: the fake tensors that it returned, if it has run.
        """
        if not self._known and func not in CONSTANTS and not any(map(_is_real, args)):
            return None

        # large tensors are not computed, because the operator would take as long as in a real step
        tensors = tensors_in([out, args])
        most = _most(tensors, self.are_assumed(args))
        if any(tensor.numel() > most for tensor in tensors):
            self.forget_written(func, args, kwargs)
            return self._on_uniform(func, args, kwargs, out)

        real_args = self._real(args)
        real_kwargs = None if real_args is None else self._real(list(kwargs.values()))
        is_computed = not _is_random(func) and _runs_on_cpu(func)
        if real_args is None or real_kwargs is None or not is_computed:
            if schema_of(func).is_mutable:
                self.forget_written(func, args, kwargs)
            return None
        if func not in CONSTANTS and not tensors_in(real_args):
            return None

        given = dict(zip(kwargs, real_kwargs, strict=True))
        with for_real():
            try:
                return func(*real_args, **given)
            except NotImplementedError:  # a CPU's kernel is not for this number format
                is_on_card = isinstance(out, torch.Tensor) and out.device.type != "cpu"
                if not is_on_card or schema_of(func).is_mutable:
                    raise
                return in_fp64(func, real_args, given, out.dtype)

    def _on_uniform(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> Any:
        """Return the result of an operator on large tensors that have one value everywhere."""
        is_known = torch.Tag.pointwise in func.tags or func in REDUCTIONS
        if not is_known or schema_of(func).is_mutable:
            return None
        if kwargs or not isinstance(out, torch.Tensor):
            return None

        real_args = self._real(args)
        tensors = [] if real_args is None else tensors_in(real_args)
        if real_args is None or not tensors or not all(_is_uniform(t) for t in tensors):
            return None

        with for_real():
            one = [t.as_strided((), ()) if isinstance(t, torch.Tensor) else t for t in real_args]
            return func(*one).expand(out.shape)

    def assumed(self, func: Any, args: Sequence[Any], out: Any) -> dict[int, torch.Tensor]:
        """Return by position the assumed values of an operator's outputs.

        Numbers are assumed to be finite, and picks to be spread evenly.
        """
        if func in FINITE:
            is_float = args[0].is_floating_point()
            says = FINITE[func](args) if is_float else None
            if says is None:
                return {}
            with for_real():
                return {0: torch.tensor(says).expand(out.shape)}

        # remember a random number until it is compared with a constant
        if func is aten.rand.default and not out.dim():
            self._chances[id(out)] = out
        if func in CHANCES and self._chances.get(id(args[0])) is args[0]:
            says = CHANCES[func](args[1])
            if says is None:
                return {}
            with for_real():
                return {0: torch.tensor(says)}

        if func not in PICKS:
            return {}

        place = PICKS[func]
        picked = out if isinstance(out, torch.Tensor) else out[place]
        if picked.numel() > MOST_WHOLE:
            return {}

        return {place: _evenly(func, args, picked)}

    def sum_of(self, fake: Any) -> int | None:
        """Return the sum of a fake tensor's values, None if they are unknown."""
        real = self.of(fake)
        if real is None:
            return None
        with for_real():
            return int(real.sum())

    def _real(self, values: Sequence[Any]) -> list[Any] | None:
        """Return arguments with real tensors instead of fake ones, None if one is unknown."""
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
        """Forget the values of all tensors that share memory with what an operator writes."""
        for position, argument in enumerate(schema_of(func).arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue

            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, list | tuple) else (value,):
                real = self.of(tensor) if isinstance(tensor, torch.Tensor) else None
                if real is None:
                    continue

                storage = storage_key(real.untyped_storage())
                self._known = {
                    key: known
                    for key, known in self._known.items()
                    if storage_key(known[1].untyped_storage()) != storage
                }

    def _forget(self, key: int, ref: object) -> None:
        known = self._known.get(key)
        if known is not None and known[0] is ref:  # the id may belong to another tensor by now
            del self._known[key]


def _is_real(value: Any) -> bool:
    """Return whether a value is a tensor with memory, such as a list that became one."""
    return isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors in an operator's arguments or outputs, also those in lists."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in tensors_in(value)]
    return []


def _most(tensors: Sequence[torch.Tensor], are_assumed: bool) -> int:
    """Return how many elements tensors may have whose values are computed for real."""
    are_whole = not any(t.is_floating_point() or t.is_complex() for t in tensors)
    return MOST_WHOLE if are_assumed or are_whole else MOST_ELEMENTS


def _is_uniform(real: torch.Tensor) -> bool:
    """Return whether a tensor is a single element expanded to its shape."""
    return real.numel() > 0 and not any(real.stride())


def _evenly(func: Any, args: Sequence[Any], picked: torch.Tensor) -> torch.Tensor:
    """Return indices of this shape in which each occurs equally often, and none twice in a row."""
    scores: torch.Tensor = args[0]
    if picked.dim() == 0 or picked.dim() < scores.dim():  # one of each row, or of all
        with for_real():
            count = max(1, scores.numel() // max(1, picked.numel()))
            return torch.arange(picked.numel()).remainder(count).view(picked.shape)

    dim = _dim_of(func, args)
    most, count = scores.shape[dim] if scores.dim() else 1, picked.shape[dim]
    rows = picked.numel() // max(1, count)

    with for_real():
        step = count if count < most else 1
        row, column = torch.arange(rows)[:, None], torch.arange(count)
        index = (row * step + column).remainder(max(1, most))
        others = [size for at, size in enumerate(picked.shape) if at != dim % picked.dim()]
        return index.view(*others, count).movedim(-1, dim)


def _dim_of(func: Any, args: Sequence[Any]) -> int:
    """Return the dimension that an operator picks along."""
    names = [argument.name for argument in schema_of(func).arguments]
    at = names.index("dim") if "dim" in names else len(args)
    return int(args[at]) if at < len(args) else -1


@functools.cache
def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


@functools.cache
def _runs_on_cpu(func: Any) -> bool:
    """Return whether there is a kernel to compute values with; some are for CUDA alone."""
    return not isinstance(func, OpOverload) or runs_for(func.name(), "CPU")
