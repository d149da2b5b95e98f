"""What a step on a card takes where there is room: the middle of several replays.

cuDNN does not say what its convolutions take (`costs/cudnn_workspace.py`). So the caching allocator
is replayed with each hypothesis about it, and the one in the middle is what a person is shown. What
the step *needs* is the replay without any of these workspaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memlab.allocator.replay import AllocatorSettings
from memlab.costs.cudnn_workspace import Workspaces, middle, take_workspace, with_workspaces
from memlab.costs.targets import Kernels
from memlab.devices.cards import Card
from memlab.predicting.forecast import Replayed, replayed
from memlab.predicting.memory_widths import weights
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
        own_run: the recorded run with `own`.
        least_run: the same with `least`.
    """

    own: npt.NDArray[np.int64]
    least: npt.NDArray[np.int64]
    has_workspaces: bool
    own_run: Replayed
    least_run: Replayed


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
    owns = possible_sizes(program, kernels, card)
    least = owns[Workspaces.NONE]
    least_run = replayed(program.trace(least, sizes), settings)
    nothing = Taken(
        own=least, least=least, has_workspaces=False, own_run=least_run, least_run=least_run
    )
    if len(owns) == 1:
        return nothing

    runs = {Workspaces.NONE: least_run}
    for hypothesis, own in owns.items():
        if hypothesis is not Workspaces.NONE:
            runs[hypothesis] = replayed(program.trace(own, sizes), settings)

    reserved = {hypothesis: run.reserved_bytes for hypothesis, run in runs.items()}
    allocated = {int(run.given.nbytes.cumsum().max()) for run in runs.values()}
    if len(allocated) == len(set(reserved.values())) == 1:  # such as one patch embedding
        return nothing

    chosen = in_the_middle(reserved)
    return Taken(
        own=owns[chosen],
        least=least,
        has_workspaces=True,
        own_run=runs[chosen],
        least_run=least_run,
    )


def possible_sizes(
    program: Program, kernels: Kernels, card: Card | None
) -> dict[Workspaces, npt.NDArray[np.int64]]:
    """Return the bytes of every block by each hypothesis; by one alone where all say the same."""
    recording = program.recording
    found = {Workspaces.NONE: sizes_of(recording, program.layout, kernels.effects)}
    if take_workspace(recording.operators, card):
        for hypothesis in Workspaces:
            if hypothesis is not Workspaces.NONE:
                effects = with_workspaces(kernels.effects, recording.operators, card, hypothesis)
                found[hypothesis] = sizes_of(recording, program.layout, effects)
    return found


def in_the_middle(reserved: Mapping[Workspaces, int]) -> Workspaces:
    """Return the hypothesis whose peak of reserved bytes is the weighted median."""
    return middle(reserved, weights())
