"""How far off is each tool that says what a training step takes, on the same rows of real cards?

    python -m benchmarks.field                      all tables and tools
    python -m benchmarks.field --tables litgpt_table --tools memlab vramcalc

The rows are what others measured and published (`rows.py`, `benchmarks/data`). A tool gets what the
source says of a run, and never what was measured. Each runs in an environment of its own under
`build/field`, as its authors intend, without a network once it is there; where it cannot answer,
its file in `tools/` says why. Its number is held against what was read in a row, whatever it means
("means" below): allocated, reserved, or what the driver counted. To add a tool, add such a file.
"""

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.field import asking, judging, picture, rows
from benchmarks.public_runs import use_packages

BUILD = Path("build")
FOLDER = BUILD / "field"
FIRST = "memlab"  # takes longest
AT_ONCE = 2


def main() -> None:
    """Ask every tool, and show the table."""
    given = _options()
    asking.with_packages(BUILD)
    use_packages(BUILD / "public")
    before, begin = report.environment(), time.perf_counter()
    every = rows.every(tuple(given.tables))[:: given.every]
    for why in filter(None, map(rows.contradiction, every)):
        print(f"left out: {why}")
    every = [row for row in every if not rows.contradiction(row)]
    print(f"{len(every)} rows of {len({row.setting['table'] for row in every})} tables", flush=True)
    asked = asking.tools(given.tools)
    answers = ask(asked, every, given.environments.resolve())
    answers |= judging.published(every)
    lines = {
        group.title: [judging.line(tool, group, every, answers[tool]) for tool in answers]
        for group in judging.groups(every)
    }
    for title, found in lines.items():
        report.show(title, [each for each in found if each["answered"] or given.tools])
    report.show("what each number means", [
        {"tool": tool.name, "says what fits": tool.own_fits, "means": tool.means,
         "packages": ", ".join(tool.needs)}
        for tool in asked
    ])  # fmt: skip
    reasons = {tool: _reasons(said) for tool, said in answers.items()}
    if given.picture:
        whole = judging.groups(every)[0]
        errors = {tool: judging.errors(whole, every, said) for tool, said in answers.items()}
        errors = {tool: found for tool, found in errors.items() if found}
        picture.write(errors, len(whole.places), given.picture)
        print(picture.in_words(errors))
    minutes = (time.perf_counter() - begin) / 60
    print(f"\n{minutes:.1f} minutes")
    report.write(report.Options(quick=given.every > 1, out=given.out), before, {
        "lines": lines, "cannot": reasons, "minutes": minutes, "rows": [
            {"setting": row.setting, "source": row.truth.source, "bytes": row.truth.bytes,
             "seconds": row.truth.seconds, "fits": row.truth.fits, "guessed": row.truth.guessed,
             "said": {tool: said[i] for tool, said in answers.items() if i in said}}
            for i, row in enumerate(every)],
    })  # fmt: skip


def ask(
    tools: Sequence[asking.Tool], every: Sequence[rows.Row], folder: Path
) -> dict[str, dict[int, dict[str, Any]]]:
    """Return what each tool says of each row, by its place; a table is asked in one process."""
    tables = {row.setting["table"]: [] for row in every}  # type: dict[str, list[int]]
    for place, row in enumerate(every):
        tables[row.setting["table"]].append(place)
    found: dict[str, dict[int, dict[str, Any]]] = {tool.name: {} for tool in tools}

    def of_table(tool: asking.Tool, places: Sequence[int]) -> None:
        settings = [every[place].setting for place in places]
        said = asking.answers(tool, settings, folder)
        for place, answer in zip(places, said, strict=True):
            found[tool.name][place] = answer

    def of_tool(tool: asking.Tool) -> None:
        for places in tables.values():
            of_table(tool, places)
        print(f"{tool.name} answered", flush=True)

    others = [tool for tool in tools if tool.name != FIRST]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        jobs = [
            pool.submit(of_table, tool, places)
            for tool in tools if tool.name == FIRST for places in tables.values()
        ]  # fmt: skip
        jobs += [pool.submit(of_tool, tool) for tool in others]
        for job in jobs:
            job.result()
    return found


def _reasons(said: dict[int, dict[str, Any]]) -> dict[str, int]:
    """Return how often each reason was given for no answer."""
    reasons = [each["cannot"] for each in said.values() if "cannot" in each]
    return {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tables", nargs="+", default=[], choices=list(rows.TABLES))
    parser.add_argument("--tools", nargs="+", default=[], help="their names; default: all")
    parser.add_argument("--every", type=int, default=1, help="take every so manieth row")
    parser.add_argument("--environments", type=Path, default=FOLDER, help="of the tools")
    parser.add_argument("--picture", type=Path, help="where a picture of all peaks goes, as PNG")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks/field.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
