"""The page computes of a recorded step what Python computes: the same bytes, instant by instant.

For drawn settings node reads the file of a step and answers; the answers are compared in full, each
timeline by its hash. Settings of which nothing is known must be unknown to both.
"""

import hashlib
import json
import random
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import memlab
from memlab import StepConfig, Workload
from memlab.api import predict_with_size_model
from memlab.errors import ConfigError
from memlab.prediction.budget_frontier import BudgetFrontier
from memlab.prediction.interpolation import (
    can_regroup,
    can_replan,
    estimate_accumulation,
    estimate_budget,
    interpolated,
    plan_at,
)
from memlab.prediction.plans import known_frontier
from memlab.prediction.predict import Prediction
from memlab.prediction.step_file import packed, packed_result, result_in
from memlab.result import StepResult
from memlab.techniques import registry
from tests.models import blocks, made_of
from tests.page_parts import FOLDER, node

NUM_DRAWN = 200
CONFIGS = {
    "plain": StepConfig(batch_size=8),
    "halves": StepConfig(batch_size=8, accumulation_steps=2, memory_budget=0.5),
    "thirds": StepConfig(batch_size=12, accumulation_steps=3),
}
SMALL = ["gpt-small", "resnet-digits", "vit-digits", "lstm-text", "densenet-digits",
         "vnet-digits", "plain-transformer", "plain-convnet", "plain-mlp"]  # fmt: skip
LARGE = [name for name in memlab.workloads.names() if name not in SMALL]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """A predicted step, and the plans of its memory budgets where they are known."""

    prediction: Prediction
    config: StepConfig
    frontier: BudgetFrontier | None

    @property
    def size_model(self):
        assert self.prediction.size_model is not None, self.prediction.result.message
        return self.prediction.size_model

    @property
    def kind(self):
        return "cpu" if self.size_model.settings is None else "cuda"


def recorded(
    workload: Workload, config: StepConfig, device: str, *, with_plans: bool = False
) -> Recorded:
    if with_plans:
        found = memlab.predict(workload, replace(config, memory_budget=0.5), device)
        assert found.outcome == "ok", found.message
    prediction = predict_with_size_model(workload, config, device)
    frontier = known_frontier(workload, config, prediction.result.device, seed=0)
    assert frontier is not None or not (with_plans or config.is_planned)
    return Recorded(prediction=prediction, config=config, frontier=frontier)


def drawn(config: StepConfig, seed: str) -> list[dict[str, Any]]:
    """Draw settings as sliders could move, and some that no step can have."""
    rng, settings = random.Random(seed), []
    ranks = config.data_parallel_size
    for _ in range(NUM_DRAWN):
        samples = [rng.randint(1, 64), rng.randint(1, 8), 2 ** rng.randint(0, 8)]
        batch = rng.choice([config.batch_size, *(ranks * n for n in samples)])
        if ranks > 1 and rng.random() < 0.1:
            batch += 1
        settings.append(
            {
                "batchSize": batch,
                "accumulationSteps": rng.choice([1, 1, config.accumulation_steps, 2, 3, 4, 5, 8]),
                "memoryBudget": rng.choice([config.memory_budget] * 2 + [1.0, rng.random()]),
                "limit": 2 ** rng.randint(21, 34) + rng.randint(0, 2**22),
            }
        )
    return settings


def answered(step: Recorded, setting: dict[str, Any]) -> dict[str, Any] | None:
    """Return what Python says of a setting; None if that is nothing."""
    base, planned = step.prediction, step.config
    try:
        config = replace(
            planned,
            batch_size=setting["batchSize"],
            accumulation_steps=setting["accumulationSteps"],
            memory_budget=setting["memoryBudget"],
        )
    except ConfigError:
        return None

    same = replace(config, memory_budget=planned.memory_budget)
    sizes, runs = same.micro_batch_sizes, None
    if step.size_model.covers(sizes) and not registry.is_refused(same, step.kind):
        result = interpolated(base, same)
        how = "predicted" if step.size_model.is_exact(sizes) else "interpolated"
        runs = step.size_model.runs_within(sizes, setting["limit"])
    elif can_regroup(step.size_model, same):
        result, how = estimate_accumulation(base, same), "estimated"
    else:
        return None

    if config.memory_budget != planned.memory_budget:
        frontier = step.frontier
        if frontier is None or len(frontier.plans) < 2:
            return None
        if plan_at(frontier, config) is not plan_at(frontier, same):
            if not can_replan(config, step.kind):
                return None
            result = estimate_budget(result, config, frontier, planned)
            how, runs = "estimated", None
    return {**in_numbers(result), "how": how, "runs": runs}


def in_numbers(result: StepResult) -> dict[str, Any]:
    timeline = result.timeline
    assert timeline is not None
    digest = hashlib.sha256()
    for held in timeline.bytes_by_category.T:
        digest.update(held.astype(np.float64).tobytes())
    digest.update(timeline.phase.astype(np.uint8).tobytes())
    digest.update(timeline.micro_batch.astype(np.int32).tobytes())
    digest.update(timeline.operator.astype(np.int32).tobytes())
    return {
        "peak": result.peak_allocated_bytes,
        "reserved": result.peak_reserved_bytes,
        "first": result.first_step_peak_bytes,
        "seconds": result.step_seconds,
        "uncertainty": dict(result.uncertainty or {}),
        "instants": len(timeline),
        "timeline": digest.hexdigest(),
    }


