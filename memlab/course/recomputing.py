"""Exercises of chapters 7 and 8: what to compute again, and when that trains another model."""

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from memlab._util.units import MIB, format_bytes, format_seconds, is_a, shown
from memlab.api import predict, verify
from memlab.config import Checkpointing, StepConfig
from memlab.course.exercise import Exercise, always, judge_named, one_wrong
from memlab.course.operators import WIDTH, FeedForward
from memlab.result import Outcome, StepResult
from memlab.running import require_ok
from memlab.workload import Workload

CARD = "t4"
NUM_BLOCKS = 12
CONFIG = StepConfig(batch_size=4096, optimizer="sgd")
ROOM = 150 * MIB  # for the plan of exercise 7.1
BUDGET_ROOM = 200 * MIB  # for the budget of exercise 7.2
SLACK = 1.01  # as long as the fastest, up to which an answer is right
Plan = list[list[int]]


class Planned(nn.Module):
    """Blocks of chapter 7, of which some are run under a checkpoint.

    Args:
        plan: lists of numbers of blocks that follow each other; each list is one checkpoint.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FeedForward(nn.GELU()) for _ in range(NUM_BLOCKS))
        self.starts = {numbers[0]: len(numbers) for numbers in plan}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor like `x`, of shape (rows, width)."""
        place = 0
        while place < NUM_BLOCKS:
            length = self.starts.get(place, 0)
            if length:
                run = nn.Sequential(*self.blocks[place : place + length])
                x = checkpoint(run, x, use_reentrant=False)
            else:
                x = self.blocks[place](x)
            place += max(length, 1)
        return x


def planned(plan: Plan) -> Workload:
    """Return a workload of twelve blocks under this plan."""
    return Workload(
        name="twelve blocks",
        build_model=lambda: Planned(plan),
        make_batch=lambda n: torch.randn(n, WIDTH),
        compute_loss=lambda model, batch: model(batch).mean(),
    )


@functools.cache
def _step(plan: tuple[tuple[int, ...], ...], budget: float | None = None) -> StepResult:
    config = CONFIG if budget is None else replace(CONFIG, memory_budget=budget)
    return require_ok(predict(planned([list(each) for each in plan]), config, CARD, progress=False))


def in_segments(length: int) -> Plan:
    """Return the plan with one checkpoint for each `length` blocks."""
    return [list(range(at, at + length)) for at in range(0, NUM_BLOCKS, length)]


def _is_plan(given: Any) -> bool:
    if not (is_a(given, list) and given and all(is_a(each, list) and each for each in given)):
        return False
    return all(is_a(n, int) and not is_a(n, bool) for each in given for n in each)


def _judge_plan(asked: Exercise, given: Any) -> str:
    """Return the hint for a plan, by what its step would hold."""
    if not _is_plan(given):
        return asked.hints["no_plan"].format(given=shown(given))
    named = [n for each in given for n in each]
    if sorted(set(named)) != named or not all(0 <= n < NUM_BLOCKS for n in named):
        return asked.hints["not_in_order"]
    if any(each != list(range(each[0], each[-1] + 1)) for each in given):
        return asked.hints["not_neighbours"]
    peak = _step(tuple(map(tuple, given))).peak_allocated_bytes or 0
    held = format_bytes(peak)
    if peak <= ROOM:
        return asked.hints["last_too"] if len(named) == NUM_BLOCKS else ""
    if len(given) == 1:
        return asked.hints["at_once"].format(given=held)
    if any(len(each) > 1 for each in given):
        return asked.hints["segments"].format(given=held)
    return asked.hints["too_few"].format(given=held)


def _judge_budget(asked: Exercise, given: Any) -> str:
    """Return the hint for a memory budget, by what its step would hold and take."""
    if is_a(given, bool) or not is_a(given, int | float) or not 0 <= given <= 1:
        return asked.hints["no_budget"].format(given=shown(given))
    found = _step((), float(given))
    if (found.peak_allocated_bytes or 0) > BUDGET_ROOM:
        return asked.hints["too_much"].format(given=format_bytes(found.peak_allocated_bytes or 0))
    seconds, best = found.step_seconds or 0, _step((), 0.2).step_seconds or 0
    if seconds > SLACK * best:
        return asked.hints["too_low"].format(given=format_seconds(seconds))
    return ""


class Forgetful(nn.Module):
    """A block with dropout; its checkpoint draws another mask in the recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.2), nn.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> Any:
        """Return a tensor like `x`."""
        return checkpoint(self.body, x, use_reentrant=False, preserve_rng_state=False)


class Careful(Forgetful):
    """The same block; its checkpoint draws the same mask again, as is the default."""

    def forward(self, x: torch.Tensor) -> Any:
        """Return a tensor like `x`."""
        return checkpoint(self.body, x, use_reentrant=False)


class Normed(Careful):
    """A block with BatchNorm under a checkpoint: its statistics move in the recompute as well."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))


