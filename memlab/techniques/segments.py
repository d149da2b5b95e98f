"""Expandable segments: CUDA's caching allocator grows one segment a pool by pages.

Source: `PYTORCH_ALLOC_CONF=expandable_segments:True` in PyTorch's notes on CUDA. Without it a free
block serves no request that is larger, and stays reserved; with it what is reserved comes near to
what is allocated, which is as it was. Left out: a CPU, which has no caching allocator.
"""

from collections.abc import Iterator

import torch

from memlab.config import StepConfig
from memlab.techniques.source import ScriptLines
from memlab.techniques.technique import Keeps, Refusal, Setup, Technique, switch
from memlab.torch_private.cuda import set_allocator

_switched = False  # by us: what a person has set in the environment stays


def refusals(asked: Setup) -> Iterator[Refusal]:
    """Yield what refuses it: a CPU."""
    if asked.config.expandable_segments and asked.device.type == "cpu":
        yield Refusal(
            why="expandable_segments=True does nothing on a CPU, which has no caching allocator",
            remedies=({"expandable_segments": False},),
            otherwise="memlab.predict for a card: device='h200'",
        )


def apply(config: StepConfig, device: torch.device) -> None:
    """Set the allocator of this process, for all that it reserves from now on."""
    global _switched
    if device.type == "cuda" and config.expandable_segments != _switched:
        torch.cuda.empty_cache()
        set_allocator(f"expandable_segments:{config.expandable_segments}")
        _switched = config.expandable_segments


def source(asked: Setup) -> ScriptLines:
    """Return what a script sets."""
    if not asked.config.expandable_segments:
        return ScriptLines()
    setting = 'torch.cuda.memory._set_allocator_settings("expandable_segments:True")'
    return ScriptLines(before=(setting,))


def says(asked: Setup) -> str:
    """Return what it does now."""
    if not asked.config.expandable_segments:
        return ""
    return "segments grow by pages, which lowers what is reserved, not what is allocated"


SEGMENTS = Technique(
    fields=("expandable_segments",),
    keeps=Keeps.ROUNDED,
    examples={"expandable segments": {"expandable_segments": True}},
    changes_plans=False,  # a plan is of allocated bytes
    refusals=refusals,
    source=source,
    controls=(
        switch(
            "expandable_segments",
            "expandable segments",
            "in expandable segments",
            "not in expandable segments",
        ),
    ),
    says=says,
)
