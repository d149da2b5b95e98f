"""One result of those of ranks that hold different things."""

from collections.abc import Sequence
from dataclasses import replace

from memlab.arguments.units import format_bytes
from memlab.result import StepResult


def with_ranks(worst: StepResult, results: Sequence[StepResult]) -> StepResult:
    """Return the result of the rank with the highest peak, with all of them in its `ranks`.

    Args:
        worst: of `results`.
        results: of different ranks of one simulated step, each with its `rank_numbers`.
    """
    ordered = sorted(results, key=lambda result: result.rank_numbers)
    notes = worst.notes
    if len(results) > 1:
        least = min(results, key=peak_of)
        notes = (
            f"These are the numbers of rank {worst.rank_numbers[0]}, which has the highest peak of "
            f"{worst.config.world_size} ranks; that of rank {least.rank_numbers[0]} is "
            f"{format_bytes(peak_of(least))}.",
            *notes,
        )
    return replace(worst, notes=notes, ranks=tuple(ordered), rank_numbers=())


def peak_of(result: StepResult) -> int:
    """Return the peak that counts against a limit."""
    counted = result.counted_peak
    return 0 if counted is None else counted.nbytes
