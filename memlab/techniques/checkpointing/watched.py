"""Tensors that a forward may change in place: detect the changes and restore the old values.

Changed buffers, and changed tensors in other objects, are restored. A changed parameter or tensor
attribute of the module is refused.

A change normally raises a tensor's version, but kernels of norms and writes through `.data` or
NumPy do not. Therefore values are compared too: when a tensor is first seen, and in every forward
of a module whose code uses names that allow such writes.
"""

import contextlib
import ctypes
import dataclasses
import functools
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from memlab._util.torch_private.tensors import (
    FakeTensor,
    NormWithStatistics,
    buffers_of,
    num_holders_of_storage,
    parameters_of,
    storage_key,
    version_of,
    without_modes,
)

WRITES_UNSEEN = frozenset(
    (
        "data",
        "numpy",
        "from_numpy",
        "frombuffer",
        "as_tensor",
        "asarray",
        "data_ptr",
        "storage",
        "untyped_storage",
        "set_",
    )
)
"""Names in code that may write to a tensor without raising its version."""
OF_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclasses.dataclass(slots=True, eq=False)
class Watched:
    """One tensor in one forward.

    Attributes:
        what: the tensor, in words.
        tensor: the tensor itself.
        is_fixed: whether a change is refused.
        is_statistic: whether it is a running statistic, whose kernel does not raise its version.
        before: a copy of its values; None if it is not expected to change.
        version: its version before the forward.
        sum: checksum of its bytes before the forward; None if that is not compared.
    """

    what: str
    tensor: torch.Tensor
    is_fixed: bool = False
    is_statistic: bool = False
    before: torch.Tensor | None = None
    version: int = 0
    sum: int | None = None


class SeenTensors:
    """What is known of the tensors that the forwards of one module can reach."""

    def __init__(self) -> None:
        self.others: list[tuple[str, weakref.ref[torch.Tensor]]] = []  # in lists, objects, ...
        self.writes_unseen = False
        self._changes: dict[int, tuple[weakref.ref[torch.Tensor], bool, bool]] = {}

    def learn(
        self,
        reached: list[tuple[str, torch.Tensor]],
        parts: list[nn.Module],
        names: Collection[str],
    ) -> None:
        """Remember the tensors and the names in code that a walk has reached."""
        own = {id(tensor) for _, tensor, *_ in _own(parts)}
        self.others = [(w, weakref.ref(tensor)) for w, tensor in reached if id(tensor) not in own]
        self.writes_unseen = not WRITES_UNSEEN.isdisjoint(names)
        self._changes = {key: held for key, held in self._changes.items() if held[0]() is not None}

    def of(self, tensor: torch.Tensor) -> tuple[bool, bool] | None:
        """Return whether forwards change a tensor, and whether silently; None if it is new."""
        reference, changes, is_silent = self._changes.get(id(tensor), (None, False, False))
        return (changes, is_silent) if reference is not None and reference() is tensor else None

    def judge(self, watched: list[Watched]) -> list[Watched]:
        """Return the tensors that a forward has changed, and remember them."""
        changed = []
        for one in watched:
            before = self.of(one.tensor)
            is_silent = before is not None and before[1]
            has_moved = version(one.tensor) != one.version

            if not has_moved and not one.is_statistic and not is_silent:
                if before is None and one.before is not None:
                    is_silent = _has_changed(one.before, one.tensor)
                elif one.sum is not None:
                    is_silent = one.sum != sum_of_bytes(one.tensor)

            is_changed = has_moved or one.is_statistic or is_silent
            if is_changed:
                changed.append(one)
            if before is None or (is_changed, is_silent) != before:
                changes = is_changed or (before is not None and before[0])
                self._changes[id(one.tensor)] = (weakref.ref(one.tensor), changes, is_silent)

        return changed


def watch(seen: SeenTensors, parts: list[nn.Module], inputs: Collection[int]) -> list[Watched]:
    """Record the tensors that the forward of these modules may change.

    Args:
        seen: what is known about them from earlier forwards.
        parts: the modules.
        inputs: ids of the forward's inputs, which are watched elsewhere.
    """
    watched = [Watched(*held) for held in _own(parts)]
    for where, reference in seen.others:
        tensor = reference()
        if tensor is not None and id(tensor) not in inputs:
            watched.append(Watched(where, tensor, is_fixed=tensor.requires_grad))

    for one in watched:
        one.version = version(one.tensor)
        known = seen.of(one.tensor)
        if not one.is_fixed and (known is None or known[0] or one.is_statistic):
            one.before = one.tensor.detach().clone()
        elif known is None or seen.writes_unseen:
            one.sum = sum_of_bytes(one.tensor)

    return watched


