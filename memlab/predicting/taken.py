"""What a step on a card takes where there is room: the middle of several replays.

cuDNN does not say what its convolutions take (`costs/cudnn_workspace.py`). So the caching allocator
is replayed with each hypothesis about it, and the one in the middle is what a person is shown. What
the step *needs* is the replay without any of these workspaces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memlab.allocator.replay import AllocatorSettings
from memlab.costs.cudnn_workspace import Workspaces, middle, take_workspace, with_workspaces
from memlab.costs.memory_widths import weights
from memlab.costs.targets import Kernels
from memlab.devices.cards import Card
from memlab.predicting.forecast import replayed
from memlab.recording.assembly import sizes_of
from memlab.recording.program import Program

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt  # it costs 5 ms at import


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Taken:
    """The bytes of every block of a program, (blocks,), int64.

    Attributes:
        own: with the workspaces of the hypothesis in the middle.
        least: without workspaces of convolutions.
        has_workspaces: whether it matters for the peak what convolutions take.
        settings: of the caching allocator.
    """

    own: npt.NDArray[np.int64]
    least: npt.NDArray[np.int64]
    has_workspaces: bool
    settings: AllocatorSettings


def taken(
    program: Program,
    kernels: Kernels,
    card: Card | None,
    sizes: tuple[int, ...],
    settings: AllocatorSettings,
) -> Taken:
    """Return what a recorded run takes on a card, and the least that it needs.

    Args:
        program: of the run.
        kernels: without workspaces of convolutions.
        card: None for a card of unknown architecture.
        sizes: of the micro-batches.
        settings: of the caching allocator.
    """
    recording = program.recording
    least = sizes_of(recording, program.layout, kernels.effects)
    if not take_workspace(recording.operators, card):
        return Taken(own=least, least=least, has_workspaces=False, settings=settings)

    owns, reserved, allocated = {}, {}, set()
    for hypothesis in Workspaces:
        effects = with_workspaces(kernels.effects, recording.operators, card, hypothesis)
        owns[hypothesis] = sizes_of(recording, program.layout, effects)
        trace, reserved[hypothesis] = replayed(program.trace(owns[hypothesis], sizes), settings)
        allocated.add(int(trace.nbytes.cumsum().max()))

    if len(allocated) == len(set(reserved.values())) == 1:  # such as one patch embedding
        return Taken(own=least, least=least, has_workspaces=False, settings=settings)
    own = owns[middle(reserved, weights())]
    return Taken(own=own, least=least, has_workspaces=True, settings=settings)
