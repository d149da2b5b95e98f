"""What the benchmarks share: options, versions, tables, JSON, intervals, fresh processes.

It judges nothing and times nothing.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import memlab
from memlab.devices.here import describe

LIBRARIES = ("torch", "numpy", "transformers", "monai", "ipywidgets")
NUM_RESAMPLES = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How a benchmark was asked to run: the short form or not, and where its JSON goes."""

    quick: bool
    out: Path


def options(file: str, description: str) -> Options:
    """Return the options on the command line of the benchmark in this file."""
    parser = argparse.ArgumentParser(description=description.strip().splitlines()[0])
    default = Path("build/benchmarks") / f"{Path(file).stem}.json"
    parser.add_argument("--out", type=Path, default=default, help="where the numbers go, as JSON")
    parser.add_argument("--quick", action="store_true", help="fewer cases and repeats")
    given = parser.parse_args()
    return Options(quick=given.quick, out=given.out)


def environment() -> dict[str, Any]:
    """Return what the numbers depend on: versions, processor, threads, and the load just now."""
    versions = {"memlab": memlab.__version__, "python": sys.version.split()[0]}
    for library in LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            versions[library] = "not installed"
    return {
        "versions": versions,
        "processor": describe(torch.device("cpu")),
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "load_average_at_start": os.getloadavg(),
    }


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print rows as a table; the columns are the keys of the first."""
    print(f"\n{title}\n{table(rows)}", flush=True)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as aligned text, numbers to the right; the columns are the keys of the first."""
    header = list(rows[0])
    cells = [[_text(row.get(name)) for name in header] for row in rows]
    widths = [max(len(line[i]) for line in [header, *cells]) for i in range(len(header))]
    is_number = [isinstance(rows[0][name], int | float) for name in header]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in [header, ["-" * width for width in widths], *cells]
    ]
    return "\n".join(lines)


def write(given: Options, before: dict[str, Any], results: dict[str, Any]) -> None:
    """Write the environment and the results as JSON and say where."""
    given.out.parent.mkdir(parents=True, exist_ok=True)
    content = {"quick": given.quick, **before, **results}
    given.out.write_text(json.dumps(content, indent=1) + "\n")
    load = ", ".join(f"{value:.2f}" for value in before["load_average_at_start"])
    versions = ", ".join(f"{name} {version}" for name, version in before["versions"].items())
    print(
        f"\n{versions}; {before['processor']}, {before['num_cores']} cores, "
        f"{before['num_threads']} threads; load average at start {load}\nwrote {given.out}"
    )


def rewritten(text: str, mark: str, new: str) -> str:
    """Return a page with new text between its comments "mark: begin" and "mark: end".

    Raises:
        ValueError: the lines are not there.
    """
    marks = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    head, begin, rest = text.partition(marks[0])
    _, end, tail = rest.partition(marks[1])
    if not begin or not end:
        raise ValueError(f"the page has no lines {' and '.join(marks)}; put them where it belongs")
    return f"{head}{begin}{new}{end}{tail}"


def median_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Return the bootstrap's 95 % interval of the median of these values."""
    drawn = np.random.default_rng(seed).choice(np.asarray(values), (NUM_RESAMPLES, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return float(low), float(high)


def fresh_python(
    code: str, *, stdin: bytes = b"", flags: Sequence[str] = ()
) -> subprocess.CompletedProcess[bytes]:
    """Run code in a new interpreter that imports from where this one does.

    Raises:
        RuntimeError: it failed; the message is the end of what it said.
    """
    done = subprocess.run(
        [sys.executable, *flags, "-c", code],
        input=stdin,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"a fresh process exited with status {done.returncode}: "
            f"{done.stderr.decode(errors='replace')[-2000:]}"
        )
    return done


def verdict(is_met: bool) -> str:
    """Return how a goal is told."""
    return "met" if is_met else "MISSED"


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