class Observed(Careful):
    """A block that hooks its layer when it has run once, and under a checkpoint runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        self.is_hooked = False

    def forward(self, x: torch.Tensor) -> Any:
        """Return a tensor like `x`."""
        out = super().forward(x)
        if not self.is_hooked:
            self.body[0].register_forward_hook(lambda module, inputs, out: out / 2)
            self.is_hooked = True
        return out


def _keeps_one_mask(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return op is torch.ops.aten.rand_like.default and args[0].shape[-1] == WIDTH


class Masked(nn.Module):
    """A block with two random masks, of which a policy keeps the first alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 64)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).tanh()
        hidden = hidden * (torch.rand_like(hidden) > 0.1)
        out: torch.Tensor = self.down(hidden).tanh()
        return out * (torch.rand_like(out) > 0.1)

    def forward(self, x: torch.Tensor) -> Any:
        """Return a tensor like `x`."""
        contexts = functools.partial(create_selective_checkpoint_contexts, _keeps_one_mask)
        return checkpoint(self._run, x, use_reentrant=False, context_fn=contexts)


BLOCKS = {
    "dropout": Careful, "another_mask": Forgetful, "batch_norm": Normed,
    "late_hook": Observed, "one_mask_kept": Masked,
}  # fmt: skip
SAME, GRADIENTS, STATISTICS = "same", "gradients", "statistics"


def of_blocks(name: str) -> Workload:
    """Return a workload of two blocks of exercise 8.1, by the name of the block."""
    return Workload(
        name=name,
        build_model=lambda: nn.Sequential(BLOCKS[name](), BLOCKS[name]()),
        make_batch=lambda n: (torch.randn(n, 64), torch.randn(n, 64)),
        compute_loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    )


@functools.cache
def _changes(name: str) -> str:
    """Return what the checkpoint of a block changes, as `verify` finds it on a CPU."""
    report = verify(of_blocks(name), StepConfig(batch_size=16), "cpu", progress=False)
    require_ok(report)
    if report.ok:
        return SAME
    error, allowed = report.max_relative_error or 0, report.tolerance or 0
    return GRADIENTS if error > allowed else STATISTICS


def _all_changes() -> dict[str, str]:
    return {name: _changes(name) for name in BLOCKS}


PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def keeps_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    """Keep the outputs of matrix products."""
    return op in PRODUCTS


def _keeps_packets(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return op in (torch.ops.aten.mm, torch.ops.aten.addmm)


def _keeps_all(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return True


def _keeps_others(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op not in PRODUCTS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _under(policy: Any) -> StepResult:
    config = replace(CONFIG, checkpointing=Checkpointing.BLOCKS, checkpoint_policy=policy)
    return predict(planned([]), config, CARD, progress=False)


@functools.cache
def _peak_under(policy: Any) -> int:
    return require_ok(_under(policy)).peak_allocated_bytes or 0


def _judge_policy(asked: Exercise, given: Any) -> str:
    """Return the hint for a policy function, by the peak of the blocks under it."""
    if not callable(given) or is_a(given, nn.Module):
        return asked.hints["no_function"].format(given=shown(given))
    found = _under(given)
    if found.outcome is not Outcome.OK:
        return asked.hints["refused"].format(given=found.message)
    peak = found.peak_allocated_bytes or 0
    if peak == _peak_under(keeps_products):
        return ""
    return asked.hints["all"] if peak >= _peak_under(_keeps_all) else asked.hints["others"]


EXERCISES = [
    Exercise(
        number="7.1",
        reference=lambda: in_segments(1)[:-1],
        mistakes={
            "segments": lambda: in_segments(3),
            "at_once": lambda: in_segments(NUM_BLOCKS),
            "last_too": lambda: in_segments(1),
            "too_few": lambda: in_segments(1)[:-2],
            "not_neighbours": always([[0, 2], [3, 4]]),
            "not_in_order": always([[3], [0]]),
            "no_plan": always([4, 4, 4]),
        },
        judge=_judge_plan,
    ),
    Exercise(
        number="7.2",
        reference=always(0.2),
        mistakes={"too_much": always(0.5), "too_low": always(0.0), "no_budget": always(20)},
        judge=_judge_budget,
    ),
    Exercise(
        number="8.1",
        reference=_all_changes,
        mistakes=one_wrong(
            _all_changes,
            {"dropout": GRADIENTS, "another_mask": SAME, "batch_norm": GRADIENTS,
             "late_hook": SAME, "one_mask_kept": STATISTICS},
        ),
        judge=judge_named,
    ),
    Exercise(
        number="8.2",
        reference=always(keeps_products),
        mistakes={
            "refused": always(_keeps_packets), "all": always(_keeps_all),
            "others": always(_keeps_others), "no_function": always("keep-matmuls"),
        },
        judge=_judge_policy,
    ),
]  # fmt: skip
