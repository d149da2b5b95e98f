"""Points in the plane of time and peak, one for each way to run a step, and how two rules compare.

The area of a rule is that below its steps in this plane (plain = 1): at a time, the least peak of
its points that are no slower, from the plain step to the slowest point of any; told beside it, to
the slowest that both have, as our slowest points lie where the others have none. Goals: no point of
a peer has both peak and time more than 2 % below one of ours; our area is at least 10 % below that
of every k-th block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import report
from memlab._util.units import MIB

OURS, BY_HAND, COMPILED = "eager budget", "every k-th block", "compile budget"
MARGIN, AREA_GOAL = 0.02, 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """What one way to run a step costs.

    Attributes:
        rule: who chose it.
        setting: how.
        peak_bytes: most allocated at once, measured on the CPU.
        time: of a step, measured, as a share of the rule's plain step.
        predicted_bytes: None where nothing was predicted.
        predicted_time: likewise.
    """

    rule: str
    setting: str
    peak_bytes: int
    time: float
    predicted_bytes: int | None = None
    predicted_time: float | None = None


def of(points: Sequence[Point], rule: str) -> list[Point]:
    """Return the points of one rule."""
    return [point for point in points if point.rule == rule]


def dominating(ours: Sequence[Point], peers: Sequence[Point]) -> list[tuple[Point, Point]]:
    """Return pairs of ours and a peer that is better by more than the margin in both."""
    keep = 1 - MARGIN
    return [
        (own, peer)
        for own in ours
        for peer in peers
        if peer.peak_bytes < keep * own.peak_bytes and peer.time < keep * own.time
    ]


def area(points: Sequence[Point], plain_bytes: int, slowest: float) -> float:
    """Return the area below the steps of some points, from a time of 1 to the slowest."""
    steps = sorted((max(point.time, 1.0), point.peak_bytes / plain_bytes) for point in points)
    total, here, peak = 0.0, 1.0, 1.0
    for at, height in [*(step for step in steps if step[0] < slowest), (slowest, 0.0)]:
        total += (at - here) * peak
        here, peak = at, min(peak, height)
    return total


def judge(name: str, points: Sequence[Point]) -> dict[str, Any]:
    """Return how the budget compares with every k-th block on one model."""
    ours, peers = of(points, OURS), of(points, BY_HAND)
    plain = ours[0]
    slowest = max(point.time for point in [*ours, *peers])
    own, by_hand = (area(side, plain.peak_bytes, slowest) for side in (ours, [plain, *peers]))
    shared = min(max(point.time for point in side) for side in (ours, peers))
    inner = [area(side, plain.peak_bytes, shared) for side in (ours, [plain, *peers])]
    beaten = dominating(ours, peers)
    told = [p for p in points if p.predicted_bytes is not None]
    return {
        "model": name,
        "plain peak MiB": plain.peak_bytes / MIB,
        "least, budget": min(p.peak_bytes for p in ours) / plain.peak_bytes,
        "least, k-th": min(p.peak_bytes for p in peers) / plain.peak_bytes,
        "area / k-th's": own / by_hand,
        "area goal": report.verdict(own <= AREA_GOAL * by_hand),
        "where both have points": inner[0] / inner[1],
        "dominated": len({own.setting for own, _ in beaten}),
        "dominance goal": report.verdict(not beaten),
        "worst peak error %": max(
            100 * abs((p.predicted_bytes or 0) / p.peak_bytes - 1) for p in told
        ),
    }


def rows_of(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return the points as a table."""
    plains = {p.rule: p.peak_bytes for p in reversed(points) if p.rule != BY_HAND}
    plains[BY_HAND] = plains[OURS]
    return [
        {
            "rule": p.rule,
            "setting": p.setting,
            "peak MiB": p.peak_bytes / MIB,
            "peak / plain": p.peak_bytes / plains[p.rule],
            "time / plain": p.time,
            "predicted peak MiB": None if p.predicted_bytes is None else p.predicted_bytes / MIB,
            "predicted time / plain": p.predicted_time,
        }
        for p in points
    ]
