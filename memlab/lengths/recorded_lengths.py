"""At which lengths a step is recorded: three, and then one more that the others have to foretell.

If the curve through the first recordings gives the peak of the next one to a thousandth, it is
trusted everywhere. If not, that recording joins the others, and the curve is tried at another
length. Every length that is recorded is one of the data set's, so that the workload can have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from memlab.errors import UnsupportedError
from memlab.lengths.curve import LengthCurve, forecast_of, runs_same
from memlab.predicting.predict import Prediction

EXACT = 0.001  # of a peak: the error at a length that was left out, for no more to be recorded
MOST_RECORDED = 8
SHORTEST = 32  # times shorter than the longest: what is shorter still hardly fills a batch's memory


def recorded_curve(
    name: str, lengths: Sequence[int], predict: Callable[[int], Prediction]
) -> LengthCurve:
    """Return the curve over the lengths of a data set.

    Args:
        name: of the workload, up to its length.
        lengths: each once, ascending.
        predict: length -> the step with batches of that length.

    Raises:
        UnsupportedError: the step runs other operators at some lengths.
    """
    longest = lengths[-1]
    worth = [length for length in lengths if SHORTEST * length >= longest]
    middle = min(worth, key=lambda length: abs(2 * length - worth[0] - longest))
    # the longest first: if that is not possible, nothing else is worth its time
    recorded = {length: predict(length) for length in sorted({worth[0], middle, longest})[::-1]}
    curve = _curve(name, recorded, 0.0)
    while (left := _left_out(worth, curve.recorded)) is not None:
        found = predict(left)
        error = curve.error_of(found, left)
        curve = _curve(name, {**curve.recorded, left: found}, error)
        if error <= EXACT or len(curve.recorded) == MOST_RECORDED:
            break
    return curve


def _curve(name: str, recorded: Mapping[int, Prediction], error: float) -> LengthCurve:
    _check_operators(recorded)
    return LengthCurve(recorded=dict(sorted(recorded.items())), name=name, error=error)


def _left_out(lengths: Sequence[int], recorded: Mapping[int, Prediction]) -> int | None:
    """Return the length in the middle of the widest gap between recorded ones; None if none is."""
    for gap in sorted(pairwise(recorded), key=lambda gap: gap[0] - gap[1]):
        inside = [length for length in lengths if gap[0] < length < gap[1]]
        if inside:
            return min(inside, key=lambda length: abs(2 * length - sum(gap)))
    return None


def _check_operators(recorded: Mapping[int, Prediction]) -> None:
    """Raise if the recorded steps do not all run the same operators."""
    longest = max(recorded)
    program = forecast_of(recorded[longest]).program
    for length, prediction in recorded.items():
        other = forecast_of(prediction).program
        if not runs_same(program, other):
            counts = len(other.ran.names), len(program.ran.names)
            raise UnsupportedError(
                f"{prediction.result.workload_name} runs other operators with batches of {length} "
                f"than with batches of {longest} ({counts[0]} and {counts[1]} of them), so that no "
                "length follows from others; predict the lengths that matter one by one: "
                "memlab.predict(workload.resized(length), config)"
            )
