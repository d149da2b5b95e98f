"""What a card draws while it trains, and what a power limit costs.

The idea. A busy card draws a share of its board's power that depends on what its kernels do, and a
card that waits for its host draws little. The mean over a step is that of its kernels, each
weighted by its time.

If a limit lies below that, the card lowers its clock. What a chip draws beyond its static share is
in proportion to f V^2. Voltage falls with the clock down to a floor, so above the floor the share
falls with the cube of the clock, and below it in proportion. Every kernel slows with the clock,
since caches and on-chip networks share it.

`python -m benchmarks.power` fits the shares, with whole cards and whole networks left out, and
prints how far off they are. Left out: a limit that is the card's own default, which `sustained` in
`roofline.py` regards, and a chip that gets too warm.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from memlab.devices.cards import Card

# Share of the board's power: products on compute units, other kernels, recurrent layers (few rows
# at a time), and a card that has a program but no kernel. Of 95 settings of four networks on an
# A40 and a V100 (benchmarks/data/power_epochs.csv).
COMPUTE, MEMORY, RECURRENT, WAITING = 0.97, 0.83, 0.59, 0.19
# Static share of the power, and the clock below which the voltage stays, of the boost clock.
STATIC, FLOOR = 0.2, 0.8
# Relative half-widths that cover 90 % of the settings of a card left out. Of the mean power: while
# products and other kernels work, and as much more as others do or none; of a limit that is
# reached. Of a slower step: always, and as much more as it takes longer.
WORKING_WIDTH, OTHER_WIDTH, LIMIT_WIDTH = 0.2, 0.35, 0.15
LEAST_WIDTH, SLOWER_WIDTH = 0.08, 0.35
SAID = "Under a power limit of"  # how the note begins
OF_LAPTOP = "the most that this card may take"  # is in the note of a laptop without a limit
EXAMPLE = 0.8  # share of a laptop's most power that a note writes as an example


class DrawnBy(StrEnum):
    """What a kernel draws power for."""

    COMPUTE = "compute"
    MEMORY = "memory"
    RECURRENT = "recurrent"


@dataclass(frozen=True, slots=True)
class Busy:
    """Seconds in which a card's kernels work, by what they draw power for."""

    compute: float = 0.0
    memory: float = 0.0
    recurrent: float = 0.0

    @classmethod
    def of(cls, kernels: Iterable[tuple[float, DrawnBy]]) -> "Busy":
        """Return those of kernels, of which the seconds and the kind are given."""
        found = dict.fromkeys(DrawnBy, 0.0)
        for seconds, by in kernels:
            found[by] += seconds
        return cls(*found.values())

    def half_width(self, seconds: float) -> float:
        """Return the relative half-width of `share_drawn`."""
        other = max(seconds - self.compute - self.memory, 0.0) / seconds if seconds else 1.0
        return WORKING_WIDTH + OTHER_WIDTH * other

    @property
    def seconds(self) -> float:
        """Their sum."""
        return self.compute + self.memory + self.recurrent

    def scaled_to(self, seconds: float) -> "Busy":
        """Return the same mix of kernels with this sum; of none, kernels that wait for memory."""
        if not self.seconds:
            return Busy(memory=seconds)
        by = seconds / self.seconds
        return Busy(self.compute * by, self.memory * by, self.recurrent * by)

    def share_drawn(self, seconds: float, compute: float = COMPUTE) -> float:
        """Return the mean draw over a time of at least their sum, as a share of the board's.

        Args:
            seconds: of the step.
            compute: that products draw.

        >>> round(Busy(compute=0.5, memory=0.3).share_drawn(1.0), 3)
        0.772
        """
        waiting = max(seconds - self.seconds, 0.0)
        drawn = compute * self.compute + MEMORY * self.memory + RECURRENT * self.recurrent
        return (drawn + WAITING * waiting) / (self.seconds + waiting)


IDLE = Busy()


def added(parts: Iterable[Busy]) -> Busy:
    """Return the sum of each kind."""
    compute = memory = recurrent = 0.0
    for part in parts:
        compute, memory = compute + part.compute, memory + part.memory
        recurrent += part.recurrent
    return Busy(compute, memory, recurrent)


