"""How large the samples of the zoo are, and which other sizes its workloads can have.

All follows from the fields of a spec. One with a `sequence_length` is trained on texts, one with an
`image_size` on square images; any other has samples of one size only.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from memlab._util.checks import checked
from memlab._util.units import is_a, printable, shown
from memlab.errors import ConfigError, WorkloadError
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


# The lengths of texts, as a person's tokenizer counts them.


@checked()
def lengths_of(texts: Iterable[str], tokenizer: Callable[[str], Any]) -> tuple[int, ...]:
    """Return how many tokens each text has, for `memlab.predict_lengths`.

    Args:
        texts: the texts, such as a data set's column.
        tokenizer: text -> its tokens: a list of them, or what a tokenizer of transformers returns,
            of which `input_ids` is counted.

    Raises:
        ConfigError: a text cannot be tokenized, or has no tokens; the message says which.

    >>> import memlab
    >>> memlab.workloads.lengths_of(["to be", "or not to be"], str.split)
    (2, 4)
    """
    return tuple(_length(tokenizer, text, number) for number, text in enumerate(texts))


def _length(tokenizer: Callable[[str], Any], text: str, number: int) -> int:
    try:
        tokens = tokenizer(text)
        # what a tokenizer of transformers returns behaves as a dict, and is none
        if is_a(tokens, Mapping) or hasattr(tokens, "input_ids"):
            tokens = tokens["input_ids"]
        found = len(tokens)
    except Exception as error:  # a person's own tokenizer may raise anything
        raise ConfigError(
            f"tokenizer={shown(tokenizer)} gives no tokens for texts[{number}] "
            f"({type(error).__name__}: {printable(str(error))[:200]}); pass a function that "
            "returns a list of tokens"
        ) from error
    if not found:
        raise ConfigError(f"texts[{number}]={shown(text)} has no tokens; leave it out")
    return found
