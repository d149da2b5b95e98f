"""What the pictures of several runs share: their labels, and words for a run without numbers."""

from collections.abc import Sequence

from memlab.errors import ConfigError
from memlab.figures.look import CATEGORY_COLORS
from memlab.result import Outcome, StepResult
from memlab.trace import Category

RUN = CATEGORY_COLORS[Category.PARAMETERS]  # the colour of a run
NO_RUNS = "No run yet."


def labelled(results: Sequence[StepResult], labels: Sequence[str]) -> list[tuple[StepResult, str]]:
    """Return each result with its label.

    Raises:
        ConfigError: there are not as many labels as results.
    """
    if len(results) != len(labels):
        raise ConfigError(
            f"labels holds {len(labels)} texts for {len(results)} results; allowed is one for each"
        )
    return list(zip(results, labels, strict=True))


def without_numbers(result: StepResult, *, short: bool = False) -> str:
    """Return why a run has no peak or no time."""
    if result.outcome is Outcome.OUT_OF_MEMORY:
        return "OOM" if short else "out of memory"
    return "no time" if result.outcome is Outcome.OK else str(result.outcome).replace("_", " ")
