"""The tables of `wild.py`: what came of each package's models, and of all together."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.wild_trial import CARDS, RECOMPUTE

ANSWERS = ("ok", "unsupported")
"""Outcomes of a prediction for a card: a number, or a sentence that says why there is none."""


def row_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return one model's line: outcomes, peaks, error, and what recompute came to."""
    stages = row.get("stages", {})
    measured, predicted = stages.get("measure", {}), stages.get("predict", {})
    error = error_of(row)
    return {
        "package": row["package"],
        "model": row["name"],
        "plain": row["plain"],
        "measure": measured.get("outcome"),
        "predict": predicted.get("outcome"),
        "bytes": measured.get("bytes"),
        "error %": None if error is None else 100 * error,
        "beyond": is_beyond(row),
        **{card: stages.get(card, {}).get("outcome") for card in CARDS},
        **{kind: stages.get(kind, {}).get("is") for kind in RECOMPUTE},
    }


def error_of(row: dict[str, Any]) -> float | None:
    """Return how far the predicted peak is from the measured one, relative to it and signed."""
    stages = row.get("stages", {})
    measured = stages.get("measure", {}).get("bytes")
    predicted = stages.get("predict", {}).get("bytes")
    return predicted / measured - 1 if measured and predicted else None


def is_beyond(row: dict[str, Any]) -> bool:
    """Return whether the error of a prediction is larger than it claimed."""
    error = error_of(row)
    if error is None:
        return False
    claim = row["stages"]["predict"].get("claim") or 0.0
    measured = row["stages"]["measure"]["bytes"]
    predicted = row["stages"]["predict"]["bytes"]
    return abs(predicted - measured) > claim * predicted


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each package, and one for all."""
    packages = list(dict.fromkeys(row["package"] for row in rows))
    lines = [_line(name, [r for r in rows if r["package"] == name]) for name in packages]
    return [*lines, _line("all", rows)]


def _line(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    tried = [row for row in rows if "stages" in row]
    both = [row for row in tried if runs(row)]
    errors = [abs(error) for row in tried if (error := error_of(row)) is not None]
    recompute = [row["stages"].get(kind, {}).get("is") for row in tried for kind in RECOMPUTE]
    cards = [row["stages"].get(card, {}).get("outcome") for row in tried for card in CARDS]

    def quantile(share: float) -> float | None:
        return 100 * float(np.quantile(errors, share)) if errors else None

    return {
        "package": name,
        "drawn": len(rows),
        "tried": len(tried),
        "run and predicted": len(both),
        "share %": 100 * len(both) / len(tried) if tried else None,
        "median %": quantile(0.5),
        "p95 %": quantile(0.95),
        "max %": quantile(1.0),
        "beyond claim": sum(is_beyond(row) for row in tried),
        "no answer for a card": sum(outcome not in ANSWERS for outcome in cards),
        "same": recompute.count("same"),
        "refused": recompute.count("refused"),
        "silently other": recompute.count("differs"),
        "raise": len([is_ for is_ in recompute if is_ not in ("same", "refused", "differs", None)]),
    }


def runs(row: dict[str, Any]) -> bool:
    """Return whether a model is both measured and predicted on the CPU."""
    return all(row["stages"].get(s, {}).get("outcome") == "ok" for s in ("measure", "predict"))


def failures(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for everything that is not as it should be, by model and stage."""
    lines = []
    for row in rows:
        if "stages" not in row:
            continue
        for stage, found in row["stages"].items():
            wanted = ANSWERS if stage in CARDS else ("ok", "same", "refused", None)
            if found.get("outcome", found.get("is")) not in wanted:
                lines.append(f"{row['package']} {row['name']}: {stage}: {_said(found)}")
        if is_beyond(row):
            lines.append(
                f"{row['package']} {row['name']}: predicted {100 * (error_of(row) or 0):+.2f} %, "
                f"claimed {100 * (row['stages']['predict'].get('claim') or 0):.2f} %"
            )
    return lines


def refusals(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each refused recompute, with its sentence."""
    return [
        f"{row['package']} {row['name']}: {kind}: {found.get('message', '')[:200]}"
        for row in rows
        for kind, found in row.get("stages", {}).items()
        if found.get("is") == "refused"
    ]


def exclusions(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each model that was drawn and not tried, with the reason."""
    return [
        f"{row['package']} {row['name']}: plain PyTorch: {row['plain']}: {row.get('why', '')[:160]}"
        for row in rows
        if "stages" not in row
    ]


def meter_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each model that the independent meter saw."""
    return [
        {
            "model": f"{row['package']} {row['name']}",
            "memlab bytes": row["stages"]["measure"].get("bytes"),
            "independent bytes": row["stages"]["meter"].get("bytes"),
        }
        for row in rows
        if "meter" in row.get("stages", {})
    ]


def _said(found: dict[str, Any]) -> str:
    said = found.get("outcome") or found.get("is")
    return f"{said}: {' '.join(str(found.get('message', '')).split())[:300]}"
