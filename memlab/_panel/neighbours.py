"""The settings next to the ones on screen, one of which a person is likely to ask for next.

They are predicted ahead while nothing else is asked for, so that the picture is there when a slider
moves. Pure functions of the settings; `forecasts.py` decides when they are predicted.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from memlab._panel.questions import Question
from memlab.errors import ConfigError
from memlab.techniques import every

BUDGET_STEP = 0.05  # between two positions of its slider; on the other two each is the double
LARGEST = {"batch_size": 2**8, "accumulation_steps": 2**5, "world_size": 2**12}  # of their sliders
SIZE = "workload_name"  # a workload with samples of another size has another name
SLIDERS = ("memory_budget", "accumulation_steps", SIZE, "batch_size", "world_size")
FARTHEST = 2  # positions from the one on screen


def neighbours(
    question: Question,
    precisions: Sequence[str],
    before: Question | None = None,
    sizes: Sequence[str] = (),
) -> list[Question]:
    """Return the settings that are one move of one control away, the likeliest first.

    A hand stays with the slider that it moved last, so the neighbours of that one come first. Of
    the others the near positions come before the far ones, and precisions come last. Settings that
    a technique refuses are left out.

    Args:
        question: the settings on screen.
        precisions: that the panel offers.
        before: the settings that were on screen before; None if there were none.
        sizes: the names of the workload in its sample sizes, ascending; empty if it has no others.
    """
    moved = [name for name in SLIDERS if before and _is_moved(name, before, question, sizes)]
    changes: list[tuple[str, Any]] = []
    for names in (moved, [name for name in SLIDERS if name not in moved]):
        for distance in range(1, FARTHEST + 1):
            for name in names:
                values = _at(question, name, distance, sizes)
                changes += [(name, value) for value in values]

    changes += [("precision", precision) for precision in precisions]
    changed = (_changed(question, name, value) for name, value in changes)
    kind = "cpu" if question.device == "cpu" else "cuda"
    return [
        one
        for one in changed
        if one is not None and one != question and not every.is_refused(one.config, kind)
    ]


def _changed(question: Question, name: str, value: Any) -> Question | None:
    """Return the question after a change; None if no config is like this.

    Every micro-batch needs a sample, and ranks divide a batch into equal parts.
    """
    if name == SIZE:
        return dataclasses.replace(question, workload_name=value)
    try:
        config = dataclasses.replace(question.config, **{name: value})
    except ConfigError:
        return None
    return dataclasses.replace(question, config=config)


def _at(question: Question, name: str, distance: int, sizes: Sequence[str]) -> Iterator[Any]:
    """Yield the two positions of a slider at this distance, the lower one first."""
    if name == SIZE:
        yield from _sizes_at(question, distance, sizes)
        return

    value = getattr(question.config, name)
    for sign in (-1, 1):
        if name == "memory_budget":
            budget = round(value + sign * distance * BUDGET_STEP, 2)
            if 0.0 <= budget <= 1.0:
                yield budget
        else:
            size = value * 2**distance if sign > 0 else value // 2**distance
            if 1 <= size <= LARGEST[name]:
                yield size


def _sizes_at(question: Question, distance: int, sizes: Sequence[str]) -> Iterator[str]:
    if question.workload_name in sizes:
        here = sizes.index(question.workload_name)
        for position in (here - distance, here + distance):
            if 0 <= position < len(sizes):
                yield sizes[position]


def _is_moved(name: str, before: Question, question: Question, sizes: Sequence[str]) -> bool:
    if name == SIZE:
        return before.workload_name != question.workload_name and before.workload_name in sizes
    return bool(getattr(before.config, name) != getattr(question.config, name))
