"""What memlab does with one of the wild models, stage by stage, each told as soon as it is known.

Run in a process of its own, which prints one line of JSON for each stage: what is measured and
predicted on the CPU, predictions for two cards, and three updates with each kind of recompute,
compared with those of plain PyTorch (`wild_plain.py`) by their losses and digests. A sentence of
memlab's is a refusal; any other error is one that a person would have to read.
"""

import dataclasses
import functools
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
from torch import nn

import memlab
from benchmarks import wild_plain
from benchmarks.report import fresh_python
from benchmarks.wild_models import nth_recipe
from benchmarks.wild_models.recipe import Recipe
from benchmarks.wild_plain import BATCH_SIZE, NUM_UPDATES, SEED, one_line
from memlab import Outcome, StepConfig, Workload
from memlab.devices.cards import resolve
from memlab.errors import MemlabError
from memlab.prediction.plans import plan_for
from memlab.running import Ended
from memlab.runtime import isolation
from memlab.techniques.step import build_step, set_seed

CARDS = ("h200", "rtx-4060")
RECOMPUTE: dict[str, dict[str, Any]] = {
    "budget 0.5": {"memory_budget": 0.5},
    "budget 0.2": {"memory_budget": 0.2},
    "blocks": {"checkpointing": "blocks"},
}
STAGES = ("measure", "predict", *CARDS, *RECOMPUTE, "meter")
SECONDS = 100
"""For each run of memlab's, which then ends it by itself; `--patience` multiplies it."""
TRIAL_SECONDS = 420
"""For all of its stages; a process that takes longer hangs."""

PLAIN = StepConfig(batch_size=BATCH_SIZE)


class Way:
    """A recipe that is made where it arrives: in memlab's worker too, and in no step."""

    def __init__(self, package: str, name: str, variant: int) -> None:
        self.of = (package, name, variant)
        self.recipe: Recipe = nth_recipe(package, name, variant)

    def __reduce__(self) -> tuple[type, tuple[str, str, int]]:
        return Way, self.of


def workload(package: str, name: str, variant: int) -> Workload:
    """Return a model as memlab takes it; its functions are found by name in memlab's worker."""
    way = Way(package, name, variant)
    return Workload(
        name=f"{package} {name}",
        build_model=functools.partial(build, way),
        make_batch=functools.partial(make_batch, way),
        compute_loss=functools.partial(compute_loss, way),
    )


def build(way: Way) -> nn.Module:
    """Return a new model."""
    return way.recipe.build()


def make_batch(way: Way, n: int) -> Any:
    """Return n samples."""
    return way.recipe.batch(n)