def page_answers(
    step: Recorded, settings: Sequence[dict[str, Any]], folder: Path
) -> list[dict[str, Any] | None]:
    """Return what the page says of settings, by node."""
    return answers(packed(step.prediction, step.frontier, step.config), settings, folder)


def answers(
    content: bytes, settings: Sequence[dict[str, Any]], folder: Path
) -> list[dict[str, Any] | None]:
    """Return what the page says of settings, by node, from the content of a file."""
    file = folder / "step.bin"
    file.write_bytes(content)
    done = subprocess.run(
        [node(), FOLDER / "answers.js", file],
        input=json.dumps(settings), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any] | None] = json.loads(done.stdout)
    return found


def assert_same(step: Recorded, folder: Path, seed: str) -> set[str]:
    """Hold the page to Python for drawn settings, and return how these were answered."""
    settings = drawn(step.config, seed)
    expected = [answered(step, setting) for setting in settings]
    found = page_answers(step, settings, folder)
    assert len(found) == len(expected)
    for setting, wanted, got in zip(settings, expected, found, strict=True):
        assert got == wanted, setting
    assert None in expected
    return {answer["how"] for answer in expected if answer}


# a large model's operators take minutes on a CPU
MODELS = [
    *(pytest.param(n, device, marks=pytest.mark.matrix) for n in SMALL for device in ("cpu", "t4")),
    *(pytest.param(n, "t4", marks=pytest.mark.slow) for n in LARGE),
]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("name", "device"), MODELS)
def test_the_page_computes_what_python_computes(name, device, config, tmp_path):
    step = recorded(memlab.workloads.get(name), CONFIGS[config], device)
    ways = assert_same(step, tmp_path, seed=f"{name} {device} {config}")
    assert "predicted" in ways


TECHNIQUES = {
    "bf16-mixed": StepConfig(batch_size=8, precision="bf16-mixed"),
    "expandable segments": StepConfig(batch_size=8, expandable_segments=True),
    "expandable, accumulated": StepConfig(
        batch_size=12, accumulation_steps=3, expandable_segments=True
    ),
    "recomputed blocks": StepConfig(batch_size=8, checkpointing="blocks"),
    "without accumulation": StepConfig(batch_size=8, optimizer_in_backward=True),
    "one sample": StepConfig(batch_size=1),
    "uneven micro-batches": StepConfig(batch_size=8, accumulation_steps=3),
}


def test_a_result_has_the_same_timeline_on_the_page_and_in_its_file(tmp_path):
    config = StepConfig(batch_size=6, accumulation_steps=3)
    result = memlab.measure(blocks(), config, "cpu", repeats=1, isolate=False)
    content = packed_result(result)
    whole = {"batchSize": 6, "accumulationSteps": 3, "memoryBudget": 1, "limit": 1}
    (found,) = answers(content, [whole], tmp_path)
    assert found == {**in_numbers(result), "how": "measured", "runs": None}
    again = result_in(content)
    assert in_numbers(again) == in_numbers(result)
    assert str(again) == str(result)


@pytest.mark.parametrize("label", TECHNIQUES)
def test_with_a_technique(label, tmp_path):
    step = recorded(blocks(width=256, depth=6), TECHNIQUES[label], "h100")
    assert assert_same(step, tmp_path, seed=label)


@pytest.mark.parametrize("label", ["plain", "thirds"])
def test_plans_that_were_made_before_give_other_budgets(label, tmp_path):
    step = recorded(blocks(width=256, depth=6), CONFIGS[label], "t4", with_plans=True)
    assert len(step.frontier.plans) > 2
    assert "estimated" in assert_same(step, tmp_path, seed=label)


def test_offloaded_activations(tmp_path):
    config = StepConfig(batch_size=64, offload_activations=True)
    step = recorded(blocks(width=512, depth=6), config, "t4")
    assert assert_same(step, tmp_path, seed="offloaded")


@pytest.mark.matrix
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("sharding", ["ddp", "zero2", "zero3"])
def test_a_rank_of_a_sharded_step(sharding, count, tmp_path):
    config = StepConfig(batch_size=12, accumulation_steps=count, sharding=sharding, world_size=2)
    step = recorded(blocks(width=256, depth=6), config, "2x-rtx-4090")
    assert step.size_model.program.layout.stream is not None  # what is sent has one of its own
    assert assert_same(step, tmp_path, seed=f"{sharding} {count}")


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "t4"])
def test_adapters(device, tmp_path):
    pytest.importorskip("peft")
    workload = memlab.workloads.finetune("llama-tiny", tokens=48, adapter="lora", base="bf16")
    step = recorded(workload, StepConfig(batch_size=4), device)
    assert assert_same(step, tmp_path, seed="adapters") >= {"predicted", "interpolated"}


class EveryOther(nn.Module):
    """Runs another operator in each second call."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(64, 64), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x).relu() if self.calls % 2 else self.layer(x).sigmoid().square()


@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize("device", ["cpu", "t4"])
def test_nothing_is_known_of_other_sizes_where_the_two_steps_differ(device, count, tmp_path):
    config = StepConfig(batch_size=8 * count, accumulation_steps=count)
    step = recorded(made_of(EveryOther, (64,)), config, device)
    assert step.size_model.program.differs
    assert "interpolated" not in assert_same(step, tmp_path, seed="differs")
