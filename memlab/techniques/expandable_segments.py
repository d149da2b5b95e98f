"""Expandable segments: CUDA's caching allocator keeps one segment for each pool and grows it.

Source: `PYTORCH_ALLOC_CONF=expandable_segments:True` in PyTorch's notes on CUDA. Without it, a free
block cannot serve a larger request and stays reserved. With it, the reserved bytes come close to
the allocated bytes, which do not change. Left out: a CPU, which has no caching allocator.
"""

from collections.abc import Iterator

import torch

from memlab._util.torch_private.tensors import set_allocator
from memlab.config import StepConfig
from memlab.techniques.source import ScriptLines
from memlab.techniques.technique import Equivalence, Refusal, Setup, Technique, switch

_switched = False  # whether memlab switched it on; a setting in the environment is left alone


def refusals(setup: Setup) -> Iterator[Refusal]:
    """Refuse a CPU, where it would do nothing."""
    if setup.config.expandable_segments and setup.device.type == "cpu":
        yield Refusal(
            why="expandable_segments=True does nothing on a CPU, which has no caching allocator",
            remedies=({"expandable_segments": False},),
            otherwise="memlab.predict or memlab.export_script for a card: device='h200'",
        )


def apply(config: StepConfig, device: torch.device) -> None:
    """Set the allocator of this process, for everything that it reserves from now on."""
    global _switched
    if device.type == "cuda" and config.expandable_segments != _switched:
        torch.cuda.empty_cache()
        set_allocator(f"expandable_segments:{config.expandable_segments}")
        _switched = config.expandable_segments


def source(setup: Setup) -> ScriptLines:
    """Return what a script sets."""
    if not setup.config.expandable_segments:
        return ScriptLines()
    setting = 'torch.cuda.memory._set_allocator_settings("expandable_segments:True")'
    why = "# segments grow by pages, so that fewer bytes are reserved and not used"
    return ScriptLines(before=(why, setting))


def says(setup: Setup) -> str:
    """Return what it does now."""
    if not setup.config.expandable_segments:
        return ""
    return "segments grow by pages, which lowers reserved bytes but not allocated bytes"


SEGMENTS = Technique(
    fields=("expandable_segments",),
    equivalence=Equivalence.NUMERICAL,
    examples={"expandable segments": {"expandable_segments": True}},
    changes_plans=False,  # a plan counts allocated bytes only
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
