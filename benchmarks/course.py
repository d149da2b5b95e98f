"""How long each chapter of the course takes, and how much memory it holds, with its own answers.

Each is run by the command that runs them headless. Twice a second the memory of all processes below
it is read: the kernel and memlab's workers, a page that several share once (proportional set size,
so Linux alone); then the same with the command itself. Goals: 180 s and 1.5 GiB.

    python -m benchmarks.course [--out course.json] [c01 c05 ...]
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.panel_memory import tree_bytes
from memlab._util.units import GIB

MOST_SECONDS, MOST_GIB = 180, 1.5
PAUSE_SECONDS = 0.5
OK = "ok"


def main() -> None:
    """Print a row as each chapter ends, and write them if a file is named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args()
    names = asked.names or [file.name[:3] for file in sorted(Path("notebooks").glob("c*.ipynb"))]
    rows = []
    for name in names:
        rows.append(row := measured(name))
        text = "{name}  {seconds:6.1f} s  {gib:5.2f} GiB  {gib_with_command:5.2f} GiB  {outcome}"
        print(text.format(**row), flush=True)
    ran = [row for row in rows if row["outcome"] == OK]
    within = [row for row in ran if row["seconds"] < MOST_SECONDS and row["gib"] < MOST_GIB]
    print(f"ran and within {MOST_SECONDS} s and {MOST_GIB} GiB: {len(within)} of {len(rows)}")
    if asked.out:
        asked.out.write_text(json.dumps(rows, indent=1) + "\n")


def measured(name: str) -> dict[str, object]:
    """Return how one chapter ended, its seconds, and the most GiB that it held."""
    most = beside = 0
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "memlab", "notebooks", name]
        options = ["--run", "--device", "cpu", "--quick", "--out", folder]
        running = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
        while running.poll() is None:
            with contextlib.suppress(OSError):  # one of them has just ended
                own, *below = tree_bytes(running.pid)
                most, beside = max(most, sum(below)), max(beside, own + sum(below))
            time.sleep(PAUSE_SECONDS)
    outcome = OK if running.returncode == 0 else f"exit {running.returncode}"
    seconds = time.perf_counter() - start
    gib = {"gib": most / GIB, "gib_with_command": beside / GIB}
    return {"name": name, "seconds": seconds, **gib, "outcome": outcome}


if __name__ == "__main__":
    main()
