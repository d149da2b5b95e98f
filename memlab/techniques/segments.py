"""Expandable segments: CUDA's caching allocator grows one segment a pool by pages.

Source: `PYTORCH_ALLOC_CONF=expandable_segments:True` in PyTorch's notes on CUDA. Without it a free
block serves no request that is larger, and stays reserved; with it what is reserved comes near to
what is allocated, which is as it was. Left out: a CPU, which has no caching allocator.
"""

import torch

from memlab.config import StepConfig
from memlab.errors import UnsupportedError
from memlab.techniques.source import Source

_switched = False  # by us: what a person has set in the environment stays


def check(config: StepConfig, device: torch.device) -> None:
    """Raise UnsupportedError on a CPU."""
    if config.expandable_segments and device.type == "cpu":
        raise UnsupportedError(
            "expandable_segments=True does nothing on a CPU, which has no caching allocator; use "
            "expandable_segments=False, or memlab.predict for a card: device='h200'"
        )


def apply(config: StepConfig, device: torch.device) -> None:
    """Set the allocator of this process, for all that it reserves from now on."""
    global _switched
    if device.type == "cuda" and config.expandable_segments != _switched:
        torch.cuda.empty_cache()
        torch.cuda.memory._set_allocator_settings(
            f"expandable_segments:{config.expandable_segments}"
        )
        _switched = config.expandable_segments


def source(config: StepConfig) -> Source:
    """Return what a script sets."""
    if not config.expandable_segments:
        return Source()
    setting = 'torch.cuda.memory._set_allocator_settings("expandable_segments:True")'
    return Source(before=(setting,))
