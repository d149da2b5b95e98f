"""What does recomputing cost, and does the memory budget trade better than rules of thumb?

Curve: for each model peak and step time on the CPU at 11 budgets; beside them every k-th block for
all k, PyTorch's `sac_milp` where it runs, and torch.compile's budgets, judged against their own
budget 1. Peaks are allocated bytes by `memlab.measure`; times are steps in turn in one process, as
medians of ratios to the plain step of the same round. `recompute_points.py` says how they are
compared.

Pointwise: goal, half of a transformer's saved bytes at 10 % more time of its operators, predicted
for an H200; on a CPU its pointwise operators are not cheap, and only bytes are compared. Solving:
goals, a frontier for 48 layers in 1 s (recording apart), a plan for a budget in 5 ms. Verify: 500
random combinations, fp32 within 1e-5, recompute bit by bit; goal, no mismatch (see
`recompute_checks.py`).
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import memlab
from benchmarks import meter, recompute_checks, report
from benchmarks.recompute_points import BY_HAND, COMPILED, OURS, Point, judge, rows_of
from memlab import StepConfig, StepResult, Workload
from memlab._util.units import MIB
from memlab.config import PRESET_POLICIES
from memlab.devices.cards import resolve
from memlab.prediction.budget_frontier import BudgetFrontier
from memlab.prediction.plans import frontier_for
from memlab.runtime import isolation
from memlab.techniques.checkpointing.blocks import find_blocks
from memlab.techniques.step import build_step, set_seed
from memlab.techniques.technique import Plan
from memlab.trace import CATEGORIES, PHASES, Phase

BUDGETS = tuple(round(1 - 0.1 * i, 1) for i in range(11))
COMPILED_BUDGETS = (1.0, 0.5, 0.0)
SAVED_GOAL, TIME_GOAL = 0.5, 1.1
CHAIN_GOAL_SECONDS, PICK_GOAL_MS = 1.0, 5.0
NUM_ROUNDS, NUM_ROUNDS_QUICK = 7, 1
NUM_VERIFIED, NUM_VERIFIED_QUICK = 500, 6
CARD = "h200"
PLAIN = StepConfig()


def gpt(num_layers: int = 6) -> Workload:
    """Return a GPT-2 whose activations are most of its memory."""
    return memlab.workloads.get(
        "gpt-small", num_layers=num_layers, hidden_size=128, num_heads=4, sequence_length=128
    )


MODELS: dict[str, tuple[Callable[[], Workload], int]] = {
    "gpt": (gpt, 4),
    "vit": (
        lambda: memlab.workloads.get("vit-digits", num_layers=6, hidden_size=96, num_heads=4),
        16,
    ),
    "resnet": (
        lambda: memlab.workloads.get(
            "resnet-digits", hidden_sizes=(16, 32, 64), depths=(2, 2, 2), embedding_size=16
        ),
        16,
    ),
    "unet-3d": (meter.WORKLOADS["unet-3d"], 2),
}
MODELS_QUICK = {"gpt": (lambda: gpt(2), 4)}


@dataclass(frozen=True, slots=True)
class Way:
    """A way to run a step that is to be measured."""

    rule: str
    setting: str
    config: StepConfig
    plan: Plan | None = None


def ways(workload: Workload, batch_size: int, budgets: Sequence[float]) -> Iterator[Way]:
    """Yield the eager ways of a model, the plain one first."""
    plain = StepConfig(batch_size=batch_size)
    frontier = frontier_of(workload, plain)
    for budget in budgets:
        config = dataclasses.replace(plain, memory_budget=budget)
        yield Way(OURS, f"{budget:g}", config, frontier.pick(budget) if config.is_planned else None)
    for k in range(1, len(find_blocks(workload.build_model())) + 1):
        by_hand = {"checkpointing": "blocks", "checkpoint_modules": f"every {k}"}
        yield Way(BY_HAND, f"every {k}", dataclasses.replace(plain, **by_hand))


def frontier_of(workload: Workload, config: StepConfig, device: str = "cpu") -> BudgetFrontier:
    """Return the plans of a workload, made in the worker."""
    run = functools.partial(isolation.run, timeout_seconds=600, on_progress=None, cancel=None)
    return frontier_for(workload, config, resolve(device), seed=0, run=run)


def curve(workload: Workload, batch_size: int, num_rounds: int, quick: bool) -> list[Point]:
    """Return the points of all rules on a model, measured."""
    every = list(ways(workload, batch_size, BUDGETS[::5] if quick else BUDGETS))
    distinct = {_key(way): way for way in every}
    times = times_in_turns(workload, list(distinct.values()), num_rounds)
    costs = {}
    for (key, way), share in zip(distinct.items(), times, strict=True):
        measured = done(memlab.measure(workload, way.config, "cpu", repeats=1, warmup=0))
        predicted = done(memlab.predict(workload, way.config, "cpu", timeout_seconds=600))
        costs[key] = measured.peak_allocated_bytes or 0, share, predicted
    plain_seconds = costs[_key(every[0])][2].step_seconds or 1.0
    points = [
        Point(
            rule=way.rule,
            setting=way.setting,
            peak_bytes=costs[_key(way)][0],
            time=costs[_key(way)][1],
            predicted_bytes=costs[_key(way)][2].peak_allocated_bytes,
            predicted_time=(costs[_key(way)][2].step_seconds or 0.0) / plain_seconds,
        )
        for way in every
    ]
    return points + ([] if quick else compiled(workload, batch_size))


def _key(way: Way) -> Any:
    return way.plan.regions if way.plan and way.plan.regions else way.config.checkpoint_modules


def times_in_turns(workload: Workload, every: Sequence[Way], num_rounds: int) -> list[float]:
    """Return the time of each way as a share of the first one's, the median over the rounds."""
    steps = [build_step(workload, way.config, "cpu", plan=way.plan) for way in every]
    for step in steps:
        step()
    rounds = []
    for number in range(num_rounds):
        seconds = np.zeros(len(steps))
        for at in range(len(steps))[:: 1 if number % 2 else -1]:
            set_seed(0)
            start = time.perf_counter()
            steps[at]()
            seconds[at] = time.perf_counter() - start
        rounds.append(seconds / seconds[0])
    shares: list[float] = np.median(rounds, axis=0).tolist()
    return shares


