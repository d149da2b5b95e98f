"""Does `run_script` find what is wrong in a script, and nothing in a clean one?

Each script of `benchmarks/scripts/faults` runs unchanged for a card that is not here. A line with a
fault ends in a comment such as `# fault: kept graph`; a script without one is clean, and so are
those of `benchmarks/scripts`. Where a fault has several such lines, any of them is right. What is
found besides is an alarm.

    python -m benchmarks.script_faults --quick --out script_faults.json
"""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from memlab import run_script
from memlab.prediction.run_result import FaultKind

SCRIPTS = Path(__file__).with_name("scripts")
FAULTS = SCRIPTS / "faults"
MAKES_DATA, PARTS = "make_data.py", "parts.py"
NUM_QUICK, CARD = 4, "rtx-4090"
LEAST_FOUND = 0.9
MARK = re.compile(r"# fault: (.*)$")


def planted(script: Path) -> dict[FaultKind, set[int]]:
    """Return the faults of a script, with the lines of each."""
    found: dict[FaultKind, set[int]] = {}
    for number, line in enumerate(script.read_text().splitlines(), start=1):
        if match := MARK.search(line):
            kind = FaultKind[match[1].strip().replace(" ", "_").upper()]
            found.setdefault(kind, set()).add(number)
    return found


def row_of(script: Path) -> dict[str, Any]:
    """Return what is found in a script, beside what is planted there."""
    wanted, start = planted(script), time.perf_counter()
    result = run_script(script, device=CARD, progress=False)
    found = [(fault.kind, fault.line) for fault in result.faults]
    right = {kind for kind, lines in wanted.items() if any((kind, at) in found for at in lines)}
    alarms = [f"{kind.name.lower()}:{at}" for kind, at in found if at not in wanted.get(kind, ())]
    effect = [fault for fault in result.faults if fault.kind in right]
    return {
        "script": script.name,
        "outcome": str(result.outcome),
        "planted": ", ".join(kind.name.lower() for kind in wanted) or "-",
        "found": not wanted.keys() - right if wanted else None,
        "alarms": ", ".join(alarms),
        "stage": effect[0].stage if effect else "",
        "before": effect[0].before_bytes if effect else None,
        "after": effect[0].after_bytes if effect else None,
        "seconds": round(time.perf_counter() - start, 1),
        "said": [str(fault) for fault in result.faults],
    }


def main() -> None:
    """Run all scripts."""
    given, before = report.options(__file__, __doc__ or ""), report.environment()
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        shutil.copytree(FAULTS, here, dirs_exist_ok=True)
        names = sorted(each.name for each in FAULTS.glob("*.py") if each.name != PARTS)
        if given.quick:
            names = names[:NUM_QUICK]
        else:
            shutil.copytree(SCRIPTS, here, dirs_exist_ok=True)
            subprocess.run([sys.executable, MAKES_DATA], check=True, capture_output=True, cwd=here)
            more = {each.name for each in SCRIPTS.glob("*.py")} - {MAKES_DATA}
            names += sorted(more)
        rows = [row_of(here / name) for name in names]
    faulty, clean = ([row for row in rows if (row["planted"] != "-") is is_faulty]
                     for is_faulty in (True, False))  # fmt: skip
    num_found = sum(row["found"] for row in faulty)
    alarms = sum(bool(row["alarms"]) for row in clean)
    found = {
        "planted": len(faulty), "found with the right line": num_found, "clean": len(clean),
        "clean with an alarm": alarms,
        "goal": report.verdict(num_found >= LEAST_FOUND * len(faulty) and not alarms),
    }  # fmt: skip
    shown = [{name: row[name] for name in row if name != "said"} for row in rows]
    report.show("what is planted in scripts, and what is found", shown)
    report.show("all of them", [found])
    report.write(given, before, {"scripts": rows, **found})


if __name__ == "__main__":
    main()
