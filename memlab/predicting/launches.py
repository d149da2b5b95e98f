"""What a prediction says about the Triton kernels of a step, whose launches are left out."""

from collections.abc import Mapping

from memlab.arguments.units import format_seconds
from memlab.recording.triton_launches import SHORT

COUNTED = "torch.nn.attention.flex_attention"  # what its kernels allocate is known


def without_time(launches: Mapping[str, int]) -> dict[str, int]:
    """Return the kernels whose time may be a large part of the step's, and is not known.

    >>> without_time({"trl.kernels.chunked_logprob._forward_kernel": 4, "mine.flash": 2})
    {'mine.flash': 2}
    """
    return {name: n for name, n in launches.items() if name.rpartition(".")[0] not in SHORT}


def notes_of(launches: Mapping[str, int]) -> tuple[str, ...]:
    """Return a note on kernels that are assumed to allocate nothing.

    >>> notes_of({"torch.nn.attention.flex_attention.flex_attention": 2})
    ()
    """
    launches = {name: n for name, n in launches.items() if not name.startswith(COUNTED)}
    if not launches:
        return ()
    return (
        f"The step launches Triton kernels ({_in_words(launches)}): they are assumed to allocate "
        "nothing, and their time is left out.",
    )


def bound(launches: Mapping[str, int], rest: float | None) -> str:
    """Return why a step with such kernels has no time.

    Args:
        launches: of the kernels without a time.
        rest: seconds that the operators take.
    """
    longer = "" if rest is None else f": it takes longer than {format_seconds(rest)}, the rest"
    return (
        f"The time of Triton kernels ({_in_words(launches)}) is not known, so the step has "
        f"none{longer}."
    )


def _in_words(launches: Mapping[str, int]) -> str:
    return ", ".join(f"{name.rpartition('.')[2]}: {count}" for name, count in launches.items())
