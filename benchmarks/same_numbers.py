"""Did a change of structure leave every number as it was?

Predicts 200 settings (zoo x techniques x cpu, h200, rtx-4060) that a seeded script draws, and
measures 40 of them on the CPU. Outcomes, bytes and, for cards, seconds go to a file; a second run
compares what it finds with that file and lists what differs. Left out: words, times on the CPU,
which are never twice the same, and timelines of autocast on the CPU, whose cache frees its casts in
the order of their addresses.

    python -m benchmarks.same_numbers --write    # before: writes benchmarks/data/same_numbers.json
    python -m benchmarks.same_numbers            # after: 0 differences, or status 1
"""

import argparse
import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch

import memlab
from benchmarks import report
from benchmarks.combinations import TECHNIQUES
from memlab import MemlabError, StepConfig, StepResult

FILE = Path(__file__).parent / "data" / "same_numbers.json"
ON_A_CPU = ("gpt-small", "resnet-digits", "vit-digits", "lstm-text", "densenet-digits")
ON_CARDS = (*ON_A_CPU, "vnet-digits", "gpt2-medium", "resnet-50", "vit-large", "densenet-121")
DEVICES = ("cpu", "h200", "rtx-4060")
NUM_PREDICTED, NUM_MEASURED = 200, 40
MOST_TECHNIQUES = 2  # of one setting
LIMIT = "3GiB"  # for every third setting


def drawn(seed: int = 0) -> list[dict[str, Any]]:
    """Return the settings: a workload's name, fields of a config, a device and a limit each."""
    draw = random.Random(seed)
    found: list[dict[str, Any]] = []
    while len(found) < NUM_PREDICTED:
        device = DEVICES[len(found) % len(DEVICES)]
        fields: dict[str, Any] = {"batch_size": draw.choice((2, 4, 6))}
        for name in draw.sample(list(TECHNIQUES), draw.randint(0, MOST_TECHNIQUES)):
            fields |= TECHNIQUES[name]
        setting = {
            "workload": draw.choice(ON_A_CPU if device == "cpu" else ON_CARDS),
            "fields": fields,
            "device": device,
            "limit": LIMIT if len(found) % 3 == 1 else None,
        }
        if setting not in found:
            found.append(setting)
    return found


def numbers(setting: dict[str, Any], action: str) -> dict[str, Any]:
    """Return what a prediction or a measurement of a setting finds."""
    try:
        found = getattr(memlab, action)(
            memlab.workloads.get(setting["workload"]),
            StepConfig(**setting["fields"]),
            setting["device"],
            memory_limit=setting["limit"],
            **({"repeats": 1} if action == "measure" else {}),
        )
    except MemlabError as error:
        return {"raised": type(error).__name__}
    return _of_result(found, on_cpu=setting["device"] == "cpu")


def _of_result(result: StepResult, *, on_cpu: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "outcome": str(result.outcome),
        "allocated": result.peak_allocated_bytes,
        "reserved": result.peak_reserved_bytes,
        "first step": result.first_step_peak_bytes,
        "categories": dict(result.peak_by_category) if result.peak_by_category else None,
        "fits": result.fits,
        "loss": result.loss,
    }
    is_autocast = str(result.config.precision).endswith("-mixed")
    if result.timeline is not None and not (on_cpu and is_autocast):
        live = hashlib.sha256(result.timeline.bytes_by_category.tobytes()).hexdigest()
        found["timeline"] = live[:16]
    claims = dict(result.uncertainty or {})
    if not on_cpu:
        found["seconds"] = result.step_seconds
    else:
        claims.pop("step_seconds", None)
    return found | {"claims": claims}


def asked() -> list[dict[str, Any]]:
    """Return the runs to make: all settings predicted, and the first of the CPU measured."""
    settings = drawn()
    measured = [setting for setting in settings if setting["device"] == "cpu"][:NUM_MEASURED]
    runs = [("predict", setting) for setting in settings]
    runs += [("measure", setting) for setting in measured]
    return [{"action": action, **setting} for action, setting in runs]


def find(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return these runs, each with what it gives now."""
    rows = []
    for number, run in enumerate(runs, start=1):
        rows.append(run | {"found": numbers(run, run["action"])})
        print(f"\r{number} of {len(runs)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return rows


def differences(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each number that is another."""
    rows = []
    for old, new in zip(before, now, strict=True):
        name = f"{new['workload']} {new['device']} {new['fields']}"
        for key in old["found"].keys() | new["found"].keys():
            was, is_now = old["found"].get(key), new["found"].get(key)
            if was != is_now:
                rows.append(
                    {"setting": name, "number": key, "before": str(was), "now": str(is_now)}
                )
    return rows


def main() -> None:
    """Write the numbers of now, or hold them against those of before."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help="these are the numbers to keep")
    if parser.parse_args().write:
        rows = find(asked())
        FILE.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
        print(f"wrote {len(rows)} rows to {FILE}")
        return

    before = json.loads(FILE.read_text())
    if before["torch"] != torch.__version__:
        sys.exit(f"{FILE} is of torch {before['torch']}, this is {torch.__version__}")
    rows = json.loads(json.dumps(find(before["rows"])))
    found = differences(before["rows"], rows)
    if found:
        report.show("What differs", found)
    print(f"{len(found)} differences in {len(rows)} runs")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
