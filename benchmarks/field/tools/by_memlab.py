"""memlab: the step itself, recorded over fake tensors from the code that the row's source ran."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

NAME = "memlab"
NEEDS = ()
MEANS = "what the row reads: allocated, reserved or device"
OWN_FITS = True
PUBLIC, LITGPT = (
    (ROOT / "build/public").resolve(),
    (ROOT / "build/litgpt").resolve(),
)  # as `asking.PACKAGES` fills them
NOT_MEASURED = dict.fromkeys(("min_cap_trained", "max_cap_oom"), "")


def answer(setting: dict[str, Any]) -> dict[str, Any] | str:
    """Return what memlab predicts of the run."""
    return ASKED[setting["table"]](setting)


def _gpu_peaks(setting: dict[str, Any]) -> dict[str, Any]:
    from benchmarks import gpu_peaks
    from benchmarks.public_runs import use_packages
    from memlab.devices import cards

    if str(PUBLIC) not in sys.path:
        use_packages(PUBLIC)
    found = gpu_peaks.predicted({**setting["recipe"], **NOT_MEASURED})
    room = cards.card(setting["card"]["name"]).usable_bytes
    return {"bytes": found["bytes"], "fits": found["needed_bytes"] <= room}


def _litgpt_table(setting: dict[str, Any]) -> dict[str, Any]:
    from benchmarks import litgpt_table

    row = setting["recipe"]
    made = litgpt_table.predicted(row, litgpt_table.recipe_of(row))
    return {"bytes": made.first_step_peak_bytes, "fits": made.fits}


def _litgpt_hub(setting: dict[str, Any]) -> dict[str, Any]:
    if str(LITGPT) not in sys.path:
        sys.path.append(str(LITGPT))
    from benchmarks import litgpt_hub

    row = setting["recipe"]
    made = litgpt_hub.predicted(row, holds_last=litgpt_hub.is_quantized(row))
    return {"bytes": made.peak_allocated_bytes, "fits": made.fits}


def _peft_table(setting: dict[str, Any]) -> dict[str, Any] | str:
    from benchmarks import peft_table
    from memlab.devices import cards

    made = peft_table.predicted(setting["recipe"], setting["sequence"])
    if made.peak_reserved_bytes is None:
        return made.message or made.outcome
    room = cards.card(setting["card"]["name"]).usable_bytes
    return {"bytes": made.peak_reserved_bytes, "fits": made.peak_reserved_bytes <= room}


def _torchtitan(setting: dict[str, Any]) -> dict[str, Any]:
    from benchmarks import torchtitan
    from benchmarks.titan_llama import Sizes
    from memlab._util.units import GIB

    found = torchtitan.predicted(setting["cards"], Sizes())
    seconds = setting["batch"] * setting["sequence"] / found["tokens/s"]
    size = round(found["reserved GiB"] * GIB)
    room = torchtitan.target(setting["cards"]).card
    assert room is not None
    return {"bytes": size, "fits": size <= room.usable_bytes, "step_seconds": seconds}


def _kernel_peaks(setting: dict[str, Any]) -> dict[str, Any]:
    from benchmarks import kernel_peaks

    return {"bytes": kernel_peaks.predicted(setting["recipe"])["bytes"]}


def _iteration_times(setting: dict[str, Any]) -> dict[str, Any]:
    from benchmarks import iteration_times
    from memlab.cost_model.overlap import HOST_SECONDS

    row = setting["recipe"]
    case = iteration_times.case_of(row)
    seconds, _ = iteration_times.predicted(case, int(row["# layers"]), HOST_SECONDS)
    return {"step_seconds": seconds}


ASKED: dict[str, Callable[[dict[str, Any]], dict[str, Any] | str]] = {
    "gpu_peaks": _gpu_peaks,
    "litgpt_table": _litgpt_table,
    "litgpt_hub": _litgpt_hub,
    "peft_table": _peft_table,
    "torchtitan": _torchtitan,
    "kernel_peaks": _kernel_peaks,
    "iteration_times": _iteration_times,
}
