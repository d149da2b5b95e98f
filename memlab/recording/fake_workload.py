"""A workload whose model and batches are of fake tensors: what a prediction records.

A batch is data, which may come from anywhere, so it is made for real, and so is a model that cannot
be built of fake tensors; their tensors are then replaced by fake ones.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from memlab.arguments.units import MIB
from memlab.devices.generators import preserved_random_state
from memlab.recording.built import made_fake, own_formats
from memlab.recording.recording import Recording
from memlab.recording.tracker import Tracker
from memlab.recording.values import for_real
from memlab.techniques.accumulation import has_samples_first
from memlab.techniques.batch_tensors import is_object, map_tensors
from memlab.techniques.batches import tensors_of
from memlab.workload import Workload

MOST_OBJECTS = 100_000  # that are looked at in a batch
NO_DATA = (type, ModuleType, FunctionType, torch.nn.Module)
BATCH_BYTES = 256 * MIB  # a larger batch is not made: its shapes follow from one of two samples


def over_fakes(workload: Workload, mode: FakeTensorMode, tracker: Tracker) -> Workload:
    """Return the workload with a model and batches of fake tensors."""
    batches = _Batches(workload, mode, tracker)
    # weights of micro-batches change no size, and counting loss terms would read values
    return dataclasses.replace(
        workload,
        build_model=partial(_build_model, workload.build_model, mode, tracker.recording),
        make_batch=batches.make,
        num_loss_terms=None,
        count_samples=workload.count_samples and batches.count,
        split_batch=workload.split_batch and batches.split,
    )


class _Batches:
    """Makes, counts and splits batches of fake tensors as the workload does with real ones.

    Attributes:
        real: what the last fake batch was made of.
        parts: the real micro-batches that the last one was split into, by identity of the fake.
        hidden: fake tensors in the place of those that the objects of a batch keep to themselves.
        shapes: of the tensors of each batch so far, without their first dimension.
    """

    def __init__(self, workload: Workload, mode: FakeTensorMode, tracker: Tracker) -> None:
        self.workload, self.mode, self.tracker = workload, mode, tracker
        self.real: Any = None
        self.parts: dict[int, Any] = {}
        self.hidden: list[torch.Tensor] = []
        self.shapes: list[list[torch.Size]] = []

    def make(self, n: int) -> Any:
        """Return n samples; of a large batch two are made, and given their number afterwards."""
        workload, made = self.workload, min(n, 2)
        is_counted = workload.count_samples is not None or workload.split_batch is not None
        with for_real():
            with preserved_random_state(torch.device("cpu")):
                batch = workload.make_batch(made)
            is_plain = not is_counted and has_samples_first(batch, made)
            nbytes = sum(t.nbytes for t in tensors_of(batch))
            if not is_plain or nbytes * n <= BATCH_BYTES * made:
                batch, made = workload.make_batch(n), n

        self.real = batch
        self.parts.clear()
        self.hidden.clear()
        self.shapes.append([t.shape[1:] for t in tensors_of(batch)])
        # of batches of another kind nothing is known to be affine in their number of samples
        self.tracker.recording.is_ragged |= not is_plain or self.shapes[0] != self.shapes[-1]
        return self._faked(batch, made, n)

    def count(self, batch: Any) -> Any:
        """Return the samples in a batch or a part of it: the real one's, since values decide."""
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
        """Return a real batch of fake tensors, with n samples where `made` are fewer."""

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            like = self.mode.from_tensor(tensor)
            if made < n and tensor.ndim and tensor.shape[0] == made:
                return like.new_empty((n, *tensor.shape[1:]))
            if not tensor.is_floating_point():
                self.tracker.values.learn(like, tensor)
            return like

        faked = map_tensors(fake, batch)
        if self.tracker.device_type == "cpu":
            self.hidden += [self.mode.from_tensor(t).clone() for t in _hidden_tensors(faked)]
        return faked


def _hidden_tensors(batch: Any) -> list[torch.Tensor]:
    """Return real tensors that the objects of a batch hold where `copy.deepcopy` does not go.

    A graph of PyTorch Geometric, for one, shares the tables of its parts with all of its copies.
    """
    found: dict[int, torch.Tensor] = {}
    waiting = [leaf for leaf in tree_leaves(batch) if is_object(leaf)]
    seen = {id(leaf) for leaf in waiting}
    while waiting and len(seen) < MOST_OBJECTS:
        for inner in gc.get_referents(waiting.pop()):
            if id(inner) in seen or isinstance(inner, NO_DATA):
                continue
            seen.add(id(inner))
            if not isinstance(inner, torch.Tensor):
                waiting.append(inner)
            elif not isinstance(inner, FakeTensor) and inner.device.type == "cpu":
                found.setdefault(inner.untyped_storage()._cdata, inner)
    return list(found.values())


def _build_model(
    build: Callable[[], torch.nn.Module], mode: FakeTensorMode, recording: Recording
) -> torch.nn.Module:
    """Build a model of fake tensors, or for real where they refuse, and replace its tensors."""
    state = torch.get_rng_state()
    try:
        return build()
    except Exception as error:  # of any kind: fake tensors refuse in many ways
        torch.set_rng_state(state)
        with for_real():
            model = build()
            if not isinstance(model, torch.nn.Module):
                return model
            formats = own_formats(model)
            if formats:
                model.to("cpu")  # they quantize themselves, as they do in a step that is built

        if formats:
            recording.notes += (
                "The model was built for real, and its parameters were quantized, as "
                f"{' and '.join(formats)} does only where there is memory.",
            )
        else:
            recording.assumptions.append(
                f"The model was built for real: its build raised {type(error).__name__} on "
                "fake tensors."
            )
        return made_fake(model, mode)
