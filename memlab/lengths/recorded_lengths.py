"""At which lengths a step is recorded: three, and then one more that is predicted from them first.

If the curve through the first recordings gives the peak of the next one to a thousandth, it is
trusted everywhere. If not, that recording joins the others, and the curve is tried at another
length; the largest error that was seen widens what is stated. The lengths reach from the longest
sample down to where a batch hardly fills memory, whatever lengths the data set has in between, so
that a gap in it is no gap in the curve. One that the workload cannot have is replaced by one near.
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
LEAST_REACH = 4  # how many times shorter than the longest is recorded in any case
LEAST = 2  # a dimension of one element takes other paths through kernels and through models
MULTIPLES = (1, 8, 64, 256)  # of which lengths are that workloads may ask for


def recorded_curve(
    name: str,
    lengths: Sequence[int],
    predict: Callable[[int], Prediction],
    is_possible: Callable[[int], bool],
) -> LengthCurve:
    """Return the curve over the lengths of a data set.

    Args:
        name: of the workload, up to its length.
        lengths: each once, ascending.
        predict: length -> the step with batches of that length.
        is_possible: length -> whether the workload can have samples of it.

    Raises:
        UnsupportedError: the step runs other operators at some lengths.
    """
    longest = lengths[-1]
    low = min(max(lengths[0], -(-longest // SHORTEST)), longest // LEAST_REACH)

    def near(length: int, above: int, below: int) -> int | None:
        """Return a length between two others that the workload can have, close to this one."""
        held = sorted(lengths, key=lambda other: abs(other - length))[:1]
        tried = [*(length // m * m for m in MULTIPLES), *held]
        inside = [other for other in dict.fromkeys(tried) if above < other < below]
        return next((other for other in inside if is_possible(other)), None)

    # the longest first: if that is not possible, nothing else is worth its time
    recorded = {longest: predict(longest)}
    for wanted in (max(low, LEAST), (low + longest) // 2):
        if (other := near(wanted, LEAST - 1, longest)) is not None and other not in recorded:
            recorded[other] = predict(other)
    if _unlike(recorded) is not None:
        # the first run of a process may import a library, and count the tables that this makes
        recorded[longest] = predict(longest)
    curve = _curve(name, recorded, ())
    while len(curve.recorded) < MOST_RECORDED:
        left = _left_out(sorted(curve.recorded), near)
        if left is None:
            break
        found = predict(left)
        error = curve.error_of(found, left)
        curve = _curve(name, {**curve.recorded, left: found}, (*curve.errors, error))
        if error <= EXACT:
            break
    return curve


def _curve(name: str, recorded: Mapping[int, Prediction], errors: tuple[float, ...]) -> LengthCurve:
    _check_operators(recorded)
    return LengthCurve(recorded=dict(sorted(recorded.items())), name=name, errors=errors)


def _left_out(recorded: Sequence[int], near: Callable[[int, int, int], int | None]) -> int | None:
    """Return a length in the middle of the widest gap between recorded ones; None if none is."""
    for gap in sorted(pairwise(recorded), key=lambda gap: gap[0] - gap[1]):
        if (found := near(sum(gap) // 2, *gap)) is not None:
            return found
    return None


def _check_operators(recorded: Mapping[int, Prediction]) -> None:
    """Raise if the recorded steps do not all run the same operators."""
    length, longest = _unlike(recorded), max(recorded)
    if length is None:
        return
    ran = [forecast_of(recorded[one]).program.ran.names for one in (length, longest)]
    name = recorded[length].result.workload_name
    if ran[0] == ran[1]:
        does = f"{name} does not allocate and free in the order of one with batches of {longest}"
    else:
        does = (
            f"{name} runs other operators with batches of {length} than with batches of {longest} "
            f"({len(ran[0])} and {len(ran[1])} of them)"
        )
    raise UnsupportedError(
        f"{does}, so that no length follows from others; predict the lengths that matter one by "
        "one: memlab.predict(workload.resized(length), config)"
    )


def _unlike(recorded: Mapping[int, Prediction]) -> int | None:
    """Return a length whose step runs other operators than that of the longest; None if none."""
    program = forecast_of(recorded[max(recorded)]).program
    return next(
        (n for n, found in recorded.items() if not runs_same(program, forecast_of(found).program)),
        None,
    )
