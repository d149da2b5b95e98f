"""Exercises of chapters 5 and 14: what can be known before a run, and the fastest that fits."""

import functools
import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from memlab import workloads
from memlab._util.units import format_bytes, is_a, parse_bytes, shown
from memlab.api import predict
from memlab.config import Precision, StepConfig
from memlab.course.exercise import Exercise, always, judge_named, turned
from memlab.course.settings import MustFit
from memlab.errors import MemlabError
from memlab.result import StepResult
from memlab.running import require_ok
from memlab.search.recommend import recommend
from memlab.workload import Workload

CARD = "t4"
SHARE = 0.9  # of the largest batch, from which on an answer is right
SURE = 0.5  # uncertainty above which a peak is not known
ROWS, WIDTH, WIDE = 4096, 256, 2048


def language_model() -> Workload:
    """Return the model of exercise 5.1: a GPT-2 of four blocks, and texts of 128 tokens."""
    return workloads.get("gpt-small", num_layers=4, sequence_length=128)


@functools.cache
def _of_batch(samples: int) -> StepResult:
    config = StepConfig(batch_size=samples)
    return require_ok(predict(language_model(), config, CARD, progress=False))


def _largest() -> int:
    """Return about the largest batch that fits: two predictions give the slope, and one checks."""
    few, many = 64, 128
    low, high = (_of_batch(n).peak_reserved_bytes or 0 for n in (few, many))
    room = _of_batch(few).usable_memory_bytes or 0
    samples = few + int((room - low) / (high - low) * (many - few))
    while _of_batch(samples).fit != "fits":
        samples = int(0.97 * samples)
    return samples


def _judge_batch(asked: Exercise, given: Any) -> str:
    """Return the hint for a number of samples, by what its step would take."""
    if not is_a(given, int) or is_a(given, bool) or given < 1:
        return asked.hints["no_batch"].format(given=shown(given))
    if given > 4 * _largest():  # would take long to predict
        return asked.hints["far_too_many"]
    fit = _of_batch(given).fit
    if fit == "too close":
        return asked.hints["too_close"]
    if fit != "fits":
        return asked.hints["too_many"].format(
            given=format_bytes(_of_batch(given).peak_reserved_bytes or 0)
        )
    if _of_batch(int(given / SHARE)).fit == "fits":
        return asked.hints["too_few"]
    return ""


class Routed(nn.Module):
    """A model of chapter 5: what runs through its wide layers is decided by `route`."""

    def __init__(self, route: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.route = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 10), route
        self.wide = nn.Sequential(nn.Linear(WIDTH, WIDE), nn.GELU(), nn.Linear(WIDE, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return 10 numbers a row that was routed."""
        out: torch.Tensor = self.last(self.route(self.wide, self.first(x)))
        return out


def dropped(wide: nn.Module, x: torch.Tensor) -> Any:
    """Set half of the numbers to 0."""
    return wide(nn.functional.dropout(x, 0.5))


def best_half(wide: nn.Module, x: torch.Tensor) -> Any:
    """Take the half of the rows whose sums are largest."""
    return wide(x[x.sum(-1).topk(len(x) // 2).indices])


def positive(wide: nn.Module, x: torch.Tensor) -> Any:
    """Take the rows whose sum is above 0."""
    return wide(x[x.sum(-1) > 0])


def zeroed(wide: nn.Module, x: torch.Tensor) -> Any:
    """Set the rows whose sum is not above 0 to 0."""
    return wide(x * (x.sum(-1, keepdim=True) > 0))


def early(wide: nn.Module, x: torch.Tensor) -> Any:
    """Leave the wide layers out where the mean is not above 0."""
    return wide(x) if x.mean() > 0 else x


ROUTES = {each.__name__: each for each in (dropped, best_half, positive, zeroed, early)}


def routed(name: str) -> Workload:
    """Return a workload of exercise 5.2, by the name of its route."""
    return Workload(
        name=name,
        build_model=lambda: Routed(ROUTES[name]),
        make_batch=lambda n: torch.randn(n, 64),
        compute_loss=lambda model, batch: model(batch).mean(),
    )


@functools.cache
def _is_known(name: str) -> bool:
    step = require_ok(predict(routed(name), StepConfig(batch_size=ROWS), CARD, progress=False))
    return (step.uncertainty or {})["peak_allocated_bytes"] < SURE


def _all_known() -> dict[str, bool]:
    return {name: _is_known(name) for name in ROUTES}


LIMIT = "300 MiB"  # of chapter 14
START = StepConfig(batch_size=64)
EXACT = ("accumulation_steps", "memory_budget")
KEPT = {field.name: "other_training" for field in fields(StepConfig) if field.name not in EXACT}


@functools.cache
def _recommended(*, with_precision: bool = False) -> StepResult:
    fields = [*EXACT, "precision"] if with_precision else list(EXACT)
    model = trained()
    ranked = recommend(model, LIMIT, START.batch_size, CARD, allow=fields, progress=False)
    if not ranked:
        raise MemlabError(ranked.message)
    return ranked[0].result


def trained() -> Workload:
    """Return the model of chapter 14: a GPT-2 of two blocks, and texts of 128 tokens."""
    return workloads.get("gpt-small", num_layers=2, sequence_length=128)


FASTEST = MustFit(
    workload=trained(), start=START, card=CARD, limit_bytes=parse_bytes(LIMIT),
    kept=KEPT | {"precision": "precision"},
    fastest=lambda: _recommended().step_seconds or math.inf,
)  # fmt: skip
IN_ANY_FORMAT = replace(
    FASTEST,
    kept={name: hint for name, hint in KEPT.items() if name != "precision"},
    fastest=lambda: _recommended(with_precision=True).step_seconds or math.inf,
)


EXERCISES = [
    Exercise(
        number="5.1",
        reference=_largest,
        mistakes={
            "too_many": lambda: 2 * _largest(),
            "too_few": lambda: _largest() // 2,
            "far_too_many": lambda: 10 * _largest(),
            "no_batch": always("948"),
        },
        judge=_judge_batch,
    ),
    Exercise(
        number="5.2",
        reference=_all_known,
        mistakes=turned(_all_known, ROUTES),
        judge=judge_named,
    ),
    Exercise(
        number="14.1",
        reference=lambda: _recommended().config,
        mistakes={
            "not_moved": always(START),
            "not_yet": always(replace(START, accumulation_steps=2)),
            "slower": always(replace(START, accumulation_steps=32)),
            "other_training": always(StepConfig(batch_size=16)),
            "precision": always(
                replace(START, precision=Precision.FP16_MIXED, accumulation_steps=4)
            ),
            "no_config": always({"accumulation_steps": 4}),
        },
        judge=FASTEST,
    ),
    Exercise(
        number="14.2",
        reference=lambda: _recommended(with_precision=True).config,
        mistakes={
            "not_yet": always(replace(START, precision=Precision.FP16_MIXED)),
            "slower": lambda: _recommended().config,
            "other_training": always(replace(START, optimizer="sgd")),
        },
        judge=IN_ANY_FORMAT,
    ),
]
