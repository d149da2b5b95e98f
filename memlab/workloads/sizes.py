"""How large the samples of the zoo are, and which other sizes its workloads can have.

All follows from the fields of a spec. One with a `sequence_length` is trained on texts, one with an
`image_size` on square images; any other has samples of one size only.
"""

from collections.abc import Callable
from typing import Any

from memlab.arguments.quoting import shown
from memlab.errors import WorkloadError
from memlab.workload import SampleSize, Workload
from memlab.workloads.data import num_text_bytes

TEXT, IMAGE = "sequence_length", "image_size"
WORDS: dict[str, dict[str, Any]] = {
    TEXT: {"name": "sequence length", "unit": "tokens"},
    IMAGE: {"name": "image size", "unit": "pixels", "dimensions": 2},
}
REACH = {TEXT: 8, IMAGE: 4}  # the slider ends at sizes so many times smaller and larger
STEPS = {TEXT: (1,), IMAGE: (1, 3)}  # times powers of two: images have sizes such as 64, 96, 128
DOUBLINGS = range(24)


def sample_size(spec: Any, make_workload: Callable[[int], Workload]) -> SampleSize | None:
    """Return the size of a spec's samples, and the sizes that a slider offers; None for none.

    Args:
        spec: one of `workloads.SPECS`, perhaps with options.
        make_workload: makes the workload of this spec in another size.
    """
    field = field_of(spec)
    if field is None:
        return None

    value, least, step = getattr(spec, field), _smallest(spec), _step(spec)
    near = range(max(least, -(-value // REACH[field])), value * REACH[field] + 1)
    rounded = (step * times * 2**doubling for times in STEPS[field] for doubling in DOUBLINGS)
    offered = sorted({value, *(size for size in rounded if size in near)})
    if len(offered) < 2:  # an image that is far smaller than a patch
        return None
    return SampleSize(
        **WORDS[field], value=value, offered=tuple(offered), make_workload=make_workload
    )


def field_of(spec: Any) -> str | None:
    """Return the field of a spec that is the size of its samples; None if it has none."""
    return next((field for field in WORDS if hasattr(spec, field)), None)


def check(spec: Any, size: int) -> None:
    """Check that the samples of a spec can have another size.

    Raises:
        WorkloadError: they cannot; the message says what is allowed.
    """
    field, least, step = field_of(spec), _smallest(spec), _step(spec)
    if field == TEXT and size > num_text_bytes() - 2:  # a window, and the byte after it
        raise WorkloadError(
            f"sequence_length={shown(size)} is longer than the text; allowed is an int of at most "
            f"{num_text_bytes() - 2}"
        )
    if size < least:
        raise WorkloadError(
            f"{field}={size} is below {least}, the smallest that this model can take; allowed is "
            f"an int of at least {least}"
        )
    if size % step:
        below = size // step * step
        raise WorkloadError(
            f"{field}={size} is not a multiple of {step}, the size of a patch; allowed is for "
            f"instance {below} or {below + step}"
        )


def _smallest(spec: Any) -> int:
    """Return the smallest size of a sample."""
    if hasattr(spec, "depths"):  # the stem halves an image twice, each stage after the first once
        return int(2 ** (len(spec.depths) + 1))
    return _step(spec)


def _step(spec: Any) -> int:
    """Return of what number a size is a multiple."""
    return getattr(spec, "patch_size", 1)
