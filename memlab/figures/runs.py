"""What the pictures of several runs share: labels, and words for missing and unsteady numbers."""

from collections.abc import Sequence

from memlab.arguments.units import format_seconds
from memlab.devices.load import QUIET_SHARE
from memlab.errors import ConfigError
from memlab.figures.look import CATEGORY_COLORS
from memlab.operators.cost import STEADY
from memlab.result import Outcome, StepResult
from memlab.trace import Category

RUN = CATEGORY_COLORS[Category.PARAMETERS]  # the colour of a run
NO_RUNS = "No run yet."
FEWEST_REPEATS = 3  # of which a median says anything


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


def is_unsteady(result: StepResult) -> bool:
    """Return whether the time of a run is not steady, so that another run may give another time.

    Other programs only ever slow a step down, so its fastest repeat is the nearest to what it takes
    alone, and the distance of the median from it says how much of the quoted time is noise. The
    median moves only when half of the repeats were slowed: one slow step of five changes nothing,
    which the whiskers show all the same. The factor is that of the costs of operators (`STEADY`).
    """
    repeats = result.step_seconds_all
    if result.step_seconds is None or len(repeats) < FEWEST_REPEATS:
        return False
    return result.step_seconds > STEADY * min(repeats)


def why_unsteady(result: StepResult) -> str:
    """Return why the time of a run is not steady; "" if it is."""
    if not is_unsteady(result):
        return ""
    share = result.others_share
    is_alone = share is not None and share <= QUIET_SHARE
    return "the repeats differ widely" if is_alone else "the machine was busy"


def repeats_in_words(result: StepResult) -> str:
    """Return for instance "1.97 s, repeats 160 ms to 4.50 s: the machine was busy".

    The range and the reason are left out of a steady time; "" if there is no time.
    """
    if result.step_seconds is None:
        return ""
    text = format_seconds(result.step_seconds)
    if not (why := why_unsteady(result)):
        return text
    least, most = (format_seconds(f(result.step_seconds_all)) for f in (min, max))
    return f"{text}, repeats {least} to {most}: {why}"
