"""The answer of a comparison in one or two sentences."""

from collections.abc import Mapping
from typing import Any

from memlab.arguments.units import format_bytes
from memlab.snapshots.comparison import ComparedBlocks

ALL_OF_IT = 0.95  # of a difference, which one line is then said to explain alone
FEW = 0.5  # of the allocations; if fewer agree, it is probably not the same step
MOST_NAMED = 3


def summary_of(facts: Mapping[str, Any]) -> str:
    """Return what a person wants to know first.

    Args:
        facts: those of `SnapshotComparison`, by the names of its fields.
    """
    measured, predicted = facts["measured_peak_bytes"], facts["predicted_peak_bytes"]
    differing = [row for row in facts["rows"] if row.difference]
    peak = f"{format_bytes(measured)}, in {facts['measured_peak_phase']}"
    if measured == predicted:
        text = f"The step held what was predicted, to the byte: at its peak {peak}."
        text += _elsewhere(differing)
    else:
        more = "more" if measured > predicted else "less"
        text = (
            f"The step held {format_bytes(abs(measured - predicted))} {more} than predicted at its "
            f"peak ({peak}; predicted {format_bytes(predicted)}, in "
            f"{facts['predicted_peak_phase']}){_why(facts, differing)}."
        )
    if facts["matched_fraction"] < FEW:
        text += (
            f" But only {facts['matched_fraction']:.0%} of the allocations have the size of a "
            "predicted one. Check that the workload, the batch size, the precision and the "
            "optimizer are those of the snapshot."
        )
    return text


def _elsewhere(differing: list[ComparedBlocks]) -> str:
    if not differing:
        return " Every allocation is as predicted."
    blocks = sum(max(row.num_measured, row.num_predicted) for row in differing)
    largest = max(differing, key=lambda row: max(row.measured_bytes, row.predicted_bytes))
    verb = "allocations differ" if blocks > 1 else "allocation differs"
    return f" {blocks:,} {verb}, the largest: {largest.name}, {largest.difference}."


def _why(facts: Mapping[str, Any], differing: list[ComparedBlocks]) -> str:
    """Return which blocks explain the difference at the higher peak."""
    total = facts["measured_at_peak_bytes"] - facts["predicted_at_peak_bytes"]
    sign = 1 if total > 0 else -1
    named = [row for row in differing if sign * row.more_at_peak_bytes > 0][:MOST_NAMED]
    if not total or not named:
        return ""
    peaks = facts["measured_peak_bytes"] - facts["predicted_peak_bytes"]
    # the lower peak may be elsewhere, and then more differs here than the peaks do
    there = "" if total == peaks else f"; at that place {format_bytes(abs(total))} differ"
    if sign * named[0].more_at_peak_bytes >= ALL_OF_IT * abs(total):
        return f"{there}, all of it in {_said(named[0])}"
    shares = [f"{format_bytes(abs(row.more_at_peak_bytes))} in {_said(row)}" for row in named]
    return f"{there}: " + ", ".join(shares)


def _said(row: ComparedBlocks) -> str:
    return f"{row.name} ({row.difference})"
