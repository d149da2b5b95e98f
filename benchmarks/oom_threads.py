"""How often `memlab.explain_error` finds the cause that a public thread found.

`oom_threads.json` has, of each thread, its address, the message that it quotes, the cause and who
found it. Right: the cause is likely, or it and at most one other are the only possible ones where
none is likely. Confident and wrong: another cause is likely and the true one is excluded. The rules
were written with the threads for development; those held out were first run afterwards: 12 of 20
right, none confident and wrong. Then what is a class of error was mended (two forms of a host's
message, a request without the card's capacity, a context's share in old messages), so a later
number is not one of threads held out. Messages are quoted without the advice at their end.

    python -m benchmarks.oom_threads
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import memlab
from benchmarks import report

THREADS = Path(__file__).with_suffix(".json")
LEAST_RIGHT = 16  # of the 20 held out


def judged(thread: dict[str, Any]) -> dict[str, Any]:
    """Return a thread with what is likely and possible, and whether that is right."""
    found = memlab.explain_error(thread["message"])
    likely, possible = (list(map(str, found.of_verdict(each))) for each in ("likely", "possible"))
    cause = thread["cause"]
    if cause in likely or (not likely and cause in possible and len(possible) <= 2):
        verdict = "right"
    elif likely and cause in map(str, found.of_verdict("excluded")):
        verdict = "confident and wrong"
    else:
        verdict = "undecided"
    return {**thread, "likely": likely, "possible": possible, "verdict": verdict}


def main() -> None:
    """Print a table of the threads, count the verdicts, and write both as JSON."""
    given, before = report.options(__file__, __doc__ or ""), report.environment()
    rows = [judged(thread) for thread in json.loads(THREADS.read_text(encoding="utf-8"))]
    counts = {}
    for group in ("development", "held out"):
        chosen = [row for row in rows if row["for"] == group]
        shown = [
            {"thread": row["address"].removeprefix("https://github.com/"), "cause": row["cause"],
             "verdict": row["verdict"], "likely": ", ".join(row["likely"]),
             "possible": ", ".join(row["possible"])}
            for row in chosen
        ]  # fmt: skip
        report.show(group, shown)
        counts[group] = Counter(row["verdict"] for row in chosen)
        print(f"{group}: {dict(counts[group])} of {len(chosen)}")
    held = counts["held out"]
    is_met = held["right"] >= LEAST_RIGHT and not held["confident and wrong"]
    print(f"goal, {LEAST_RIGHT} right and none confident and wrong: {report.verdict(is_met)}")
    report.write(given, before, {"counts": counts, "threads": rows})


if __name__ == "__main__":
    main()
