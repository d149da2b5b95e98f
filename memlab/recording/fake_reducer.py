"""What DistributedDataParallel does between gradients and ranks, over fake tensors.

Its own `Reducer` is written in C++ and reads the memory of tensors, which fake ones do not have.
This one runs the same operators in the same order. Source: torch/csrc/distributed/c10d/reducer.cpp.

The idea. Gradients are averaged in buckets, which stay allocated from step to step:

    construction           one bucket for all parameters
    a gradient is ready    it is copied into its bucket, divided by the number of ranks
    a bucket is full       it is averaged over the ranks, if all buckets before it have been
    the end of backward    buckets are copied back into the gradients
    the next forward       once: buckets are made anew, in the order in which gradients were ready,
                           of 1 MiB for the first and 25 MiB for the others

The old buckets are freed before new ones are made. In a micro-batch whose gradients are not
averaged none of it happens. A parameter without a gradient leaves its bucket open, and the next
forward raises an error, there as here. Left out: sparse parameters, and buckets as gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from memlab.recording.faking import is_dense
from memlab.techniques.sharding.replicated import unused
from memlab.torch_private.ranks import buckets_of, call_after_backward


class FakeLogger:
    """Stands for the logger of the reducer: it does nothing."""

    def __init__(self, reducer: FakeReducer) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        """Return a function that does nothing."""
        return lambda *args, **kwargs: None


class FakeReducer:
    """Averages gradients as `torch.distributed.Reducer`, whose arguments it takes."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        bucket_indices: list[list[int]],
        limits: list[int],
        group: Any,
        are_sparse: list[bool],
        bucket_bytes: int,
        find_unused: bool,
        as_views: bool,
        names: dict[int, str],
        first_bucket_bytes: int,
        *others: Any,
    ) -> None:
        self._parameters, self._group, self._names = list(parameters), group, names
        self._limits = (first_bucket_bytes, bucket_bytes)
        self._ready: list[int] = []  # in the order of the gradients of the first backward
        self._is_rebuilt = self._expects = False
        self._without: set[int] = set()  # parameters whose gradients an open backward waits for
        self._make_buckets(bucket_indices)
        this = weakref.ref(self)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_call, this, index))
            for index, parameter in enumerate(self._parameters)
        ]

    def set_logger(self, logger: FakeLogger) -> None:
        """Do nothing."""

    def prepare_for_forward(self) -> None:
        """Do nothing."""

    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None:
        """Expect a gradient of every parameter in the next backward."""
        self._expects = True
        self._pending = [len(bucket) for bucket in self._buckets]
        self._next = 0
        self._without = set(range(len(self._parameters)))

    def _rebuild_buckets(self) -> bool:
        """Make buckets in the order in which gradients were ready, once.

        Raises:
            UnsupportedError: the backward before gave no gradient to a parameter.
        """
        self._check_finished()
        if self._is_rebuilt or not self._ready:
            return False
        parameters = [self._parameters[index] for index in self._ready]
        buckets = buckets_of(parameters, self._limits, self._ready)
        self._is_rebuilt = True
        self._make_buckets(buckets)
        return True

    def _check_finished(self) -> None:
        """Raise UnsupportedError where DistributedDataParallel raises a RuntimeError."""
        if not 0 < len(self._without) < len(self._parameters):
            return

        raise unused([self._names[index] for index in sorted(self._without)])

    def _make_buckets(self, buckets: list[list[int]]) -> None:
        self._buckets = buckets
        self._flat: list[torch.Tensor] = []  # the old ones are freed first
        self._views: dict[int, torch.Tensor] = {}
        self._bucket_of = {at: n for n, bucket in enumerate(buckets) for at in bucket}
        for bucket in buckets:
            first = self._parameters[bucket[0]]
            count = sum(self._parameters[index].numel() for index in bucket)
            flat = torch.empty(count, dtype=first.dtype, device=first.device)
            self._flat.append(flat)
            offset = 0
            for index in bucket:
                like = self._parameters[index]
                strides = like.stride() if is_dense(like) else like.detach().contiguous().stride()
                self._views[index] = flat.as_strided(like.shape, strides, offset)
                offset += like.numel()

    def ready(self, index: int) -> None:
        """Copy a gradient into its bucket, and average the buckets that are full."""
        if not self._expects:
            return
        if not self._is_rebuilt:
            self._ready.append(index)
        gradient = self._parameters[index].grad
        assert gradient is not None
        with torch.no_grad():
            torch.mul(gradient, 1.0 / self._group.size(), out=self._views[index])
        self._without.discard(index)
        self._pending[self._bucket_of[index]] -= 1
        while self._next < len(self._buckets) and not self._pending[self._next]:
            dist.all_reduce(self._flat[self._next], group=self._group, async_op=True)
            self._next += 1
            if self._next == len(self._buckets):
                call_after_backward(self._finish)

    def _finish(self) -> None:
        self._expects = False
        with torch.no_grad():
            for bucket in self._buckets:
                for index in bucket:
                    gradient = self._parameters[index].grad
                    assert gradient is not None
                    gradient.copy_(self._views[index])


def _call(reducer: weakref.ref[FakeReducer], index: int, parameter: torch.Tensor) -> None:
    found = reducer()
    if found is not None:
        found.ready(index)
