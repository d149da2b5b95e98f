"""A workload whose model and batches consist of fake tensors, which a prediction records.

Batches are always made for real, because their data may come from anywhere. A model is made for
real only if it cannot be built of fake tensors. Real tensors are then replaced by fake ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import torch

from memlab._util.torch_private import pytree
from memlab._util.torch_private.tensors import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    storage_key,
    unset_fake_temporarily,
    without_modes,
)
from memlab._util.units import GIB, MIB, format_bytes
from memlab.devices.generators import preserved_random_state
from memlab.devices.here import available_memory_bytes
from memlab.errors import MemlabError, UnsupportedError
from memlab.running import is_out_of_memory
from memlab.techniques.accumulation import has_samples_first
from memlab.techniques.batches import is_object, map_tensors, tensors_of
from memlab.techniques.loss.loss_tensors import CopiedLoss
from memlab.techniques.step import set_seed
from memlab.techniques.trials import check_shapes
from memlab.trace import Phase
from memlab.tracing import triton_launches
from memlab.tracing.fakify import (
    MOST_WITH_VALUES,
    Learn,
    Outline,
    check_dense,
    made_fake,
    outline_of,
    own_formats,
    said_by,
)
from memlab.tracing.tracker import Tracker, record_fake
from memlab.tracing.values import for_real, tensors_in
from memlab.workload import Workload

Found = TypeVar("Found")
MOST_OBJECTS = 100_000  # of a batch that are searched for tensors
NO_DATA = (type, ModuleType, FunctionType, torch.nn.Module)
REAL_BYTES = GIB  # up to which a build for real, which knows all values, is worth its time
BATCH_BYTES = 256 * MIB  # of a larger batch two samples are made, which show the shapes


def over_fakes(workload: Workload, mode: FakeTensorMode, tracker: Tracker) -> Workload:
    """Return the workload with a model and batches of fake tensors."""
    batches = _Batches(workload, mode, tracker)
    triton_launches.told((workload.build_model, workload.make_batch, workload.compute_loss))
    # num_loss_terms would read values, and the weights of micro-batches change no size
    return dataclasses.replace(
        workload,
        build_model=partial(_build_model, workload.build_model, mode, tracker),
        compute_loss=CopiedLoss(workload.compute_loss, partial(_copied, mode, tracker)),
        make_batch=batches.make,
        num_loss_terms=None,
        count_samples=workload.count_samples and batches.count,
        split_batch=workload.split_batch and batches.split,
    )


def tried_over_fakes(
    workload: Workload, look: Callable[[Workload, torch.nn.Module], Found]
) -> Found:
    """Return what a function finds of the workload and its model, both of fake tensors.

    It may be called several times, see `record_fake`; what it returns holds no tensor of them.

    Raises:
        Exception: whatever a model or a loss raises over fake tensors.
    """
    tracker, found = Tracker("cpu"), list[Found]()

    def run(mode: FakeTensorMode) -> None:
        fake = over_fakes(workload, mode, tracker)
        tracker.mark(-1, Phase.BUILD, 0)
        set_seed(0)
        found[:] = [look(fake, fake.build_model().train())]

    record_fake(run, tracker)
    return found[0]


class _Batches:
    """Makes, counts and splits batches of fake tensors as the workload does with real ones.

    Attributes:
        real: the real batch behind the last fake one.
        parts: the real micro-batches of the last batch, by the id of the fake micro-batch.
        hidden: fake tensors that stand for tensors inside of a batch's objects.
        shapes: shapes of the tensors of each batch so far, without their first dimension.
    """

    def __init__(self, workload: Workload, mode: FakeTensorMode, tracker: Tracker) -> None:
        self.workload, self.mode, self.tracker = workload, mode, tracker
        self.real: Any = None
        self.parts: dict[int, Any] = {}
        self.hidden: list[torch.Tensor] = []
        self.shapes: list[list[torch.Size]] = []

    def make(self, n: int) -> Any:
        """Return n samples. Of a large batch only two are made, and resized to n."""
        workload, made = self.workload, min(n, 2)
        is_counted = workload.count_samples is not None or workload.split_batch is not None
        with for_real():
            with preserved_random_state(torch.device("cpu")):
                batch = workload.make_batch(made)
            check_dense(tensors_of(batch), "a batch")
            is_plain = not is_counted and has_samples_first(batch, made)
            nbytes = sum(t.nbytes for t in tensors_of(batch))
            if not is_plain or nbytes * n <= BATCH_BYTES * made:
                batch, made = workload.make_batch(n), n

        self.real = batch
        self.parts.clear()
        self.hidden.clear()
        self.shapes.append([t.shape[1:] for t in tensors_of(batch)])
        # the size of other kinds of batches may not be affine in the number of samples
        self.tracker.recording.is_ragged |= not is_plain or self.shapes[0] != self.shapes[-1]
        return self._faked(batch, made, n)

    def count(self, batch: Any) -> Any:
        """Return the number of samples in a batch or micro-batch, counted in the real one."""
        assert self.workload.count_samples is not None
        with for_real():
            return self.workload.count_samples(self.parts.get(id(batch), self.real))

    def split(self, _: Any, sizes: list[int]) -> Any:
        """Return the micro-batches of the last batch."""
        assert self.workload.split_batch is not None
        with for_real():
            found = self.workload.split_batch(self.real, sizes)
        if not isinstance(found, list | tuple):
            return found

        self.hidden.clear()
        fakes = [self._faked(part) for part in found]
        self.parts.update((id(fake), part) for fake, part in zip(fakes, found, strict=True))
        return fakes

    def _faked(self, batch: Any, made: int = 0, n: int = 0) -> Any:
        """Return a real batch as fake tensors, with n samples instead of `made` if n is larger."""

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            like = self.mode.from_tensor(tensor)
            if made < n and tensor.ndim and tensor.shape[0] == made:
                whole = like.new_empty((n, *tensor.shape[1:]))
                return whole.requires_grad_(tensor.requires_grad)
            if not tensor.is_floating_point():
                self.tracker.outputs.values.learn(like, tensor)
            return like

        faked = map_tensors(fake, batch)
        if self.tracker.device_type == "cpu":
            self.hidden += [self.mode.from_tensor(t).clone() for t in _hidden_tensors(faked)]

        return faked


def _hidden_tensors(batch: Any) -> list[torch.Tensor]:
    """Return real tensors in the objects of a batch that `copy.deepcopy` does not copy.

    A graph of PyTorch Geometric, for instance, shares the tables of its parts with its copies.
    """
    found: dict[int, torch.Tensor] = {}
    waiting = [leaf for leaf in pytree.tree_leaves(batch) if is_object(leaf)]
    seen = {id(leaf) for leaf in waiting}

    while waiting and len(seen) < MOST_OBJECTS:
        for inner in gc.get_referents(waiting.pop()):
            if id(inner) in seen or isinstance(inner, NO_DATA):
                continue

            seen.add(id(inner))
            if not isinstance(inner, torch.Tensor):
                waiting.append(inner)
            elif not isinstance(inner, FakeTensor) and inner.device.type == "cpu":
                found.setdefault(storage_key(inner.untyped_storage()), inner)

    return list(found.values())


def _build_model(
    build: Callable[[], torch.nn.Module], mode: FakeTensorMode, tracker: Tracker
) -> torch.nn.Module:
    """Build a model of fake tensors; if that fails, build it otherwise and replace its tensors."""
    state = torch.get_rng_state()
    recording, learn = tracker.recording, tracker.outputs.values.learn
    try:
        return build()
    except Exception as error:  # fake tensors raise many kinds of errors
        torch.set_rng_state(state)
        outline = outline_of(build)
        if outline.quantized is not None:
            return made_fake(outline.quantized, mode, partial(_learn_small, learn))
        _check_real_build(error, outline)

        torch.set_rng_state(state)
        with unset_fake_temporarily(), without_modes():
            with _errors_of_memory(error):
                model = build()
            if not isinstance(model, torch.nn.Module):
                return model
            check_shapes(model)
            formats = own_formats(model)
            if formats:
                model.to("cpu")  # this makes the parameters quantize themselves, as in a real step

        if formats:
            recording.notes += (
                "The model was built for real, because "
                f"{' and '.join(formats)} can only quantize real parameters.",
            )
        else:
            recording.assumptions.append(
                f"The model was built for real: its build raised {type(error).__name__} on "
                "fake tensors."
            )
        return made_fake(model, mode, learn)


def _copied(
    mode: FakeTensorMode, tracker: Tracker, tensor: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """Return a fake copy of a real tensor of the loss, whose values the loss may read."""
    with for_real():
        real = tensor.detach()
    made = mode.from_tensor(real).to(device, copy=True)
    tracker.outputs.values.learn(made, real)
    made.numpy = real.numpy  # type: ignore[method-assign]
    return made


def _check_real_build(error: Exception, outline: Outline) -> None:
    """Raise an error if the model need not, or cannot, be built for real.

    Args:
        error: that its build raised over fake tensors.
        outline: of the same build over ordinary tensors without memory.
    """
    again, is_large = outline.error, outline.nbytes > REAL_BYTES
    is_same = isinstance(again, MemlabError) or (again and said_by(again) == said_by(error))
    if again is not None and is_same and is_large:
        raise again from None  # it has nothing to do with the tensors
    available = available_memory_bytes()
    if again is not None and is_out_of_memory(again):
        raise _too_large(error, "takes more than there is", available)
    if available is not None and outline.nbytes > available:
        raise _too_large(error, f"takes {format_bytes(outline.nbytes)}", available)


@contextlib.contextmanager
def _errors_of_memory(error: Exception) -> Iterator[None]:
    """Say why a model is built for real, if that takes more memory than there is."""
    available = available_memory_bytes()
    try:
        with _Within(available):
            yield
    except Exception as raised:
        if not isinstance(raised, _Exceeded) and not is_out_of_memory(raised):
            raise
        raise _too_large(error, "takes more than there is", available) from None


def _too_large(error: Exception, takes: str, available: int | None) -> UnsupportedError:
    there_is = "this machine has too little memory"
    if available is not None:
        there_is = f"{format_bytes(available)} of memory are available here"
    return UnsupportedError(
        f"build_model raises {said_by(error)} over tensors without memory, and the model cannot be "
        f"built for real instead: it {takes}, and {there_is}; mend what raises this error, build a "
        "model of fewer layers, or predict on a machine with more memory"
    )


class _Exceeded(Exception):
    """The tensors of a build take more memory than there is."""


class _Within(TorchDispatchMode):
    """Ends a build whose tensors take more memory than there is, before they are filled."""

    def __init__(self, most_bytes: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._most = most_bytes
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            if tensor.layout is not torch.strided or tensor.device.type != "cpu":
                continue
            storage = tensor.untyped_storage()
            key = storage_key(storage)
            if key not in self._live:
                self._live[key] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, key, None)
        if self._most is not None and sum(self._live.values()) > self._most:
            raise _Exceeded
        return out


def _learn_small(learn: Learn, fake: torch.Tensor, real: torch.Tensor) -> None:
    """Learn the values of a tensor of an outlined model, whose large tensors have none."""
    if real.nbytes <= MOST_WITH_VALUES:
        learn(fake, real)