def compute_loss(way: Way, model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss of a batch."""
    return way.recipe.loss(model, batch)


def measured(given: Workload, seconds: float = SECONDS) -> dict[str, Any]:
    """Return how a measured run ended, and its peak."""
    result = memlab.measure(given, PLAIN, "cpu", repeats=1, warmup=0, timeout_seconds=seconds)
    return {
        "outcome": str(result.outcome),
        "message": result.message,
        "bytes": result.peak_allocated_bytes,
        "notes": list(result.notes),
    }


def predicted(given: Workload, device: str, seconds: float = SECONDS) -> dict[str, Any]:
    """Return how a prediction ended, its peak and what it claims of its own error."""
    result = memlab.predict(given, PLAIN, device, timeout_seconds=seconds)
    return {
        "outcome": str(result.outcome),
        "message": result.message,
        "bytes": result.peak_allocated_bytes,
        "reserved_bytes": result.peak_reserved_bytes,
        "claim": (result.uncertainty or {}).get("peak_allocated_bytes"),
        "notes": list(result.notes),
    }


def recomputed(
    made: Callable[[], Workload],
    fields: dict[str, Any],
    updates: list[list[str]],
    seconds: float = SECONDS,
) -> dict[str, Any]:
    """Return whether three updates with recompute are those of plain PyTorch, bit by bit.

    Each run makes the workload anew, since a loss of its own may have been trained. Where memlab
    refuses a model's cache, the remedy that it names is taken.
    """
    found = _updates_of(made(), dataclasses.replace(PLAIN, **fields), updates, seconds)
    if found["is"] == "refused" and "model_cache=False" in found["message"]:
        without = dataclasses.replace(PLAIN, model_cache=False, **fields)
        return _updates_of(made(), without, updates, seconds) | {"without_cache": True}
    return found


def _updates_of(
    given: Workload, config: StepConfig, updates: list[list[str]], seconds: float
) -> dict[str, Any]:
    run = functools.partial(isolation.run, timeout_seconds=seconds)
    try:
        plan = plan_for(given, config, resolve(torch.device("cpu")), seed=SEED, run=run)
        step = build_step(given, config, "cpu", plan=plan, seed=SEED)
    except Ended as ended:
        is_refused = ended.outcome is Outcome.UNSUPPORTED
        return {"is": "refused" if is_refused else str(ended.outcome), "message": str(ended)}
    except MemlabError as error:
        return {"is": "refused", "message": str(error)}

    for index in range(NUM_UPDATES):
        set_seed(SEED + index)
        try:
            loss = step()
        except MemlabError as error:
            return {"is": "refused", "message": str(error), "update": index}
        found = [loss.hex(), wild_plain.digest(step.model)]
        if found != list(updates[index]):
            what = "loss" if found[0] != updates[index][0] else "weights"
            wrong = f"{what} of update {index + 1} are not those of the plain step"
            losses = f"loss {loss!r}, plain {float.fromhex(updates[index][0])!r}"
            return {"is": "differs", "message": f"{wrong}: {losses}", "update": index}
    return {"is": "same"}


def meter(given: Workload) -> dict[str, Any]:
    """Return the peak of the second step by the meter that shares no code with memlab."""
    definition = (given.build_model, given.make_batch, given.compute_loss, BATCH_SIZE, 1)
    call = ("peak_in_profile", torch.get_num_threads(), definition)
    done = fresh_python(
        "from benchmarks.independent import main; main()", stdin=cloudpickle.dumps(call)
    )
    return {"bytes": json.loads(done.stdout.splitlines()[-1])["peak_2"]}


def run(
    package: str, name: str, reference: dict[str, Any], with_meter: bool, patience: float
) -> None:
    """Run every stage and print what each found."""
    made = functools.partial(workload, package, name, reference["variant"])
    given, seconds = made(), patience * SECONDS
    stages: dict[str, Callable[[], dict[str, Any]]] = {
        "measure": lambda: measured(given, seconds),
        "predict": lambda: predicted(given, "cpu", seconds),
        **{card: functools.partial(predicted, given, card, seconds) for card in CARDS},
    }
    if reference["repeats"]:
        for kind, fields in RECOMPUTE.items():
            stages[kind] = functools.partial(
                recomputed, made, fields, reference["updates"], seconds
            )
    if with_meter:
        stages["meter"] = lambda: meter(given)

    for stage, found in stages.items():
        print(json.dumps({"begins": stage}), flush=True)
        try:
            said = found()
        except Exception as error:
            said = {"is": "raises", "outcome": "raises", "message": one_line(error)}
        print(json.dumps({"stage": stage, **said}), flush=True)


def main() -> None:
    """Read the arguments of `run` from stdin and print the stages."""
    isolation.spare.end()  # a worker that stands ready costs seconds, and nobody waits here
    run(*pickle.load(sys.stdin.buffer))


def attempt(
    package: str, name: str, reference: dict[str, Any], *, with_meter: bool, patience: float
) -> dict[str, Any]:
    """Return what each stage found, in a process of its own with a time limit."""
    seconds = patience * TRIAL_SECONDS
    code = "from benchmarks.wild_trial import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    given = pickle.dumps((package, name, reference, with_meter, patience))
    try:
        output, errors = process.communicate(given, timeout=seconds)
        ended = f"the process ended with status {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        ended = f"nothing more in {seconds:g} s"

    stages: dict[str, Any] = {}
    for line in output.decode(errors="replace").splitlines():
        if not line.startswith('{"begins"') and not line.startswith('{"stage"'):
            continue  # what the model printed
        said = json.loads(line)
        if "begins" in said:
            last = errors.decode(errors="replace").strip().splitlines()[-1:]
            message = " ".join([ended, *last])
            stages[said["begins"]] = {"is": "crashed", "outcome": "crashed", "message": message}
        else:
            stages[said.pop("stage")] = said
    return stages