def compiled(workload: Workload, batch_size: int) -> list[Point]:
    """Return what torch.compile's own budgets cost, as far as it takes them."""
    points: list[Point] = []
    least = 0.0
    for budget in COMPILED_BUDGETS:
        asked: dict[str, Any] = {"memory_budget": budget, "budget_engine": "compile"}
        config = StepConfig(batch_size=batch_size, compile=budget == 1.0, **asked)
        result = memlab.measure(workload, config, "cpu", repeats=3, timeout_seconds=600)
        if result.outcome != "ok":
            print(f"{COMPILED} {budget:g} of {workload.name}: {result.message}")
            continue
        seconds, peak = min(result.step_seconds_all or (0.0,)), result.peak_allocated_bytes or 0
        least = least or seconds
        share = seconds / least
        points.append(Point(rule=COMPILED, setting=f"{budget:g}", peak_bytes=peak, time=share))
    return points


def done(result: StepResult) -> StepResult:
    """Return a result that is ok.

    Raises:
        RuntimeError: it is not; says why.
    """
    if result.outcome != "ok":
        raise RuntimeError(f"{result.workload_name}, {result.config}: {result.message}")
    return result


def sac_milp() -> str:
    """Return whether PyTorch's own planners run here, a sentence.

    They plan from `SACEstimator`, whose times need a CUDA card, and solve with PuLP; what they
    give is a share to discard for each module, for FSDP units.
    """
    from torch.distributed._tools import sac_estimator

    has_auto = any("auto_sac" in name for name in dir(sac_estimator))
    said = "auto_sac: " + ("is there. " if has_auto else "not in this torch. ")
    try:
        from torch.distributed._tools import sac_ilp  # noqa: F401
    except ImportError as error:
        return f"{said}sac_milp: {error}"
    try:
        linear = nn.Linear(8, 8)
        with sac_estimator.SACEstimator()("operator-level-cost-model"):
            linear(torch.randn(8, 8)).sum().backward()
    except Exception as error:  # of any kind: why it does not run is the finding
        return f"{said}sac_milp: {type(error).__name__}: {error}"
    return f"{said}sac_milp: its estimator runs here; compare it by hand"


def pointwise(quick: bool) -> list[dict[str, Any]]:
    """Return what policies and budgets save of a transformer's activations, and their time."""
    sizes = {"num_layers": 4, "hidden_size": 1024, "num_heads": 16, "sequence_length": 512}
    large = memlab.workloads.get("gpt-small", **sizes)
    rows = _saved_by_policy(large, CARD, StepConfig(batch_size=8))
    return rows + ([] if quick else _saved_by_policy(gpt(4), "cpu", StepConfig(batch_size=8)))


