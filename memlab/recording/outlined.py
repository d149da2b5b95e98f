"""Build a model whose large tensors take no memory.

It is for models that cannot be built of fake tensors. A parameter class of its own, such as the
4-bit weights of bitsandbytes, needs an ordinary tensor on an ordinary device. So here large tensors
are ordinary ones, over memory that is reserved but never touched, and operators on them only work
out the shapes of their results. A base of seven billion parameters quantizes itself within seconds.
Small tensors have values, since a library may read them: the table of a number format, for example.
Left out: what numpy or a list shows of a large tensor is zeros.
"""

import contextlib
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memlab.arguments.units import KIB
from memlab.recording.built import own_formats
from memlab.torch_private import pytree
from memlab.torch_private.dispatch import TorchDispatchMode, without_modes
from memlab.torch_private.fakes import unset_fake_temporarily
from memlab.torch_private.operators import schema_of
from memlab.torch_private.tensors import storage_key

MOST_WITH_VALUES = 64 * KIB
META = torch.device("meta")
SETS: Any = {torch.ops.aten.set_.source_Storage_storage_offset, torch.ops.aten.set_.source_Storage}
COPY: Any = torch.ops.aten.copy_.default


class _Outlines(TorchDispatchMode):
    """Runs operators that make a large tensor, or read one, for the shapes of their results.

    Attributes:
        storages: those without memory, by their key; held so that no key is used again.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, Any] = {}

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator on shapes alone if it reads or makes a tensor without memory."""
        kwargs = kwargs or {}
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if not tensors and kwargs.get("device") is not None:
            shape = operator(*args, **{**kwargs, "device": META})
            is_large = isinstance(shape, torch.Tensor) and shape.nbytes > MOST_WITH_VALUES
            return self._like(shape) if is_large else operator(*args, **kwargs)
        is_view = operator.is_view or operator in SETS
        if is_view or not any(self._is_outlined(t) for t in tensors):
            return operator(*args, **kwargs)
        return self._on_shapes(operator, args, kwargs)

    def _is_outlined(self, tensor: torch.Tensor) -> bool:
        has_memory = tensor.layout is torch.strided and not tensor.is_meta
        return has_memory and storage_key(tensor.untyped_storage()) in self.storages

    def _on_shapes(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for given, argument in zip(args, schema_of(operator).arguments, strict=False):
            is_changed = argument.is_write and isinstance(given, torch.Tensor)
            if is_changed and not self._is_outlined(given):
                storage = given.untyped_storage()
                if operator is not COPY or given.nbytes != storage.nbytes():
                    raise RuntimeError(f"{operator} would write unknown values among known ones")
                self.storages[storage_key(storage)] = storage  # a deep copy has no values either

        own: dict[int, torch.Tensor] = {}

        def shape_of(tensor: torch.Tensor) -> torch.Tensor:
            shape = tensor if tensor.is_meta else torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META
            )  # fmt: skip
            own[id(shape)] = tensor
            return shape

        def result(shape: torch.Tensor) -> torch.Tensor:
            return own[id(shape)] if id(shape) in own else self._like(shape)

        shapes = pytree.tree_map_only(torch.Tensor, shape_of, (args, kwargs))
        if kwargs.get("device") is not None:
            shapes[1]["device"] = META
        made = operator(*shapes[0], **shapes[1])
        return pytree.tree_map_only(torch.Tensor, result, made)

    def _like(self, shape: torch.Tensor) -> torch.Tensor:
        """Return an ordinary tensor of this shape, over memory that is never touched."""
        nbytes = max(shape.untyped_storage().nbytes(), shape.element_size())
        memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=shape.dtype)
        storage = memory.untyped_storage()
        self.storages[storage_key(storage)] = storage
        return memory.as_strided(shape.size(), shape.stride())


@contextlib.contextmanager
def outlines() -> Iterator[_Outlines]:
    """Make large tensors without memory, inside a run over fake ones."""
    with unset_fake_temporarily(), without_modes(), _Outlines() as made:
        yield made


@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """What building a model without memory has shown.

    Attributes:
        quantized: the model, if its parameters have quantized themselves. Otherwise None: its build
            or its parameters read values, or it has no such parameters.
        nbytes: that the model takes if it is built for real; if the build failed, what its large
            tensors would have taken until then.
        error: that the build raised; None if it went well.
    """

    quantized: torch.nn.Module | None = None
    nbytes: int = 0
    error: Exception | None = None


def outline_of(build: Callable[[], torch.nn.Module]) -> Outline:
    """Build a model without memory, and let its parameters quantize themselves."""
    nbytes = 0
    with outlines() as made:
        try:
            model = build()
            if not isinstance(model, torch.nn.Module):
                return Outline()
            tensors = [*model.parameters(), *model.buffers()]
            storages = [t.untyped_storage() for t in tensors if t.layout is torch.strided]
            nbytes = sum({storage_key(s): s.nbytes() for s in storages}.values())
            quantized = model.to("cpu") if own_formats(model) else None
            return Outline(quantized=quantized, nbytes=nbytes)
        except Exception as error:  # a library may do anything with a tensor that has no memory
            asked = sum(storage.nbytes() for storage in made.storages.values())
            # whose frames hold the model
            return Outline(nbytes=nbytes or asked, error=error.with_traceback(None))


def said_by(error: Exception) -> str:
    """Return the class and the first line of an error."""
    text = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
