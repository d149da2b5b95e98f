"""`compare`: what changed in bytes and time between two results, or two sets of them."""

from collections.abc import Sequence
from typing import Any

from memlab.arguments.checks import anything, checked, number
from memlab.changes.cost_changes import ORDER, CostChanges
from memlab.changes.judging import (
    MEMORY_TOLERANCE,
    TIME_TOLERANCE,
    is_other_hardware,
    judged,
)
from memlab.changes.reading import costs_of
from memlab.changes.setting_cost import SettingCost

MOST_TOLERANCE = 100.0  # a hundred times as much
WORDS = {"device_name": "processor or card", "threads": "number of threads"}


@checked(
    old=anything,
    new=anything,
    memory_tolerance=number(0.0, MOST_TOLERANCE),
    time_tolerance=number(0.0, MOST_TOLERANCE),
)
def compare(
    old: Any,
    new: Any,
    *,
    memory_tolerance: float = MEMORY_TOLERANCE,
    time_tolerance: float = TIME_TOLERANCE,
) -> CostChanges:
    """Return what changed in bytes and time from `old` to `new`.

    Settings are matched by workload, config, memory limit, device, and whether they are measured,
    predicted or recorded. What only one side has is listed, not judged. Of several results of one
    setting the last one counts, and a note says how many were left out.

    Args:
        old: a `StepResult`, several of them (a sweep too), the table of `memlab.results()`, or the
            path of a file: JSON that the command line wrote with `--json`, JSON or CSV of a table,
            or a store.
        new: the same, of the newer version.
        memory_tolerance: the relative change of a peak that counts as none, 0.005 for 0.5 %.
        time_tolerance: the same for the time of a step, to which noise is added: the spread of
            measured repeats, or the stated uncertainty of the predicted time of a CPU. Times of
            two processors or cards are not judged.

    Raises:
        MemlabError: an argument is not allowed, or holds no results.

    >>> import memlab
    >>> workload = memlab.workloads.get("gpt-small", num_layers=2, sequence_length=64)
    >>> result = memlab.recorded(workload, memlab.StepConfig(batch_size=4), "amd-epyc")
    >>> memlab.compare(result, [result]).ok
    True
    """
    before, old_notes = _by_setting("old", costs_of("old", old))
    after, new_notes = _by_setting("new", costs_of("new", new))
    changes = [
        judged(before[key], cost, memory_tolerance, time_tolerance)
        for key, cost in after.items()
        if key in before
    ]
    return CostChanges(
        changes=tuple(sorted(changes, key=lambda one: ORDER.index(one.verdict))),
        only_old=tuple(cost for key, cost in before.items() if key not in after),
        only_new=tuple(cost for key, cost in after.items() if key not in before),
        memory_tolerance=memory_tolerance,
        time_tolerance=time_tolerance,
        notes=(*old_notes, *new_notes, *_notes(before, after)),
    )


Costs = dict[tuple[Any, ...], SettingCost]


def _by_setting(side: str, costs: Sequence[SettingCost]) -> tuple[Costs, list[str]]:
    """Return the last cost of each setting, and a note on those that it replaces."""
    found = {cost.setting: cost for cost in costs}
    num_left_out = len(costs) - len(found)
    if not num_left_out:
        return found, []
    return found, [
        f"Results in {side} that a later one of the same setting replaces: {num_left_out}."
    ]


def _notes(before: Costs, after: Costs) -> list[str]:
    """Return in what the two sides differ as a whole."""
    notes = []
    if not before.keys() & after.keys():
        notes.append(
            "No setting is on both sides, so nothing was compared: workload, settings, device, "
            "limit and source (measured, predicted) must be the same."
        )
    devices = [sorted({f"{c.device} ({c.source})" for c in side.values()})
               for side in (before, after)]  # fmt: skip
    if devices[0] != devices[1]:
        old, new = (", ".join(each) or "none" for each in devices)
        notes.append(f"Other devices: {old} in old, {new} in new.")

    both = [(before[key], after[key]) for key in after if key in before]
    names = {name for pair in both for cost in pair for name in cost.versions}
    for name in sorted(names):
        said = {(old.versions.get(name), new.versions.get(name)) for old, new in both}
        for was, now in sorted(said, key=str):
            if was != now and was is not None and now is not None:
                notes.append(f"Other {WORDS.get(name, name)}: {was} in old, {now} in new.")
    if any(is_other_hardware(old, new) for old, new in both):
        notes.append("Times of another processor, card or number of threads were not judged.")
    if any(not old.versions or not new.versions for old, new in both):
        notes.append("A table holds no versions, so another processor or torch would not be seen.")
    return notes