def _saved_by_policy(workload: Workload, device: str, plain: StepConfig) -> list[dict[str, Any]]:
    names = {"plain": plain} | {
        policy: dataclasses.replace(plain, checkpointing="blocks", checkpoint_policy=policy)
        for policy in PRESET_POLICIES[::-1]
    }
    names |= {f"budget {b:g}": dataclasses.replace(plain, memory_budget=b) for b in (0.5, 0.4)}
    rows: list[dict[str, Any]] = []
    for name, config in names.items():
        predicted = done(memlab.predict(workload, config, device, timeout_seconds=600))
        measured = None
        if device == "cpu":
            measured = saved_bytes(done(memlab.measure(workload, config, "cpu", repeats=1)))
        saved, seconds = saved_bytes(predicted), predicted.step_seconds or 0.0
        first = rows[0] if rows else {"predicted saved MiB": saved / MIB, "predicted s": seconds}
        share = saved / MIB / first["predicted saved MiB"]
        slower = seconds / first["predicted s"]
        is_claim = device == CARD and name in ("recompute-pointwise", "budget 0.5")
        rows.append(
            {
                "kept by": name,
                "device": device,
                "predicted saved MiB": saved / MIB,
                "measured saved MiB": None if measured is None else measured / MIB,
                "saved / plain": share,
                "predicted s": seconds,
                "time / plain": slower,
                "goal": report.verdict(share <= SAVED_GOAL and slower <= TIME_GOAL) * is_claim,
            }
        )
    return rows


def saved_bytes(result: StepResult) -> int:
    """Return the activations of the step that are held when its first forward ends."""
    timeline = result.timeline
    if timeline is None:
        raise RuntimeError(f"{result.workload_name} has no timeline")
    of_forward = (timeline.phase == PHASES.index(Phase.FORWARD)) & (timeline.micro_batch == 0)
    column = list(CATEGORIES).index("activations")
    return int(timeline.bytes_by_category[np.flatnonzero(of_forward)[-1], column])


def solving(num_layers: int = 48) -> dict[str, Any]:
    """Return how long the frontier of a deep GPT takes in this process, and picking from it."""
    from memlab.prediction import planning

    seconds: list[float] = []

    def timed(measured: Any) -> BudgetFrontier:
        start = time.perf_counter()
        frontier = solve(measured)
        seconds.append(time.perf_counter() - start)
        return frontier

    solve, planning.frontier_of = planning.frontier_of, timed
    start = time.perf_counter()
    try:
        made = planning.plan_in_process(
            gpt(num_layers), PLAIN, resolve(CARD), seed=0, report=lambda progress: None
        )
    finally:
        planning.frontier_of = solve
    whole = time.perf_counter() - start
    if made.frontier is None:
        raise RuntimeError(made.message)
    picks = []
    for budget in np.linspace(0, 1, 101):
        start = time.perf_counter()
        made.frontier.pick(float(budget))
        picks.append(time.perf_counter() - start)
    pick_ms = 1e3 * float(np.quantile(picks, 0.95))
    met = seconds[0] <= CHAIN_GOAL_SECONDS and pick_ms <= PICK_GOAL_MS
    return {
        "layers": num_layers,
        "recording s": whole - seconds[0],
        "chain s": seconds[0],
        "plans": len(made.frontier.plans),
        "pick p95 ms": pick_ms,
        "goal": report.verdict(met),
    }


def main() -> None:
    """Measure all, from the curves to what Python takes."""
    given, before = report.options(__file__, __doc__), report.environment()
    # first: fakes of a card must be there before the first backward of a process
    solved = solving(4 if given.quick else 48)
    curves, judged = {}, []
    for name, (make, batch_size) in (MODELS_QUICK if given.quick else MODELS).items():
        rounds = NUM_ROUNDS_QUICK if given.quick else NUM_ROUNDS
        points = curve(make(), batch_size, rounds, given.quick)
        curves[name] = rows_of(points)
        report.show(f"{name}, batch {batch_size}, fp32, AdamW, on this CPU", curves[name])
        judged.append(judge(name, points))
    report.show("eager budget beside every k-th block", judged)
    print(peer := sac_milp())
    saved = pointwise(given.quick)
    report.show("saved for backward by a GPT of 4 layers, allocated", saved)
    report.show(f"a frontier of plans for a GPT, on {CARD}", [solved])
    count = NUM_VERIFIED_QUICK if given.quick else NUM_VERIFIED
    checks = recompute_checks.verified(recompute_checks.combinations(count, given.quick))
    short = [{key: row[key] for key in ("precision", "verdict", "combinations")} for row in checks]
    report.show(f"{count} random combinations, verified on this CPU", short)
    python = recompute_checks.host()
    report.show("what Python takes in a recomputed module", [python])
    results = {"curves": curves, "judged": judged, "sac_milp": peer, "saved": saved}
    results |= {"solving": solved, "verified": checks, "host": python}
    report.write(given, before, results)


if __name__ == "__main__":
    main()
