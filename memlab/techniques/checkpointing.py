"""Whole-block activation checkpointing: each repeated block keeps its input and is run again.

Source: `torch.utils.checkpoint`, non-reentrant. Random state is preserved, so dropout draws the
same mask twice; running statistics of normalisation layers are updated once, by the forward alone.
Not covered: policies within a block, and models without repeated blocks.
"""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from memlab.errors import UnsupportedError


def find_blocks(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the repeated blocks of a model by path; empty if it has none.

    Blocks are the children of one class in any `ModuleList` or `Sequential`. Of all such classes
    the one that holds most of the parameters is taken, and of equals the one with most blocks.
    """
    groups: dict[type, dict[str, torch.nn.Module]] = defaultdict(dict)
    for path, container in model.named_modules():
        if isinstance(container, torch.nn.ModuleList | torch.nn.Sequential):
            for name, child in container.named_children():
                if next(child.children(), None) is not None and not isinstance(
                    child,
                    torch.nn.ModuleList,  # has no forward of its own
                ):
                    groups[type(child)][f"{path}.{name}".lstrip(".")] = child
    return max(
        (blocks for blocks in groups.values() if len(blocks) > 1),
        key=lambda blocks: (_num_parameters(blocks), len(blocks)),
        default={},
    )


def apply(model: torch.nn.Module, *, compiled: bool) -> None:
    """Checkpoint every repeated block of the model, in place.

    Args:
        model: as built; no block may be checkpointed already.
        compiled: whether `torch.compile` will trace the model. Its graph updates running statistics
            once by itself, and it does not trace a context function.

    Raises:
        UnsupportedError: the model has no repeated blocks, or checkpoints itself.
    """
    blocks = find_blocks(model)
    if not blocks:
        raise UnsupportedError(
            f"checkpointing='blocks' found no repeated blocks in {type(model).__name__}; put them "
            "in a torch.nn.ModuleList or Sequential, or use accumulation_steps to save activations"
        )
    for path, block in blocks.items():
        if getattr(block, "gradient_checkpointing", False):
            raise UnsupportedError(
                f"{path} checkpoints itself already (gradient_checkpointing=True); build the model "
                "without it, or use checkpointing='none'"
            )
        norms = [
            m for m in block.modules() if isinstance(m, _NormBase) and m.running_mean is not None
        ]
        # forward is wrapped on the instance, so that paths, state dict and hooks stay as they are
        wrap = functools.partial(checkpoint, block.forward, use_reentrant=False)
        if norms and not compiled:
            wrap = functools.partial(
                wrap, context_fn=lambda n=norms: (contextlib.nullcontext(), _detached_statistics(n))
            )
        block.forward = wrap


@contextlib.contextmanager
def _detached_statistics(norms: list[_NormBase]) -> Iterator[None]:
    """Let a recompute update copies of the running statistics, and throw these away."""
    kept = [dict(norm._buffers) for norm in norms]
    for norm in norms:
        for name, buffer in norm._buffers.items():
            norm._buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for norm, buffers in zip(norms, kept, strict=True):
            norm._buffers.update(buffers)


def _num_parameters(blocks: dict[str, torch.nn.Module]) -> int:
    return sum(p.numel() for p in {p for block in blocks.values() for p in block.parameters()})
