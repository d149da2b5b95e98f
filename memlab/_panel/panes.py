"""What a person has opened beside the sliders and the picture, and what it shows."""

from collections.abc import Iterable
from typing import Any

from memlab._panel.panel_state import PanelState
from memlab._panel.state import setting_words
from memlab._panel.texts import as_json
from memlab._util.units import format_bytes, format_seconds, plus_minus
from memlab.figures.peak import ALONE, rank_bars
from memlab.prediction.evidence import PublicRun, evidence
from memlab.result import StepResult
from memlab.search.explain import Remedy, explain

HELD_ROWS = 8
HEADS_OF_EVIDENCE = (
    "model", "card", "setting", "measured", "predicted", "predicted is off", "published by",
)  # fmt: skip
NUM_EVIDENCE = 4
OF_EVIDENCE = {
    "peak_reserved_bytes": "reserved", "peak_allocated_bytes": "allocated",
    "step_seconds": "time of a step",
}  # fmt: skip
WITH_EVIDENCE = (
    "What others measured on real cards and published, beside what memlab predicts of it. Those "
    "come first that are nearest by kinds of kernels, generation of the card, format and size."
)
OF_TIME = (
    "The ± is the doubt about kernels, by other data, and about the host, whose pace comes from "
    "GPTs and ResNets that are among these runs."
)
NO_EVIDENCE = "There is no public run to show for these settings."
OF_CPU = (
    "There is no public run to show: what a CPU takes is predicted from operators that were timed "
    "on this machine, and a run is held against its prediction in the table of runs."
)
SENT = ("together", "ranks", "calls a step", "sent by a rank")


class Panes:
    """What the page is told of each pane.

    Args:
        told: of the panel.
    """

    def __init__(self, told: PanelState) -> None:
        self._told = told
        self._open: dict[str, frozenset[str]] = {}  # by view
        self._shown: dict[str, Any] = {}

    def open(self, view: str, names: Iterable[str]) -> None:
        """Note which panes are open in a view."""
        others = {by: opened for by, opened in self._open.items() if by != view}
        now = frozenset(names)
        self._open = {**others, view: now} if now else others  # anew: threads read it

    def begin(self, view: str) -> None:
        """Have the other views say again what is open: one whose tab is gone could not close it."""
        self._open = {}
        self._told.send({"type": "views", "by": view})

    def is_open(self, name: str) -> bool:
        """Return whether a pane is open in any view."""
        return any(name in names for names in self._open.values())

    def show(self, **contents: Any) -> None:
        """Show contents by pane."""
        with self._told.together():  # threads show them
            self._shown |= contents
            self._told.tell(panes=dict(self._shown))


def peak_pane(result: StepResult, limit_bytes: int | None) -> dict[str, Any]:
    """Return what holds the peak of a result, and what would lower it."""
    found = explain(result.against_limit(limit_bytes))
    return {
        "sentence": found.message,
        "facts": [str(row) for row in found.rows[:HELD_ROWS]],
        "remedies": [_remedy(one) for one in found.remedies],
    }


def _remedy(remedy: Remedy) -> dict[str, Any]:
    freed = remedy.freed_bytes
    less = "" if freed is None else f"peak about {format_bytes(freed)} lower; "
    return {
        "label": ", ".join(setting_words(*item) for item in remedy.change.items()),
        "effect": f"{less}{remedy.effect}; price: {remedy.price}",
        "fields": as_json(remedy.change),
    }


def evidence_pane(result: StepResult | None) -> dict[str, Any]:
    """Return the real runs that are nearest to a prediction, for each of its numbers."""
    if result is None:
        return {"about": NO_EVIDENCE, "heads": (), "numbers": []}
    numbers = []
    for number, name in OF_EVIDENCE.items():
        runs = evidence(result, number, NUM_EVIDENCE)
        if not runs or runs[0].number != number:  # what was reserved stands there already
            continue
        value, width = getattr(result, number), (result.uncertainty or {}).get(number, 0.0)
        text = format_seconds(value) if number == "step_seconds" else format_bytes(value)
        numbers.append({
            "title": f"{name}: {text}{plus_minus(width)}, predicted for {result.device}",
            "about": OF_TIME if number == "step_seconds" else "",
            "rows": [_evidence_row(run) for run in runs],
        })  # fmt: skip
    about = OF_CPU if result.device.startswith("cpu") else NO_EVIDENCE
    return {"about": WITH_EVIDENCE if numbers else about, "heads": HEADS_OF_EVIDENCE,
            "numbers": numbers}  # fmt: skip


def _evidence_row(run: PublicRun) -> list[str]:
    model, *cells, off, source = run.cells
    whole = off.replace(" ", "\N{NO-BREAK SPACE}")
    return [model.rpartition("/")[2], *cells, whole, source.partition("@")[0]]


def ranks_pane(result: StepResult | None, limit_bytes: int | None) -> dict[str, Any]:
    """Return what each rank of a result holds at its peak, and what a rank sends."""
    bars = rank_bars(result) if result else []
    if result is None or not bars:
        return {"alone": ALONE, "ranks": [], "sent": None}
    ranks = [
        {
            "label": bar.label,
            "bytes": bar.peak_bytes,
            "byCategory": dict(bar.result.peak_by_category or {}),
            "limitBytes": limit_bytes,
        }
        for bar in bars
    ]
    return {"alone": "", "ranks": ranks, "sent": _sent(result)}


def _sent(result: StepResult) -> dict[str, Any] | None:
    if not result.communication:
        return None
    total = format_bytes(sum(each.sent_bytes for each in result.communication))
    return {
        "caption": f"A rank sends {total} a step, {result.source}, if all goes round a ring.",
        "heads": SENT,
        "rows": [
            [each.collective, str(each.num_ranks), str(each.num_calls),
             format_bytes(each.sent_bytes)]
            for each in result.communication
        ],
    }  # fmt: skip
