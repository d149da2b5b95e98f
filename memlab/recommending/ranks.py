"""How many ranks share a recommended step, and on how many cards one fits that fits on none."""

from collections.abc import Iterator
from dataclasses import replace

from memlab.arguments.units import format_seconds
from memlab.config import Sharding, StepConfig
from memlab.errors import ConfigError, DeviceError
from memlab.limits.judgement import Judgement
from memlab.recommending.goal import Goal
from memlab.recommending.known import Known
from memlab.recommending.reasons import reason_of_limit
from memlab.result import StepResult

MORE_CARDS = (2, 4, 8)
SMALLEST = Sharding.ZERO3  # holds the least, so it decides whether a number of cards is enough
FASTER = (Sharding.DDP, Sharding.ZERO2)  # communicate less; the least first


def with_ranks(base: StepConfig, world_size: int | None, num_cards: int) -> tuple[StepConfig, bool]:
    """Return settings for as many ranks, and whether their strategy is to be searched.

    A strategy that was chosen stays. Where it is searched the settings are those of ddp, in which
    every rank does what one process does; the others are compared with it.

    Args:
        base: what is already chosen.
        world_size: number of ranks; None is that of `base`, or all cards.
        num_cards: of a cluster; 1 of a device by itself.

    Raises:
        ConfigError: the ranks cannot divide the batch.
    """
    if base.sharding is not Sharding.NONE:
        return (base if world_size is None else replace(base, world_size=world_size)), False
    ranks = num_cards if world_size is None else world_size
    if ranks == 1:
        return base, False
    return replace(base, sharding=Sharding.DDP, world_size=ranks), True


def on_more_cards(goal: Goal) -> StepResult | None:
    """Return the step on the fewest of these cards on which it fits; None if that is not known.

    A few predictions: of zero3 on two, four and eight cards, until one fits, and there of the
    strategies that communicate less.

    Raises:
        Ended: it was cancelled.
    """
    base, card = goal.space.base, goal.target.card
    if base.sharding is not Sharding.NONE or card is None:
        return None
    for ranks in MORE_CARDS:
        device = f"{ranks}x-{card.name}"
        fits = next(_fitting(goal, device, ranks, (SMALLEST,)), None)
        if fits is not None:
            return next(_fitting(goal, device, ranks, FASTER), fits)
    return None


def _fitting(
    goal: Goal, device: str, ranks: int, strategies: tuple[Sharding, ...]
) -> Iterator[StepResult]:
    """Yield the predictions that fit on a cluster."""
    for sharding in strategies:
        try:
            config = replace(goal.space.base, sharding=sharding, world_size=ranks)
            found = Known().predicted(goal.workload, config, device, goal.options)
        except (ConfigError, DeviceError):  # a batch that does not divide, or no such machine
            continue
        if found.forecast is None:
            continue
        result = found.forecast.against_limit(found.result, goal.limit_bytes)
        if result.fit is Judgement.FITS:
            yield result


def more_cards_in_words(result: StepResult, limit_bytes: int) -> str:
    """Return on how many cards a step fits, as the end of a sentence."""
    config, seconds = result.config, result.step_seconds
    speed = "" if seconds is None else f", at {format_seconds(seconds)} a step"
    return (
        f"on {config.world_size} of these cards (device={result.device!r}) it "
        f"{reason_of_limit(result, limit_bytes, 0.0)} each, with "
        f"sharding={str(config.sharding)!r}{speed}"
    )
