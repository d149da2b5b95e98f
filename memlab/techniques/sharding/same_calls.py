"""Check in the first micro-batch that all ranks run the same modules in the same order.

FSDP2 gathers a block when it runs, and reduces the gradients that a rank has. A rank that runs
another block than the others, such as the expert to which its tokens are routed, would get weights
or gradients of the wrong one, without an error. Left out: later micro-batches, compiled models.
"""

import contextlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from memlab.errors import UnsupportedError

Context = Callable[[bool], contextlib.AbstractContextManager[None]]


def checked_once(model: nn.Module, context: Context, device: torch.device) -> Context:
    """Return `context`, which also checks the calls of the first micro-batch.

    Args:
        model: fully sharded.
        context: of a micro-batch, by whether the ranks average their gradients after it.
        device: of this rank.

    Raises:
        UnsupportedError: in the micro-batch, in all ranks, before weights or gradients are mixed.
    """
    calls: Calls | None = Calls(model, device)

    @contextlib.contextmanager
    def checked(is_synced: bool) -> Iterator[None]:
        nonlocal calls
        first, calls = calls, None
        with context(is_synced), first or contextlib.nullcontext():
            yield

    return checked


class Calls:
    """The modules with parameters that this rank has run since the ranks last compared them."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.paths: list[str] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        """Compare before a block is gathered, and after forward."""
        for path, module in self.model.named_modules():
            is_unit = isinstance(module, FSDPModule)
            if is_unit:
                compare = self._comparing(path)
                self._hooks.append(module.register_forward_pre_hook(compare, prepend=True))
            elif any(True for _ in module.parameters(recurse=False)):
                self._hooks.append(module.register_forward_pre_hook(self._noting(path)))
        self._hooks.append(self.model.register_forward_hook(self._comparing("the end of forward")))

    def __exit__(self, *_: object) -> None:
        """Watch no more calls."""
        for hook in self._hooks:
            hook.remove()

    def _noting(self, path: str) -> Callable[..., None]:
        def note(*_: object) -> None:
            self.paths.append(path)

        return note

    def _comparing(self, path: str) -> Callable[..., None]:
        def compare(*_: object) -> None:
            self.paths.append(path)
            self._compare()
            self.paths.clear()

        return compare

    def _compare(self) -> None:
        """Raise an error in all ranks if they have run different modules."""
        digest = zlib.crc32("\n".join(self.paths).encode())
        ends = torch.tensor([digest, -digest], device=self.device)
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        most, least = ends.tolist()
        if most == -least:
            return
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, self.paths)
        other = next(rank for rank, paths in enumerate(found) if paths != found[0])
        place = next(
            index
            for index in range(len(found[0]) + len(found[other]))
            if found[0][index : index + 1] != found[other][index : index + 1]
        )
        first, second = (
            (paths[place] or "the model") if place < len(paths) else "nothing"
            for paths in (found[0], found[other])
        )
        raise UnsupportedError(
            f"rank 0 runs {first} where rank {other} runs {second}: FSDP2 gathers parameters and "
            "reduces gradients in the order in which modules run, so the ranks would train with "
            "one another's; let every rank run every module (an expert that gets no tokens, with "
            "none of them), or train in one process"
        )
