"""Every rank holds the whole model: DistributedDataParallel, with sharded optimizer state or not.

Sources: `torch.nn.parallel.DistributedDataParallel` and
`torch.distributed.optim.ZeroRedundancyOptimizer`, with their defaults. Gradients are copied into
buckets of 25 MiB (the first of 1 MiB), which stay allocated between steps, and averaged bucket by
bucket while backward goes on. Left out: `gradient_as_bucket_view`, static graphs, and parameters
that some forwards do not use, which raise an error.
"""

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from memlab.errors import UnsupportedError


class Replica(DistributedDataParallel):
    """A replicated model that also gives the attributes of the model, as a loss may read them."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Run the model.

        Raises:
            UnsupportedError: the backward before gave no gradient to a parameter.
        """
        try:
            return super().forward(*inputs, **options)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            if found is None:
                raise
            names = [name for name, p in self.module.named_parameters() if p.requires_grad]
            raise unused([names[int(number)] for number in found[1].split()]) from error

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapper, or else of the model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def unused(names: Sequence[str]) -> UnsupportedError:
    """Return the error for parameters that the loss does not use."""
    quoted = ", ".join(map(repr, names[:3]))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return UnsupportedError(
        f"the loss does not use the parameters {quoted}{more}, and DistributedDataParallel raises "
        "an error if a parameter gets no gradient; set their requires_grad to False in "
        "build_model, or use sharding='zero3'"
    )


def replicate(model: torch.nn.Module, group: Any = None) -> Replica:
    """Return the model as DistributedDataParallel runs it in a group of ranks, or in all."""
    return Replica(model, process_group=group)


def in_micro_batch(
    replica: Replica,
) -> Callable[[bool], contextlib.AbstractContextManager[None]]:
    """Return a function that gives the context of a micro-batch."""
    return lambda is_synced: contextlib.nullcontext() if is_synced else replica.no_sync()


def with_sharded_state(
    parameters: list[torch.nn.Parameter],
    make_one: Callable[[Any], torch.optim.Optimizer],
    learning_rate: float,
    group: Any = None,
) -> torch.optim.Optimizer:
    """Return an optimizer that keeps the state of this rank's share of the parameters only.

    After an update each rank sends its parameters to all others of a group, or to all.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer  # 0.1 s that few need

    def kind(groups: Any, lr: float) -> torch.optim.Optimizer:
        return make_one(groups)  # with a rate of its own, which is the same

    made: Any = kind  # any function of parameter groups will do as a class
    return ZeroRedundancyOptimizer(
        parameters, optimizer_class=made, process_group=group, lr=learning_rate
    )