def slowdown(limit: float, drawn: float, clock: float = 1.0) -> float:
    """Return how many times as long kernels take under a limit, at least 1.

    Args:
        limit: of the power, as a share of the board's.
        drawn: without it, as such a share.
        clock: without it, as a share of the boost clock (`sustained`).

    >>> slowdown(0.9, 0.8)
    1.0
    >>> round(slowdown(0.7, 0.9), 2), round(slowdown(0.5, 0.9), 2), round(slowdown(0.4, 0.9), 2)
    (1.12, 1.49, 2.24)
    """
    if limit >= drawn:
        return 1.0
    dynamic, floor = (limit - STATIC) / (drawn - STATIC), min(FLOOR / clock, 1.0)
    return dynamic ** (-1 / 3) if dynamic >= floor**3 else floor**2 / dynamic


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerDraw:
    """What a card draws in a step.

    Attributes:
        watts: the mean.
        half_width: its relative half-width.
        slower: how many times as long kernels take, under a limit.
        slower_half_width: the relative half-width of that.
    """

    watts: float
    half_width: float
    slower: float = 1.0
    slower_half_width: float = 0.0


def draw(card: Card, busy: Busy, seconds: float, clock: float) -> PowerDraw:
    """Return what a card draws in a step.

    Args:
        card: with a known board, and with or without a limit.
        busy: seconds in which its kernels work.
        seconds: of the step without a limit.
        clock: that it keeps up when it multiplies (`sustained`); below 1 all of the board's power
            is drawn then.
    """
    assert card.board_watts is not None
    compute = COMPUTE if clock == 1 else 1.0
    drawn = busy.share_drawn(seconds, compute) if seconds else WAITING
    width = busy.half_width(seconds)
    limit = 1.0 if card.limit_watts is None else card.limit_watts / card.board_watts
    if limit >= drawn * (1 + width) or card.limit_watts is None:
        return PowerDraw(watts=card.board_watts * drawn, half_width=width)
    slower = slowdown(limit, drawn, clock)
    return PowerDraw(
        watts=card.board_watts * min(drawn, limit),
        half_width=LIMIT_WIDTH if limit < drawn else width,
        slower=slower,
        slower_half_width=LEAST_WIDTH + SLOWER_WIDTH * (slower - 1) / slower,
    )


def notes(card: Card, slower: float) -> list[str]:
    """Return a note on what a power limit costs; without one only for a laptop, which has some."""
    if card.limit_watts is None:
        if not card.is_laptop or card.board_watts is None:
            return []
        return [
            f"The time is that of {card.board_watts:g} W, {OF_LAPTOP}. Many laptops allow less and "
            f"are slower: say how much behind its name, as in "
            f'", {EXAMPLE * card.board_watts:.0f} W" (nvidia-smi -q -d POWER says it).'
        ]
    said = f"{SAID} {card.limit_watts:g} W"
    if card.board_watts is not None and card.limit_watts > card.board_watts:
        return [
            f"{said}, above the {card.board_watts:g} W of the data sheet, the card is predicted as "
            "one without a limit; it may clock higher."
        ]
    if slower == 1:
        return [f"{said} the step takes no longer, since it draws less than that."]
    return [
        f"{said} of {card.board_watts:g} W kernels are taken to be {slower:.2f} times as long, by "
        "how an A40 and a V100 slowed down."
    ]


# Power of a chip at one speed, as a share of 16 nm, by what the foundries state: TSMC N10 35-40 %
# less than 16 nm, N7 40 % less than N10, N5 (and 4N) 30 % less than N7; Samsung 10LPE 40 % less
# than 14 nm, 10LPP 15 % less than that, 8LPP another 10 %. 12 nm is 16 nm with denser cells.
POWER_OF_PROCESS = {6: 1.0, 7: 1.0, 8: 0.39, 9: 0.27, 10: 0.27, 12: 0.27}  # by compute capability
POWER_OF_OTHERS = {(8, 6): 0.46, (8, 9): 0.27}


def sustained(card: Card, joules_per_flop: float) -> float:
    """Return the clock that a card keeps up when it multiplies, as a share of its boost clock.

    Power is in proportion to the clock, so a board with half the power that its chip would need
    works at about half its boost clock: a T4 has 8.6 W for each TFLOP/s, a P4 13.6, a V100 17.9.
    """
    capability = card.compute_capability
    if capability is None or card.board_watts is None or not card.fp32_flops_per_second:
        return 1.0
    process = POWER_OF_OTHERS.get(capability, POWER_OF_PROCESS.get(capability[0], 1.0))
    joules = card.board_watts / card.fp32_flops_per_second
    return min(1.0, joules / (joules_per_flop * process))
