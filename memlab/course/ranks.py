"""Exercises of chapter 15: what each of four processes holds, and what it sends."""

import functools

import torch
from torch import nn

from memlab.api import predict
from memlab.config import Sharding, StepConfig
from memlab.course.exercise import Exercise, judge_numbers, one_wrong
from memlab.result import StepResult
from memlab.running import require_ok
from memlab.workload import Workload

NUM_RANKS = 4
WIDTH, HIDDEN = 1024, 4096


def divided() -> Workload:
    """Return the model of chapter 15: linear layers of 1024, 4096, 1024 and 1024."""
    return Workload(
        name="divided",
        build_model=lambda: nn.Sequential(
            nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH), nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
        ),
        make_batch=lambda n: torch.randn(n, WIDTH),
        compute_loss=lambda model, batch: model(batch).mean(),
    )  # fmt: skip


@functools.cache
def _step(name: str) -> StepResult:
    config = StepConfig(batch_size=16, sharding=Sharding(name), world_size=NUM_RANKS)
    return require_ok(predict(divided(), config, "cpu", progress=False))


def _part(name: str, part: str) -> int:
    return (_step(name).peak_by_category or {})[part]


def _states() -> dict[str, int]:
    return {name: _part(name, "optimizer_state") for name in ("ddp", "zero1", "zero3")}


def _sent() -> dict[str, int]:
    return {name: _step(name).sent_bytes or 0 for name in ("ddp", "zero3")}


def _quarter() -> int:
    return _states()["ddp"] // NUM_RANKS


EXERCISES = [
    Exercise(
        number="15.1",
        reference=_states,
        mistakes=one_wrong(
            _states, {"ddp": _quarter, "zero1": _quarter, "zero3": lambda: _states()["ddp"]}
        ),
        judge=judge_numbers,
        fraction=0.001,
    ),
    Exercise(
        number="15.2",
        reference=_sent,
        mistakes=one_wrong(
            _sent, {"ddp": lambda: _part("ddp", "parameters"), "zero3": lambda: _sent()["ddp"]}
        ),
        judge=judge_numbers,
        fraction=0.001,
    ),
]
