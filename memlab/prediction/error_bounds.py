"""How far off predicted memory of a card may be where no public run says it.

`memory.json` beside this file is written by `python -m benchmarks.calibrate_memory`, which says
how: the weights of hypotheses about cuDNN, which does not say what it takes, and the half-width of
what a step needs. That was only bracketed, by runs under caps: its half-width is by how much these
contradict what is predicted. The widths of peaks are those of `evidence.py`.

A step with `compile=True` is recorded as the compiler plans it. For a card its width is how far
runs of one program were apart, which others had compiled (`OF_ONE_PROGRAM`).
Functions and modules that a person has compiled are recorded as they were written, and bounds of
what they take compiled follow from the recording (`bounds_of_compiled`).
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from memlab._util.units import format_bytes
from memlab.config import StepConfig
from memlab.cost_model.cuda_kernels import Workspaces
from memlab.trace import Phase
from memlab.tracing.program import Program
from memlab.tracing.recording import OpTrace

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import

FILE = Path(__file__).parent / "memory.json"
# tensors of the largest size that the parts of one operator hold, where a compiler takes it apart:
# a softmax holds its input, the maximum, the exponential and the quotient
TEMPORARIES = 3
# Relative half-width within which nine in ten of 465 compiled runs on H100 and H200 lie of the
# median of their program (53 programs): `python -m benchmarks.compiled`, which says their source.
OF_ONE_PROGRAM = 0.0123
PLANNED = (
    "Inductor's plan of its buffers is that of torch {version}, and no compiled step on a card was "
    "compared with it. The uncertainty has in it how far compiled runs of one program were apart "
    "on others' cards{padding}."
)
PADDING = (
    ", and {size} that Inductor would take to pad a product of odd sizes if it finds that faster"
)


@functools.cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(FILE.read_text())
    return table


def weights() -> dict[Workspaces, float]:
    """Return the weight of each hypothesis about the workspaces of convolutions."""
    return {Workspaces(name): weight for name, weight in _table()["weights"].items()}


def width_of_needed() -> float:
    """Return the half-width of the bytes that a step needs."""
    found: float = _table()["needed"]["half_width"]
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """What is not known of a step because it, or a part of it, is compiled.

    Attributes:
        half_width: by which share of its peak the step may take more or less.
        share: of the step's time that the compiled part takes as it was written.
        notes: say so.
    """

    half_width: float = 0.0
    share: float = 0.0
    notes: tuple[str, ...] = ()


def planned_part(padded_bytes: int) -> Compiled:
    """Return what is not known of a step that Inductor has planned for a card.

    Args:
        padded_bytes: that padding of a product would take.
    """
    padding = PADDING.format(size=format_bytes(padded_bytes)) if padded_bytes else ""
    note = PLANNED.format(version=torch.__version__.partition("+")[0], padding=padding)
    return Compiled(half_width=OF_ONE_PROGRAM, notes=(note,))


def compiled_part(
    program: Program,
    config: StepConfig,
    own: npt.NDArray[np.int64],
    seconds: npt.NDArray[np.float64] | None,
    *,
    of_run: bool = False,
) -> Compiled:
    """Return what the compiled part of a step leaves unknown.

    Args:
        program: of the step.
        config: of the step.
        own: int64, (blocks,), bytes of every block as recorded.
        seconds: float64, (operators,); None if no time is known.
        of_run: whether the peak of all steps counts, not that of the last.
    """
    recording = program.recording
    if not recording.compiled:
        return Compiled()
    least, peak, most = bounds_of_compiled(program, config, own, of_run=of_run)
    share = 0.0
    if seconds is not None and seconds.any():
        share = float(seconds[_are_compiled(recording)].sum() / seconds.sum())
    names = " and ".join(dict.fromkeys(call.name for call in recording.compiled))
    note = (
        f"torch.compile makes other code of {names}, which is predicted as it was written: what "
        "compiled code keeps is decided while it compiles. "
        f"Compiled the {'run' if of_run else 'step'} takes from {format_bytes(least)} to "
        f"{format_bytes(most)}."
    )
    half_width = max(most - peak, peak - least) / peak
    return Compiled(half_width=half_width, share=share, notes=(note,))


def bounds_of_compiled(
    program: Program, config: StepConfig, own: npt.NDArray[np.int64], *, of_run: bool = False
) -> tuple[int, int, int]:
    """Return the least peak of a step with compiled parts, the recorded one, and the most.

    At the least a compiled part keeps nothing for backward: what its operators make or read lives
    only until an operator outside of it has read it for the last time, and a gradient is made when
    the backward ends. At the most it keeps all that it keeps uncompiled, holds the tensors of one
    operator's parts, and returns all gradients at once where they are freed one by one.
    """
    recording, layout = program.recording, program.layout
    inside, count = _are_compiled(recording), len(own)
    rows = len(layout.block)
    birth, death = np.zeros(count, np.int64), np.full(count, rows, np.int64)
    birth[layout.block[layout.is_birth]] = np.flatnonzero(layout.is_birth)
    death[layout.block[~layout.is_birth]] = np.flatnonzero(~layout.is_birth)
    is_touched, last_read = np.zeros(count, bool), np.full(count, -1, np.int64)
    maker = np.array([block.operator for block in recording.blocks], np.int64)
    maker = np.concatenate([maker, np.repeat(layout.kernels, 2)])
    is_made = inside[maker]
    end_of = np.searchsorted(layout.operator, np.arange(len(recording.operators)) + 1, "right")
    for number, operator in enumerate(recording.operators):
        used = [*operator.reads, *operator.writes]
        if inside[number]:
            is_touched[used] = True
        else:
            last_read[used] = end_of[number]

    steps, phases = (
        np.array([getattr(interval, name) for interval in recording.intervals])
        for name in ("step", "phase")
    )
    born_in, phase = layout.interval[birth], phases[layout.interval[birth]]
    is_of_model = (steps[born_in] >= 0) & ((phase == Phase.FORWARD) | (phase == Phase.BACKWARD))
    last_row = np.searchsorted(layout.interval, born_in, "right") - 1
    outlives = death > _end_of_model(program, birth)
    touched = (is_touched | is_made) & is_of_model
    earlier = np.where(touched & outlives & is_made, np.maximum(birth, last_row), birth)
    sooner = np.where(touched & ~outlives, np.minimum(death, np.maximum(last_read, birth)), death)
    in_step = steps[layout.interval] >= (steps.min() if of_run else min(1, steps.max()))
    recorded = _peak(own, birth, death, in_step)
    least = _peak(own, earlier, sooner, in_step)

    made = own[is_made]
    room = TEMPORARIES * int(made.max(initial=0))
    if config.accumulation_steps > 1 or config.optimizer_in_backward:
        weights = [block for block in recording.parameters if is_touched[block]]
        room += int(own[weights].sum())
    return least, recorded, recorded + room


def _are_compiled(recording: OpTrace) -> npt.NDArray[np.bool_]:
    """Return which operators are of a compiled part, in forward or backward."""
    forward = np.zeros(len(recording.operators), bool)
    for call in recording.compiled:
        forward[call.first : call.end] = True
    of = np.array([operator.forward for operator in recording.operators], np.int64)
    return forward | ((of >= 0) & forward[of])


def _end_of_model(program: Program, birth: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return for each block the last row of the backward that follows its birth."""
    phases = [interval.phase for interval in program.recording.intervals]
    ends = np.searchsorted(
        program.layout.interval,
        [at for at, phase in enumerate(phases) if phase is Phase.BACKWARD],
        "right",
    )
    ends = np.append(np.sort(ends), len(program.layout.block))
    found: npt.NDArray[np.int64] = ends[np.searchsorted(ends, birth, "right")] - 1
    return found


def _peak(
    own: npt.NDArray[np.int64],
    birth: npt.NDArray[np.int64],
    death: npt.NDArray[np.int64],
    in_step: npt.NDArray[np.bool_],
) -> int:
    """Return the most bytes of blocks that live from one row to another, during the step."""
    change = np.zeros(len(in_step) + 1, np.int64)
    lives = death > birth
    np.add.at(change, birth[lives], own[lives])
    np.add.at(change, death[lives], -own[lives])
    return int(change.cumsum()[:-1][in_step].max())
