"""The line beside the number of ranks, and the button that shows it. Pure functions."""

from collections.abc import Mapping

from memlab._panel.line import Line
from memlab._panel.state import Settings, is_sharded, problems
from memlab._panel.texts import refusal_line
from memlab._panel.verdicts import BAD, WARN, setting_words
from memlab.techniques.sharding.sharding import SHARDING, most_ranks
from memlab.techniques.technique import Setup

ALONE = "one device trains by itself; a sharding divides the step over several"
TWO = ("2 ranks", {"world_size": 2})
REMEDIES: tuple[Mapping[str, object], ...] = (
    {"shard_group_size": 8},
    {"shard_group_size": 4},
    {"shard_group_size": 2},
    {"tensor_parallel_size": 1},
    {"world_size": 2},
    {"world_size": 2, "shard_group_size": 2},
)
"""What may make ranks go together, the one that changes least first."""


def ranks_line(
    settings: Settings,
    wrong: Mapping[str, str],
    asked: Setup,
    *,
    is_here: bool,
    num_cards: int | None = None,
) -> Line:
    """Explain who computes and keeps what, or why these ranks are not possible.

    Args:
        settings: on screen.
        wrong: the error of each setting that is not allowed, by field.
        asked: the same settings, with defaults in place of wrong ones.
        is_here: whether the device is in this machine, so that Run starts real ranks.
        num_cards: of the cluster on screen; None if the device is none.
    """
    if "world_size" in wrong:
        return Line(wrong["world_size"], remedy=_remedy(settings, num_cards), kind=BAD)
    if not is_sharded(settings):
        return Line(ALONE) if num_cards is None else _unused_line(num_cards)
    if wrong:
        return Line("needs valid settings above first")
    if refused := refusal_line((SHARDING,), asked):
        return refused
    if asked.config.world_size == 1:
        return Line(SHARDING.says(asked), remedy=TWO, kind=WARN)

    most = most_ranks(asked.device) if is_here else None
    if most is not None and asked.config.world_size > most:
        at_most = f"; Run starts at most {most} ranks on this machine, so this is predicted only"
        return Line(SHARDING.says(asked) + at_most, kind=WARN)
    return Line(SHARDING.says(asked))


def ranks_label(settings: Settings) -> str:
    """Return the label of the button that shows the controls of ranks, which says what is set."""
    if not is_sharded(settings):
        return "Ranks (one device)"
    return f"Ranks ({settings['sharding']} x {settings['world_size']})"


def _unused_line(num_cards: int) -> Line:
    """Return that a sharding would use all cards of a cluster, with a button for one."""
    every: Mapping[str, object] = {"sharding": "zero3", "world_size": num_cards}
    text = f"one of {num_cards} cards trains by itself; a sharding divides the step over them"
    return Line(text, remedy=(f"zero3 x {num_cards}", every))


def _remedy(settings: Settings, num_cards: int | None) -> tuple[str, Mapping[str, object]] | None:
    """Return the first remedy that lifts the error, with its words."""
    every = () if num_cards is None else ({"world_size": num_cards},)
    was_wrong = "world_size" in problems(settings)
    for remedy in (*REMEDIES, *every) if was_wrong else every:
        if "world_size" not in problems({**settings, **remedy}):
            return ", ".join(setting_words(*change) for change in remedy.items()), remedy
    return None
