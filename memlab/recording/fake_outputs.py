"""`FakeOutputs`: what an operator returns over fake tensors, and what is known of the values in it.

The idea. Fake tensors have shapes and no values, and most operators need no more: their kernel for
fake tensors says the shapes of what they return. A step that asks for values is answered from the
first of these that knows:

    values.py     small tensors of known values, such as a mask of ones: operators on them are run
                  for real beside the fake ones
    draws.py      random numbers, drawn for real from the step's seed
    unknown.py    nothing is known: a value is assumed, and the recording says which

For `if (mask.sum() > 3): ...` over `mask = torch.ones(4)`:

    operator           fake output      known of its values
    aten::ones         (4,)             1, 1, 1, 1
    aten::sum          ()               4
    aten::gt           ()               True
    aten::_local_scalar_dense           the step asks for a value, and gets True

An operator that was run before, with the same signature, is not run again where no values matter:
`repeats.py` makes its outputs. `views.py` makes those of views.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memlab.errors import UnsupportedError
from memlab.operators.signatures import Signature
from memlab.recording import fake_kernels, real_strides
from memlab.recording.draws import Draws
from memlab.recording.faking import accumulates_in_place
from memlab.recording.number_formats import check_formats
from memlab.recording.recording import Recording
from memlab.recording.repeats import Repeats
from memlab.recording.sparse import Sparse, are_sparse
from memlab.recording.unknown import Guesses, UnknownValues, is_mask
from memlab.recording.values import PICKS, Values, tensors_in
from memlab.recording.views import view_of
from memlab.torch_private.fakes import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

aten = torch.ops.aten
COLLECTIVES = "c10d"  # what they return comes from other ranks
# what they return depends on more than their signatures
NEVER_REPEATED = frozenset(
    (
        aten.add.Tensor, aten.index.Tensor, aten._to_copy.default, aten.all.default, aten.all.dim,
        aten._is_all_true.default, aten.eq.Tensor, aten.ne.Tensor,
    )
)  # fmt: skip


class FakeOutputs:
    """The outputs of the operators of one attempt.

    Attributes:
        values: what is known of fake tensors.
        unknown: what is assumed of them.
        sparse: the sparse tensors among them.
        is_by_values: whether the last operator returned as much as values say.

    Args:
        device_type: where the step runs.
        recording: of the attempt; its last interval says whether a step has begun.
        draws: what random operators draw.
        guesses: what is assumed of values, from one attempt to the next.
        assume: called with what the run does, what is assumed, and what that decides.
        place: returns where the run is.
    """

    def __init__(
        self,
        device_type: str,
        recording: Recording,
        draws: Draws,
        guesses: Guesses,
        assume: Callable[[str, str, str], None],
        place: Callable[[], object],
    ) -> None:
        self.values = Values()
        self.unknown = UnknownValues(self.values, guesses, assume, place)
        self.sparse = Sparse(self.values, device_type, assume, place)
        self.is_by_values = False
        self._repeats = Repeats(device_type)
        self._device_type = device_type
        self._recording = recording
        self._draws = draws
        self._place = place

    def of(self, func: Any, signature: Signature | None, args: Any, kwargs: Any) -> Any:
        """Return the operator's outputs, and remember what is known of their values."""
        self.is_by_values = False
        again = view_of(func, args, kwargs, self.values, self._device_type)
        if again is None:
            again = self._repeats.outputs_of(signature, args, kwargs, self.values)
        if again is not None:
            return again

        out = self._run(func, args, kwargs)
        if are_sparse(out):
            raise self.sparse.refusal(func)
        if func.namespace == COLLECTIVES:
            self.values.forget_written(func, args, kwargs)
            return out
        if signature is not None and self._device_type == "cpu":
            out = real_strides.as_on_cpu(func, signature, out)
        self._learn(func, signature, args, kwargs, out)
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the operator's fake output."""
        check_formats(func, args)
        try:
            if func is aten.add.Tensor and accumulates_in_place(args):
                return aten.add_.Tensor(*args)
            if func is aten.index.Tensor and any(is_mask(index) for index in args[1]):
                return self._by_values(self.unknown.select(args))
            if func in fake_kernels.OWN:
                return fake_kernels.OWN[func](*args, **kwargs)
            if func is aten._to_copy.default and kwargs.get("device") is not None:
                args[0].constant = None  # a real value cannot follow to a fake device
            return func(*args, **kwargs)
        except DataDependentOutputException:
            return self.unknown.value(func, args, self.values.run(func, args, kwargs))
        except DynamicOutputShapeException:
            real = self.values.run(func, args, kwargs)
            if real is None:
                return self._by_values(self.unknown.largest(func, args))
            return self._by_values(self.unknown.shaped(args, real))
        except UnsupportedOperatorException as error:
            raise UnsupportedError(
                f"{self._place()}: operator {func} has no fake kernel, so that its outputs cannot "
                "be known without running it; register one with torch.library.register_fake"
            ) from error

    def _by_values(self, out: Any) -> Any:
        """Remember that the size of this operator's output depends on values."""
        self.is_by_values = True
        return out

    def _learn(
        self, func: Any, signature: Signature | None, args: Any, kwargs: Any, out: Any
    ) -> None:
        """Remember what is known, or assumed, of the outputs' values; else their shapes alone."""
        real = self.values.run(func, args, kwargs, out)
        if real is None and torch.Tag.nondeterministic_seeded in func.tags:
            real = self._drawn(func, args, kwargs, out)
        if real is not None:
            is_assumed = self.values.are_assumed(args)
            for fake, value in zip(tensors_in(out), tensors_in(real), strict=True):
                self.values.learn(fake, value, is_assumed=is_assumed)
            return

        assumed = self.values.assumed(func, args, out)
        for at, value in assumed.items():
            self.values.learn(tensors_in(out)[at], value, is_assumed=func in PICKS)
        self.unknown.note_check(func, out)
        if signature is not None and not assumed and not self._is_special(func):
            self._repeats.learn(signature, func, args, kwargs, out)

    def _drawn(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """Return what a random operator drew, in a step: None if that is not known."""
        if self._recording.intervals[-1].step < 0:
            return None
        return self._draws.drawn(func, args, kwargs, out, self.values)

    def _is_special(self, func: Any) -> bool:
        """Return whether each call of an operator has to be looked at, even if it is repeated."""
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        return func in NEVER_REPEATED or (is_random and self._draws.are_followed)
