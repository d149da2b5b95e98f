"""Does memlab hold for models that nobody here wrote?

At least 120 models of fourteen packages, and losses of four, drawn by a seeded script from the
packages' registries before any is run; none is picked by hand. Each is first trained by plain
PyTorch in a process of its own, and left out only where that fails, or where the model is too
large: both stay listed. Then memlab, in another process with a time limit: `measure` and `predict`
on the CPU, predictions for two cards, and three updates with a budget of 0.5, of 0.2 and with
blocks recomputed, compared with plain PyTorch's bit by bit. Every sixth peak is counted by an
independent meter too.

Goals: 98 % measured and predicted; error of the peak 0 in the median, 0.2 % at the 95th percentile,
5 % at most, none beyond its claim; no prediction for a card that ends without an answer; no
recompute that differs in silence or raises.

Packages that are not installed are skipped. To install them beside torch, which stays as it is:
    pip install --no-deps --target build/wild timm torchvision diffusers peft accelerate \
        torch_geometric xxhash aiohttp vit-pytorch x-transformers einops einx loguru frozendict \
        torch-einops-utils hyper-connections PoPE-pytorch segmentation-models-pytorch pytorchcv \
        zuko vector-quantize-pytorch pytorch-metric-learning
Rows are appended to a file as they come; --resume goes on after those that are there.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import report, wild_plain, wild_report, wild_trial
from benchmarks.wild_models import SOURCES

PACKAGES = Path("build/wild")
PLAIN_SECONDS = 120  # a process that takes longer hangs; --patience multiplies it
METER_EVERY = 6
SIZED_TOGETHER = 12  # models whose number of parameters one process counts
QUICK = 2  # models of a package


def in_python(code: str, *arguments: str, seconds: float) -> tuple[str, str]:
    """Return what a new interpreter printed last, and what went wrong."""
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return "", f"nothing in {seconds:g} s"
    last = done.stdout.decode(errors="replace").strip().splitlines()[-1:]
    errors = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    if done.returncode != 0:
        return "", " ".join([f"status {done.returncode}", *errors])
    return "".join(last), ""


def drawn(package: str, seed: int, patience: float) -> list[str]:
    """Return a package's models in the order of trial; without the package none, and say why."""
    code = (
        "import json, sys; from benchmarks.wild_models import draw; "
        "print(json.dumps(draw(sys.argv[1], int(sys.argv[2]))))"
    )
    output, wrong = in_python(code, package, str(seed), seconds=patience * PLAIN_SECONDS)
    if not output:
        print(f"{package} is skipped: {wrong}", flush=True)
        return []
    names: list[str] = json.loads(output)
    return names


def too_large(package: str, names: list[str], patience: float) -> dict[str, dict[str, Any]]:
    """Return the rows of those that need not be tried, since they have too many parameters."""
    code = (
        "import json, sys; from benchmarks.wild_plain import sizes; "
        "print(json.dumps(sizes(sys.argv[1], sys.argv[2:])))"
    )
    output, _ = in_python(code, package, *names, seconds=patience * PLAIN_SECONDS)
    sizes = json.loads(output) if output else {}  # else each is counted where it is tried
    return {
        name: {
            "package": package, "name": name, "plain": "too large",
            "why": wild_plain.too_many(size), "seconds": 0.0,
        }
        for name, size in sizes.items()
        if size > wild_plain.MOST_PARAMETERS
    }  # fmt: skip


def tried(package: str, name: str, with_meter: bool, patience: float) -> dict[str, Any]:
    """Return the row of one model: what plain PyTorch does with it, and then memlab."""
    start = time.perf_counter()
    code = "from benchmarks.wild_plain import main; main()"
    output, wrong = in_python(code, package, name, seconds=patience * PLAIN_SECONDS)
    row: dict[str, Any] = json.loads(output) if output else {"plain": "fails", "why": wrong}
    if row["plain"] == "trains":
        row["stages"] = wild_trial.attempt(
            package, name, row, with_meter=with_meter, patience=patience
        )
    return {"package": package, "name": name, **row, "seconds": time.perf_counter() - start}


