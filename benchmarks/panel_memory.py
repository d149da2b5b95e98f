"""What one open panel holds: its kernel and memlab's workers, in a machine as small as Binder's.

The quickstart's panel is opened in a kernel without a browser, once as it is and once as on a
machine of 2 GB; memory is read once it has not changed for a while, and likewise after a measured
step. A page that several processes share is counted once (proportional set size, so Linux alone).
Goal on 2 GB, open: below 0.9 GiB.

    OMP_NUM_THREADS=1 python -m benchmarks.panel_memory
"""

import json
import sys
import time
from pathlib import Path

from jupyter_client.manager import start_new_kernel

from memlab._util.units import GIB, KIB

OPEN = """
from memlab.runtime import process
if {total}:
    process.machine_memory_bytes = lambda: {total}
import memlab
panel = memlab.panel(memlab.workloads.get("gpt-small"))
panel
"""
STILL_SECONDS, MOST_SECONDS = 30, 240
STEADY = 0.02  # by which memory that has not changed may differ


def main() -> None:
    """Print a table and, on request, write it to the file that is named."""
    rows = [held(total) for total in (0, 2 * GIB)]
    for row in rows:
        print("  ".join(f"{name}: {value}" for name, value in row.items()))
    for file in sys.argv[1:]:
        Path(file).write_text(json.dumps(rows, indent=1) + "\n")


def held(total: int) -> dict[str, object]:
    """Return what the kernel and its processes hold, GiB, when the panel is open and has run."""
    manager, client = start_new_kernel()
    try:
        _execute(client, OPEN.format(total=total))
        settled = _settled(manager.provisioner.process.pid)
        _execute(client, "panel.run()")
        ran = _settled(manager.provisioner.process.pid)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return {
        "machine": f"{total / GIB:.0f} GiB" if total else "this one",
        **_named("open", settled),
        **_named("after a run", ran),
    }


def _settled(pid: int) -> list[int]:
    """Return what each process holds once that has not changed for `STILL_SECONDS`."""
    begun = since = time.monotonic()
    held = tree_bytes(pid)
    while time.monotonic() - since < STILL_SECONDS and time.monotonic() - begun < MOST_SECONDS:
        time.sleep(1)
        now = tree_bytes(pid)
        if len(now) != len(held) or abs(sum(now) - sum(held)) > STEADY * sum(held):
            held, since = now, time.monotonic()
    return held


def _execute(client: object, code: str) -> None:
    reply = client.execute_interactive(code, output_hook=lambda message: None, timeout=300)  # type: ignore[attr-defined]
    assert reply["content"]["status"] == "ok", reply["content"]


def _named(when: str, sizes: list[int]) -> dict[str, object]:
    return {
        f"{when}, GiB": round(sum(sizes) / GIB, 2),
        f"{when}, of each process": " + ".join(f"{size / GIB:.2f}" for size in sizes),
    }


def tree_bytes(pid: int) -> list[int]:
    """Return the proportional set size of a process and of all below it, bytes."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        threads = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return []
    own = sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * KIB
    return [own, *(size for each in " ".join(threads).split() for size in tree_bytes(int(each)))]


if __name__ == "__main__":
    main()
