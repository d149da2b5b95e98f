"""Do training scripts of others, unmodified, run over fake tensors to an answer, and a true one?

`data/script_field.toml` names them: repository, path, family, arguments, and what data is made up
(`script_data.py`) because theirs cannot be had here. They are run from a folder of clones, one for
each repository under its own name, of which a copy is made:

    python -m benchmarks.script_field CLONES --only nanoGPT --out script_field.json

A run has ended if its outcome is "ok". Others are refused, with a sentence of memlab's or an error
that the script would have without a network as well, or they failed: the messages have to be read.
Those with arguments for this CPU (`plain`) then run to their end twice, in plain PyTorch under its
profiler (`script_peaks.py`) and by `memlab run --device cpu`: `error` is between their peaks.

Rows that were not run stay as they are in the JSON file. Packages that the scripts import have to
be there. torchvision's compiled part is built for one torch; beside another one its Python loads
once the operators `nms` and `qnms` have schemas.
"""

import argparse
import json
import os
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report, script_data
from benchmarks.script_peaks import ALL_STEPS, MEDIAN_GOAL, MOST_GOAL, metered

TABLE = Path(__file__).with_name("data") / "script_field.toml"
CARD = "t4"
MOST_SECONDS = 240


def row_of(row: dict[str, str], clones: Path) -> dict[str, Any]:
    """Return how one script ended, and its peak; on this CPU too if it has arguments for one."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {name: str(Path(folder) / name) for name in ("TORCH_HOME", "HF_HOME")}
        name = row["repository"].rpartition("/")[2]
        shutil.copytree(clones / name, Path(folder) / name, symlinks=True)
        script = Path(folder) / name / row["path"]
        for each in row.get("data", "").split():
            maker, _, place = each.partition(":")
            target = script.parent / place
            target.parent.mkdir(parents=True, exist_ok=True)
            getattr(script_data, maker)(target)
        paths = [str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
        if "python_path" in row:
            paths.append(str((script.parent / row["python_path"]).resolve()))
        environment = {"PYTHONPATH": os.pathsep.join(paths)}
        arguments = shlex.split(row.get("arguments", ""))
        options = row.get("options", "").split()
        made = _run(CARD, options, script, arguments, environment)
        if "plain" in row:
            made |= _on_cpu(script, shlex.split(row["plain"]), environment)
    return {"script": f"{name}/{row['path']}"[-48:], **made}


def _on_cpu(script: Path, arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    found = _run("cpu", ["--steps", str(ALL_STEPS)], script, arguments, environment)
    if found["outcome"] != "ok":
        return {"said": found["message"]}
    around: dict[str, Any] = {"cwd": script.parent, "env": os.environ | environment}
    peak = metered(script.name, *arguments, **around)[0]
    start = time.perf_counter()
    command = [sys.executable, script.name, *arguments]
    subprocess.run(command, capture_output=True, check=True, stdin=subprocess.DEVNULL, **around)
    plain = time.perf_counter() - start
    error = abs(found["peak"] - peak) / peak
    return {
        "metered": peak, "on cpu": found["peak"], "error": error, "said": found["message"],
        "plain seconds": plain, "times as long": found["seconds"] / plain,
    }  # fmt: skip


def _run(
    device: str, options: list[str], script: Path, arguments: list[str], environment: dict[str, str]
) -> dict[str, Any]:
    command = [sys.executable, "-m", "memlab", "run", "--json", "--device", device, "--timeout",
               str(MOST_SECONDS), *options, script.name, *arguments]  # fmt: skip
    start = time.perf_counter()
    done = subprocess.run(
        command,
        cwd=script.parent,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    seconds = time.perf_counter() - start
    try:
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        found = {"outcome": "failed", "message": f"no answer: {done.stderr[-300:]}"}
    return {
        "outcome": found["outcome"],
        "exit": done.returncode,
        "seconds": round(seconds, 1),
        "peak": found.get("peak_allocated_bytes") or 0,
        "stages": ", ".join(stage["name"] for stage in found.get("stages", ())),
        "message": found["message"].replace(tempfile.gettempdir() + os.sep, ""),
    }


def _on_all(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what all rows say together."""
    errors = [row["error"] for row in rows if "error" in row]
    found = {"scripts": len(rows), "ended": sum(row["outcome"] == "ok" for row in rows)}
    if not errors:
        return found
    median, most = statistics.median(errors), max(errors)
    is_met = median <= MEDIAN_GOAL and most <= MOST_GOAL
    times = [row["times as long"] for row in rows if "times as long" in row]
    return found | {"on cpu": len(errors), "median error": median, "largest": most,
                    "goal": report.verdict(is_met), "times as long": statistics.median(times),
                    "longest": max(times)}  # fmt: skip


def main() -> None:
    """Run all scripts of the table, or those whose repository and path have a word in them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("clones", type=Path, help="folder of the repositories' clones")
    parser.add_argument("--only", default=("",), nargs="*", help="parts of repository and path")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks/script_field.json"))
    given = parser.parse_args()
    before = report.environment()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(given.out.read_text())["scripts"] if given.out.exists() else ()
    rows = {(row["repository"], row["path"]): row for row in known}
    table = tomllib.loads(TABLE.read_text())
    for row in table["script"]:
        if any(part in f"{row['repository']}/{row['path']}" for part in given.only):
            random.seed(0)
            np.random.seed(0)
            found = row_of(row, given.clones.resolve())
            commit = table["commits"][row["repository"]]
            rows[row["repository"], row["path"]] = {**row, "commit": commit, **found}
            print(found["outcome"], found["seconds"], found["script"], found["message"], flush=True)
            content = {**before, **_on_all([*rows.values()]), "scripts": [*rows.values()]}
            given.out.write_text(json.dumps(content, indent=1) + "\n")
    shown = ("script", "outcome", "peak", "metered", "on cpu", "error", "times as long")
    report.show(
        "scripts of others, peaks in bytes",
        [{name: row.get(name) for name in shown} for row in rows.values()],
    )
    report.show("all of them", [_on_all([*rows.values()])])


if __name__ == "__main__":
    main()
