"""One result of those of ranks that hold different things."""

from collections.abc import Sequence
from dataclasses import replace

from memlab.arguments.units import format_bytes
from memlab.result import StepResult


def with_ranks(worst: StepResult, results: Sequence[StepResult]) -> StepResult:
    """Return the result of the rank with the highest peak, with all of them in its `ranks`.

    Args:
        worst: of `results`.
        results: of different ranks of one step, each with its `rank_numbers`.
    """
    ordered = sorted(results, key=lambda result: result.rank_numbers)
    notes = (*spread_notes(worst, results), *worst.notes)
    return replace(worst, notes=notes, ranks=tuple(ordered), rank_numbers=())


def spread_notes(worst: StepResult, results: Sequence[StepResult]) -> tuple[str, ...]:
    """Return a note on whose numbers these are, and how far the peaks of ranks lie apart."""
    if len(results) < 2:
        return ()
    known, every = sum(len(r.rank_numbers) for r in results), worst.config.world_size
    ranks = f"{known} ranks" if known == every else f"{known} of {every} ranks"
    highest, lowest = peak_of(worst), min(map(peak_of, results))
    number = worst.rank_numbers[0]
    if highest == lowest:
        return (f"These are the numbers of rank {number}; {ranks} have the same peak.",)
    return (
        f"These are the numbers of rank {number}, which has the highest peak of {ranks}; the "
        f"lowest is {format_bytes(lowest)}.",
    )


def peak_of(result: StepResult) -> int:
    """Return the peak that counts against a limit."""
    counted = result.counted_peak
    return 0 if counted is None else counted.nbytes