def try_package(package: str, given: argparse.Namespace, done: dict[str, Any]) -> None:
    """Try a package's models in order until as many as are wanted were trained by plain PyTorch."""
    wanted = given.limit or (QUICK if given.quick else SOURCES[package].wanted)
    trained = 0
    names = drawn(package, given.seed, given.patience)
    large: dict[str, dict[str, Any]] = {}
    for index, name in enumerate(names):
        if trained == wanted:
            return
        if index % SIZED_TOGETHER == 0:
            some = [n for n in names[index:][:SIZED_TOGETHER] if f"{package} {n}" not in done]
            large |= too_large(package, some, given.patience) if some else {}

        row = done.get(f"{package} {name}")
        if row is None:
            with_meter = trained % METER_EVERY == 0
            row = large.get(name) or tried(package, name, with_meter, given.patience)
            with given.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
            done[f"{package} {name}"] = row
            line = wild_report.row_of(row)
            print(" ".join(str(value) for value in line.values()), flush=True)
        trained += row["plain"] == "trains"


def options() -> argparse.Namespace:
    """Return what was asked for on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks/wild.json"))
    parser.add_argument("--quick", action="store_true", help="two models of each package")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--limit", type=int, help="models of each package that are tried")
    parser.add_argument("--package", action="append", choices=SOURCES, help="only this one")
    parser.add_argument("--packages", type=Path, default=PACKAGES, help="where they were put")
    parser.add_argument("--jobs", type=int, default=2, help="models at a time")
    parser.add_argument("--patience", type=float, default=1.0, help="times the time limits")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there")
    given = parser.parse_args()
    given.rows = given.out.with_suffix(".jsonl")
    return given


def main() -> None:
    """Try the models of every package and show what came of them."""
    given, before, start = options(), report.environment(), time.perf_counter()
    # the interpreters that are started below find the packages, and the benchmarks, by this
    folders = [os.getcwd(), str(given.packages.resolve()), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # or threads keep the cores from one another

    given.rows.parent.mkdir(parents=True, exist_ok=True)
    if not given.resume:
        given.rows.unlink(missing_ok=True)
    kept = given.rows.read_text().splitlines() if given.rows.exists() else []
    done = {f"{row['package']} {row['name']}": row for row in map(json.loads, kept)}

    with ThreadPoolExecutor(given.jobs) as pool:
        for ended in [pool.submit(try_package, p, given, done) for p in given.package or SOURCES]:
            ended.result()

    rows = [row for row in done.values() if row["package"] in (given.package or SOURCES)]
    show(rows)
    seconds = time.perf_counter() - start
    print(f"\n{len(rows)} models drawn with seed {given.seed} in {seconds / 60:.1f} minutes")
    chosen = report.Options(quick=given.quick, out=given.out)
    found = {"seed": given.seed, "seconds": seconds, "summary": wild_report.summary(rows)}
    report.write(chosen, before, found | {"rows": rows})


def show(rows: list[dict[str, Any]]) -> None:
    """Print the tables, then every failure, refusal and exclusion."""
    if not rows:
        print("no package of models is installed")
        return
    report.show("each model", [wild_report.row_of(row) for row in rows if "stages" in row])
    report.show("by package", wild_report.summary(rows))
    metered = wild_report.meter_rows(rows)
    if metered:
        report.show("peaks of the second step by an independent meter", metered)
    for title, lines in (
        ("not as it should be", wild_report.failures(rows)),
        ("recompute refused", wild_report.refusals(rows)),
        ("drawn and left out", wild_report.exclusions(rows)),
    ):
        print(f"\n{title}: {len(lines)}", *lines, sep="\n  ")


if __name__ == "__main__":
    main()