def _own(parts: list[nn.Module]) -> Iterator[tuple[str, torch.Tensor, bool, bool]]:
    """Yield the modules' own tensors: in words, the tensor, `is_fixed`, `is_statistic`."""
    for part in parts:
        for parameter in parameters_of(part).values():
            if parameter is not None:
                kind = "trainable" if parameter.requires_grad else "frozen"
                yield f"a {kind} parameter", parameter, True, False

        for name, buffer in buffers_of(part).items():
            if buffer is not None:
                is_statistic = isinstance(part, NormWithStatistics) and part.training
                is_statistic = is_statistic and name.startswith("running_")
                yield f"its buffer {name!r}", buffer, False, is_statistic

        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor):
                yield f"its attribute {name!r}", value, True, False


def version(tensor: torch.Tensor) -> int:
    """Return the number that each change in place raises; 0 for an inference tensor."""
    return 0 if tensor.is_inference() else version_of(tensor)


@contextlib.contextmanager
def values_put_back(
    noted: list[tuple[torch.Tensor, torch.Tensor]], *, in_place: bool
) -> Iterator[None]:
    """Give tensors the values that were noted of them, and afterwards those that they have now.

    Args:
        noted: tensors, each with its values.
        in_place: always write to a tensor's own memory, where others may look into it; if not, a
            tensor that nothing else shares its memory with gets other memory for the while.
    """
    undo = [
        _given_memory(tensor, values)
        if has_own_memory(tensor) and not in_place
        else _given_values(tensor, values)
        for tensor, values in noted
    ]
    try:
        yield
    finally:
        for put_back in undo:
            put_back()


def _given_memory(tensor: torch.Tensor, values: torch.Tensor) -> Callable[[], None]:
    """Give a tensor a copy of these values as its memory; return what gives it its own again."""
    own = tensor.data
    tensor.data = values.clone()

    def put_back() -> None:
        tensor.data = own

    return put_back


def _given_values(tensor: torch.Tensor, values: torch.Tensor) -> Callable[[], None]:
    """Write these values into a tensor; return what writes those that it has now."""
    own = tensor.detach().clone()
    put(tensor, values)
    return functools.partial(put, tensor, own)


def put(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Write values into a tensor's own memory without raising its version."""
    if tensor.layout != torch.strided or tensor.is_nested:
        tensor.data.copy_(values)
        return
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
    tensor.data[once].copy_(values[once])


def has_own_memory(tensor: torch.Tensor) -> bool:
    """Return whether no view, array or other tensor shares a tensor's memory."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return False
    return _num_holders(tensor) <= HOLDERS_OF_ONE


def _num_holders(tensor: torch.Tensor) -> int:
    return int(num_holders_of_storage(storage_key(tensor.untyped_storage())))


HOLDERS_OF_ONE = _num_holders(torch.empty(1))  # the tensor and the storage object that asks


def sum_of_bytes(tensor: torch.Tensor) -> int | None:
    """Return a checksum of a tensor's values and address; None if it has no values of its own."""
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided
    if not is_plain or tensor.is_nested or tensor.is_quantized or not _has_values(tensor):
        return None
    if 0 in tensor.stride():  # expanded from fewer numbers, like an offloaded weight
        return None

    with without_modes(), torch.no_grad():
        flat = tensor.data
        if flat.is_complex():
            flat = torch.view_as_real(flat.resolve_conj())

        flat = flat.view(OF_BYTES[flat.element_size()])
        if flat.device.type == "cpu":
            flat = flat.contiguous()
            # not through NumPy: its array would keep FSDP from freeing a gathered parameter
            values = (ctypes.c_byte * flat.nbytes).from_address(flat.data_ptr() or 1)
            return zlib.crc32(values, tensor.data_ptr() & 0xFFFFFFFF)

        return hash((int(flat.sum(dtype=torch.int64)), tensor.data_ptr()))


def _has_changed(before: torch.Tensor, tensor: torch.Tensor) -> bool:
    return _has_values(tensor) and not torch.equal(before, tensor.detach())


def _has_values(tensor: Any) -> bool:
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta
