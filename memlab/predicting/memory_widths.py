"""How far off predicted memory of a card is, as found on models that were left out.

`memory.json` beside this file is written by `python -m benchmarks.calibrate_memory`, which says
how. Of reserved bytes it has the half-width within which nine in ten of the measured runs lie if
the model of the run is left out of the calibration; memory of convolutions is less certain than
the rest, because cuDNN does not say what it takes. What a step needs was only bracketed, by runs
under caps: its half-width is by how much these contradict what is predicted.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memlab.costs.cudnn_workspace import Workspaces

FILE = Path(__file__).parent / "memory.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Width:
    """A relative half-width, 0.01 for +-1 %, and what it was found on."""

    half_width: float
    runs: int
    models: int


@functools.cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(FILE.read_text())
    return table


def weights() -> dict[Workspaces, float]:
    """Return the weight of each hypothesis about the workspaces of convolutions."""
    return {Workspaces(name): weight for name, weight in _table()["weights"].items()}


def width_of(number: str, *, convolutions: bool) -> Width:
    """Return the half-width of a predicted number.

    Args:
        number: "peak_allocated_bytes", "peak_reserved_bytes" or "needed_bytes".
        convolutions: whether the step has convolutions that may take a workspace.
    """
    return Width(**_table()["half_widths"][number]["convolutions" if convolutions else "others"])
