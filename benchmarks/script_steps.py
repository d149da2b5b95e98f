"""Has the step that `memlab.from_script` takes from a script the peak that it has in the script?

Each script of `benchmarks/step_scripts` runs for a card that is not here, and the peak of its step
is compared with that of the predicted workload. What a script holds beside its step is no part of
the workload, and the report says how many bytes that are: where a peak differs, these are added.
Where that does not explain it, the optimizer is taken exactly as the script made it.

    python -m benchmarks.script_steps --quick --out benchmarks/script_steps.json
"""

import dataclasses
import inspect
from functools import partial
from pathlib import Path
from typing import Any

import torch

import memlab
from benchmarks import report

SCRIPTS = Path(__file__).with_name("step_scripts")
CARD = "rtx-4090"
ARGUMENTS = {"arguments.py": ["--width", "32", "--batch-size", "16"]}
NUM_QUICK = 3


def make(kind: str, settings: dict[str, Any], model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with the settings of a script's."""
    made: torch.optim.Optimizer = getattr(torch.optim, kind)(model.parameters(), **settings)
    return made


def predicted(workload: memlab.Workload, config: memlab.StepConfig) -> tuple[int, str]:
    """Return the predicted peak and where it is."""
    found = memlab.predict(workload, config, CARD, progress=False)
    memlab.require_ok([found])
    return found.peak_allocated_bytes or 0, found.message


def row_of(path: Path) -> dict[str, Any]:
    """Return the peaks of a script's step, and what became of it."""
    arguments = ARGUMENTS.get(path.name, [])
    run = memlab.run_script(path, arguments, CARD, progress=False)
    peak = next(each.peak_allocated_bytes for each in run.stages if each.name == "step")
    given = memlab.from_script(path, arguments, CARD, progress=False)
    assert given.workload is not None
    told, message = predicted(given.workload, given.config)
    values = {each.name: each.value for each in given.fields}

    def beside(message: str) -> int:
        phase = "update" if "in optimizer" in message else "backward"
        return int(values.get(f"tensors beside the {phase}", 0))

    own, held = told, beside(message)
    if peak not in (told, told + held):
        kind = values["optimizer"]
        known = inspect.signature(getattr(torch.optim, kind)).parameters
        settings = {name.removeprefix("optimizer."): value for name, value in values.items()}
        settings = {name: value for name, value in settings.items() if name in known}
        exact = dataclasses.replace(given.workload, make_optimizer=partial(make, kind, settings))
        own, message = predicted(exact, dataclasses.replace(given.config, optimizer="adamw"))
        held = beside(message)
    return {
        "script": path.name, "peak of its step": peak, "predicted": told, "difference": peak - told,
        "with its own optimizer": own, "held beside": held, "equal": peak == told,
        "explained": peak in (told, own + held), "message": message,
        "not imported": [each.name for each in given.not_imported],
    }  # fmt: skip


def main() -> None:
    """Compare all scripts."""
    given, before = report.options(__file__, __doc__ or ""), report.environment()
    paths = sorted(SCRIPTS.glob("*.py"))[: NUM_QUICK if given.quick else None]
    rows = [row_of(path) for path in paths]
    for row in rows:
        print(row["script"], row["difference"], "explained" if row["explained"] else "OPEN")
    summary = {
        "equal": sum(row["equal"] for row in rows),
        "equal with what is held beside": sum(row["explained"] for row in rows),
        "of": len(rows),
    }
    report.show("all of them", [summary])
    report.write(given, before, {"card": CARD, "scripts": rows, **summary})


if __name__ == "__main__":
    main()
