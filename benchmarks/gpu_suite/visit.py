"""A visit: its record, its minutes, what is done already, and how long the next case may take."""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memlab import Outcome
from memlab._util.units import MIB
from memlab.cli.device_visit import Case
from memlab.store.records import SUFFIX, Kind, append, cut_damage, read_lines
from memlab.techniques.compilation import is_compiled

FIRST_SECONDS = {"cuda": 15.0, "cpu": 5.0}  # of a model that nothing is known of yet
COMPILE_SECONDS = 40.0  # the same, where it is compiled
LATEST = 3  # cases of a model that the next one's time is told from
SEGMENT_BYTES = 20 * MIB  # the caching allocator's, for blocks of 1 to 10 MiB
GOALS = {"configs a minute": 25.0, "share of time measuring": 0.7, "again, time": 0.03}
UNDONE = (Outcome.TIMED_OUT, Outcome.CANCELLED)  # for want of minutes: a later visit may do it


Alike = tuple[str, str, bool]


def _alike(case: Case) -> Alike:
    """Return what cases have in common whose times tell of one another."""
    return str(case.kind), case.workload, is_compiled(case.config)


@dataclass(slots=True, eq=False)
class Visit:
    """What is known while a visit goes on.

    Attributes:
        path: of the record.
        name: when it began, by which its lines are known.
        device_type: "cuda" or "cpu".
        begun: on the monotonic clock.
        seconds: that the visit may take.
        done: keys of the cases that the record holds.
        took: by kind, workload and whether it compiles, batch size and seconds of each case.
        num_runs: recorded in this visit.
        lock: held while a line is added.
    """

    path: Path
    name: str
    device_type: str
    begun: float
    seconds: float
    done: set[str]
    took: dict[Alike, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    num_runs: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def seconds_left(self) -> float:
        """What is left of the visit."""
        return self.seconds - (time.monotonic() - self.begun)

    def is_done(self, case: Case) -> bool:
        """Return whether the record holds the case, of this torch."""
        return case.key(torch.__version__) in self.done

    def estimate(self, case: Case) -> float:
        """Return the seconds that a case may take, from those like it that came before."""
        alike = self.took[_alike(case)][-LATEST:]
        if not alike:
            return COMPILE_SECONDS if is_compiled(case.config) else FIRST_SECONDS[self.device_type]
        batch_size = case.config.batch_size
        return max(seconds * max(1.0, batch_size / size) for size, seconds in alike)

    def note(self, case: Case, line: Mapping[str, Any], seconds: float) -> bool:
        """Add a case to the record, unless it ended for want of minutes; return whether it was."""
        self.took[_alike(case)].append((case.config.batch_size, seconds))
        outcome = line.get("result", line).get("outcome")
        if outcome in UNDONE or not line.get("complete", True):
            return False
        key = case.key(torch.__version__)
        with self.lock:
            append(self.path, case.kind, {**line, "key": key})
        self.done.add(key)
        self.num_runs += case.kind is Kind.RUN
        return True

    def end(self, measuring_seconds: float) -> dict[str, Any]:
        """Add what the visit came to, to the record, and return it."""
        elapsed = time.monotonic() - self.begun
        summary: dict[str, Any] = {
            "seconds": elapsed,
            "runs": self.num_runs,
            "configs a minute": 60 * self.num_runs / elapsed,
            "share of time measuring": measuring_seconds / elapsed,
            **repeatability(read_lines(self.path).of(Kind.RUN)),
        }
        more = {"summary": summary, "load_average_at_end": os.getloadavg()}
        with self.lock:
            append(self.path, Kind.VISIT, {"visit": self.name, **more})
        return summary


def begin(folder: Path, facts: Mapping[str, Any], minutes: float, begun: float) -> Visit:
    """Return a visit that adds to what is recorded of the device in this folder."""
    path = folder / f"{facts['device']}{SUFFIX}"
    lines = read_lines(path)
    if lines.damage:
        print(f"{lines.damage} The rest is put aside, and recorded anew.", flush=True)
        cut_damage(lines)
    name = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    append(path, Kind.VISIT, {"visit": name, "minutes": minutes, **facts})
    return Visit(
        path=path,
        name=name,
        device_type=facts["type"],
        begun=begun,
        seconds=60 * minutes,
        done={line["key"] for line in lines.content if "key" in line},
    )


def repeatability(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how far second readings are from the first ones, over all that were taken twice."""
    first = {run["key"]: run["result"] for run in runs if run["group"] != "again"}
    pairs = []
    for run in runs:
        other = first.get(run["key"].replace("run|again|", "run||", 1))
        if run["group"] == "again" and other is not None:
            pairs.append((other, run["result"]))
    pairs = [(one, two) for one, two in pairs if one["outcome"] == two["outcome"] == Outcome.OK]
    if not pairs:
        return {"again": 0}
    times = [abs(two["step_seconds"] / one["step_seconds"] - 1) for one, two in pairs]
    reserved = [abs((two[name] or 0) - (one[name] or 0))
                for one, two in pairs for name in ("peak_reserved_bytes",)]  # fmt: skip
    same = [one["peak_allocated_bytes"] == two["peak_allocated_bytes"] for one, two in pairs]
    return {
        "again": len(pairs),
        "again, allocated the same": sum(same),
        "again, reserved within a segment": sum(size <= SEGMENT_BYTES for size in reserved),
        "again, time, median": float(np.median(times)),
        "again, time, p95": float(np.quantile(times, 0.95)),
        "again, time within 3 %": sum(share <= GOALS["again, time"] for share in times),
    }


def table(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each kind and group of lines, with how they ended."""
    rows: dict[str, dict[str, Any]] = {}
    for line in lines:
        if line["kind"] == Kind.VISIT:
            continue
        name = line.get("group") or line["kind"]
        row = rows.setdefault(name, {"of": name, "lines": 0, "ok": 0, "out of memory": 0,
                                     "unsupported": 0, "other": 0})  # fmt: skip
        found = line.get("report") or line.get("result") or line
        outcome = str(found.get("outcome", Outcome.OK)).replace("_", " ")
        row["lines"] += 1
        row[outcome if outcome in row else "other"] += 1
    return list(rows.values())
