"""How often `memlab.explain_error` finds the cause that a public thread found.

`oom_threads.json` has, of each thread, its address, the message that it quotes, the cause and who
found it. The verdicts:

- right: the cause is likely, or it and at most one other are the only possible ones where none is
  likely;
- wrong: the cause is excluded;
- another likely: only others are likely, and the cause is not excluded;
- undecided: nothing is likely, which is what memlab says;
- not read: memlab recognised no error.

The rules were written with the threads for development; those held out were first run afterwards:
12 of 20 right, none wrong. Then what is a class of error was mended (two forms of a host's message,
a request without the card's capacity, a context's share in old messages), so a later number is not
one of threads held out. Fifteen more, of other forms and kinds, were then written down before they
were run; `first_sight` is what came out, before classes of error were mended again. Of twenty more
9 were right at first sight, and none wrong; then forms of the message were added, and rules by who
asked for the memory. Of fifteen, written down after that, 10 were right at first sight, 8 of them
as likely, and none wrong; one rule, of progress bars that name an evaluation, came after them. The
last ten are all with a message and a cause that six searches by field gave: 8 right at first sight,
none wrong; one form and the reading of a bar at 0 % came after them. Messages are quoted without
the advice at their end.

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
    elif cause in map(str, found.of_verdict("excluded")):
        verdict = "wrong"
    elif likely:
        verdict = "another likely"
    else:
        verdict = "undecided" if found.causes else "not read"
    return {**thread, "likely": likely, "possible": possible, "verdict": verdict}


def main() -> None:
    """Print a table of the threads, count the verdicts, and write both as JSON."""
    given, before = report.options(__file__, __doc__ or ""), report.environment()
    rows = [judged(thread) for thread in json.loads(THREADS.read_text(encoding="utf-8"))]
    counts = {}
    held_out = ("held out", "second held out", "third held out", "fourth held out",
                "fifth held out")  # fmt: skip
    for group in ("development", *held_out):
        chosen = [row for row in rows if row["for"] == group]
        shown = [
            {"thread": row["address"].removeprefix("https://github.com/"), "cause": row["cause"],
             "at first sight": row.get("first_sight", ""), "verdict": row["verdict"],
             "likely": ", ".join(row["likely"]),
             "possible": ", ".join(row["possible"])}
            for row in chosen
        ]  # fmt: skip
        report.show(group, shown)
        counts[group] = Counter(row["verdict"] for row in chosen)
        print(f"{group}: {dict(counts[group])} of {len(chosen)}")
    first = {}
    for group in held_out[1:]:
        first[group] = Counter(row["first_sight"] for row in rows if row["for"] == group)
        print(f"{group}, at first sight: {dict(first[group])}")
    is_met = counts["held out"]["right"] >= LEAST_RIGHT and not any(
        count["wrong"] for count in counts.values()
    )
    print(
        f"goal, {LEAST_RIGHT} right of the first held out and none wrong: {report.verdict(is_met)}"
    )
    report.write(given, before, {"counts": counts, "first_sight": first, "threads": rows})


if __name__ == "__main__":
    main()
