"""Runs notebooks headless through papermill, one line each: `ok 00_quickstart 43.1 s`.

The executed copy and the JSON artifact of each go to a build folder; the notebooks themselves stay
as they are. A notebook fails if a cell raises or runs too long, if it does not declare a parameter
that it is given (papermill would only warn), or if it writes no JSON to `out_json`.
Each notebook asserts its own claim in its last cell. The results of a chapter of the course must
also be those in `expected/`: peaks and other whole numbers exactly, times within a factor. What
changed is said in the words of `memlab compare`; `--update` writes it down.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import papermill

import memlab

HERE = Path(__file__).resolve().parent
EXPECTED = HERE / "expected"
TIME_TOLERANCE = 9.0  # another machine may take ten times as long
CELL_TIMEOUT_SECONDS = 1800
"""Far above what a cell takes on a machine that is busy with other things: it ends a hang."""


class NotebookError(Exception):
    """A notebook failed; the message names the cell and the error."""


def main(arguments: list[str] | None = None) -> int:
    """Run the notebooks named on the command line and return the exit code."""
    options = _parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    # of a kernel: threads that spin while they wait take the cores from whatever else runs
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    num_failed = 0
    for notebook in options.notebooks or sorted(HERE.glob("*.ipynb")):
        start = time.perf_counter()
        try:
            artifact = run(notebook, options.out, options.device, options.quick)
            if options.device in (None, "cpu"):
                expect(notebook, artifact, update=options.update)
        except NotebookError as error:
            num_failed += 1
            print(f"failed {notebook.stem}, {error}", flush=True)
        else:
            print(f"ok {notebook.stem} {time.perf_counter() - start:.1f} s", flush=True)
    return 1 if num_failed else 0


def run(notebook: Path, out: Path, device: str | None, quick: bool) -> Path:
    """Execute one notebook, check its artifact and return the file.

    Args:
        notebook: the file; it is read only.
        out: existing folder for the executed copy and the JSON artifact.
        device: where its steps run; None leaves the notebook's own default.
        quick: ask for the short form, of a notebook that has one.

    Raises:
        NotebookError: with the cell, counted in code cells from 1, and the error.
    """
    artifact = (out / notebook.stem).resolve().with_suffix(".json")
    artifact.unlink(missing_ok=True)
    executed = out / notebook.name
    parameters = _parameters(notebook, artifact, device, quick)
    try:
        papermill.execute_notebook(
            notebook,
            executed,
            parameters,
            kernel_name="python3",
            progress_bar=False,
            execution_timeout=CELL_TIMEOUT_SECONDS,
            iopub_timeout=CELL_TIMEOUT_SECONDS,  # for the outputs of a cell that has ended
            cwd=notebook.parent,
            extra_arguments=["--IPKernelApp.log_level=ERROR"],  # its warnings are no result
        )
    except papermill.PapermillExecutionError as error:
        where = _last_started_cell(executed)
        raise NotebookError(f"{where}: {error.ename}: {error.evalue}") from error
    except Exception as error:  # a cell that ran too long, or a kernel that died
        where = _last_started_cell(executed)
        reason = str(error).strip().splitlines()[0]
        raise NotebookError(f"{where}: {type(error).__name__}: {reason}") from error
    _check_artifact(artifact)
    return artifact


def expect(notebook: Path, artifact: Path, *, update: bool) -> None:
    """Compare the results and other whole numbers of a chapter with those that are expected.

    Args:
        notebook: of the chapter; any other notebook is left alone.
        artifact: what it wrote.
        update: say what changed and expect it from now on, instead of failing.

    Raises:
        NotebookError: they are others, with what changed in words.
    """
    written, known = json.loads(artifact.read_text()), EXPECTED / artifact.name
    if not (isinstance(written, dict) and "verdicts" in written and (update or known.exists())):
        return
    found = {"results": written["results"], "numbers": _whole_numbers(written)}
    changed = _changes(json.loads(known.read_text()), found) if known.exists() else ""
    if changed and not update:
        raise NotebookError(f"others than expected; {changed}")
    if changed:
        print(changed, flush=True)
    if update:
        EXPECTED.mkdir(exist_ok=True)
        known.write_text(json.dumps({"schema": 1, **found}, indent=1) + "\n")


def _whole_numbers(written: dict[str, Any]) -> dict[str, Any]:
    """Return what a chapter wrote beside its results, without times, shares and errors."""
    beside = {name: value for name, value in written.items()
              if name not in ("schema", "results", "verdicts")}  # fmt: skip
    return {name: value for name, value in beside.items() if not _has_fraction(value)}


def _has_fraction(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return any(map(_has_fraction, value)) if isinstance(value, list) else isinstance(value, float)


def _changes(known: dict[str, Any], found: dict[str, Any]) -> str:
    """Return what is another than it was, in words; "" for nothing."""
    before, now = known.get("numbers", {}), found["numbers"]
    said = [f"{name}: {before.get(name)} -> {now.get(name)}"
            for name in {**before, **now} if before.get(name) != now.get(name)]  # fmt: skip
    if known["results"] or found["results"]:
        old, new = ([memlab.StepResult.from_dict(row) for row in side["results"]]
                    for side in (known, found))  # fmt: skip
        changes = memlab.compare(old, new, memory_tolerance=0, time_tolerance=TIME_TOLERANCE)
        is_other = changes.only_old or changes.only_new
        if is_other or any(one.verdict != "same" for one in changes.changes):
            said.append(str(changes))
    return "; ".join(said)


def _parameters(notebook: Path, artifact: Path, device: str | None, quick: bool) -> dict[str, Any]:
    """Return what to pass, all of it declared by the notebook."""
    try:
        declared = papermill.inspect_notebook(notebook)
    except Exception as error:  # no such file, no notebook, or one that names no kernel
        raise NotebookError(f"unreadable: {error}") from error
    wanted: dict[str, Any] = {"out_json": str(artifact)}
    if device is not None:
        wanted["device"] = device
    if quick and "quick" in declared:
        wanted["quick"] = True
    if "answers" in declared:  # a chapter of the course, with memlab's own answers
        wanted["answers"] = "reference"
    for name in wanted:
        if name not in declared:
            raise NotebookError(
                f"parameters: {name!r} is not declared, only {', '.join(declared) or 'nothing'}; "
                'add it to the cell tagged "parameters"'
            )
    return wanted


def _last_started_cell(executed: Path) -> str:
    """Return which code cell ran last, counted as in the source: without papermill's own."""
    started = 0
    if executed.exists():
        for cell in nbformat.read(executed, as_version=4).cells:
            injected = "injected-parameters" in cell.metadata.get("tags", [])
            ran = cell.metadata.get("papermill", {}).get("start_time") is not None
            started += cell.cell_type == "code" and ran and not injected
    return f"code cell {started}"


def _check_artifact(artifact: Path) -> None:
    try:
        json.loads(artifact.read_text())
    except FileNotFoundError:
        raise NotebookError("last cell: it wrote no file to out_json") from None
    except ValueError as error:
        raise NotebookError(f"last cell: out_json is not JSON: {error}") from None


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run notebooks headless, one line each.")
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all in this folder")
    parser.add_argument("--device", help="passed to the parameter 'device'")
    parser.add_argument("--quick", action="store_true", help="the short form, where there is one")
    parser.add_argument("--update", action="store_true", help="expect what the chapters give now")
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "notebooks")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
