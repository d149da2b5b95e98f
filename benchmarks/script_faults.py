"""Does `run_script` find what is wrong in a script, and nothing in a clean one?

Each script of `benchmarks/scripts/faults` runs unchanged for a card that is not here. A line with a
fault ends in a comment such as `# fault: kept graph`; a script without one is clean, and so are
those of `benchmarks/scripts`. Where a fault has several such lines, any of them is right. What is
found besides is an alarm. Those of `benchmarks/scripts/unseen` were written after the rules.

    python -m benchmarks.script_faults --quick --out script_faults.json
"""

import contextlib
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from memlab.devices import cards
from memlab.prediction.predict_script import predict_script_in_process
from memlab.prediction.run_result import FaultKind
from memlab.tracing.person_script import Script

SCRIPTS = Path(__file__).with_name("scripts")
FAULTS, UNSEEN = SCRIPTS / "faults", SCRIPTS / "unseen"
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
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        result = predict_script_in_process(
            Script(path=str(script)), cards.resolve(CARD), memory_limit=None, report=lambda _: None
        )
    found = [(fault.kind, fault.line) for fault in result.faults]
    right = {kind for kind, lines in wanted.items() if any((kind, at) in found for at in lines)}
    alarms = [f"{kind.name.lower()}:{at}" for kind, at in found if at not in wanted.get(kind, ())]
    effect = [fault for fault in result.faults if fault.kind in right]
    return {
        "script": script.name,
        "unseen": (UNSEEN / script.name).exists(),
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
        for each in (FAULTS, UNSEEN, SCRIPTS):
            shutil.copytree(each, here, dirs_exist_ok=True)
        os.chdir(here)
        if not given.quick:
            subprocess.run([sys.executable, MAKES_DATA], check=True, capture_output=True)
        names = sorted(each.name for each in here.glob("*.py"))
        names = [name for name in names if name not in (MAKES_DATA, PARTS)]
        paths = [here / name for name in (names[:NUM_QUICK] if given.quick else names)]
        rows = []
        # a process for each script: libraries keep state of theirs
        with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
            for row in pool.imap(row_of, paths):
                print(row["script"], row["said"], flush=True)
                rows.append(row)
        os.chdir(SCRIPTS)
    found = []
    for title, is_unseen in (("seen", (False,)), ("unseen", (True,)), ("all", (False, True))):
        some = [row for row in rows if row["unseen"] in is_unseen and row["outcome"] == "ok"]
        faulty = [row for row in some if row["planted"] != "-"]
        clean = [row for row in some if row["planted"] == "-"]
        num_found = sum(row["found"] for row in faulty)
        num_alarms = sum(bool(row["alarms"]) for row in clean)
        found.append({
            "scripts": title, "planted": len(faulty), "found with the right line": num_found,
            "with an alarm beside it": sum(bool(row["alarms"]) for row in faulty),
            "clean": len(clean), "clean with an alarm": num_alarms,
            "not run": sum(row["unseen"] in is_unseen and row["outcome"] != "ok" for row in rows),
            "goal": report.verdict(num_found >= LEAST_FOUND * len(faulty) and not num_alarms),
        })  # fmt: skip
    shown = [{name: row[name] for name in row if name != "said"} for row in rows]
    report.show("what is planted in scripts, and what is found", shown)
    report.show("all of them", found)
    report.write(given, before, {"scripts": rows, "all": found})


if __name__ == "__main__":
    main()
