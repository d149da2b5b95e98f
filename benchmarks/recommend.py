"""Is what `memlab.recommend` answers the fastest setting that fits, and how long does it take?

Search: gpt-small on a card, every legal combination of precision, optimizer, checkpointing, policy,
budget and micro-batches, in a new process with an empty cache: the first call, the same call again,
and another limit. Goals: 60 s, 2 s, less than 2 GiB resident in the caller and its workers together
(shared pages count in each). A combination counts as judged if its step was recorded, so that its
micro-batches and budgets follow by arithmetic (roughly, for micro-batches of one sample), or if a
recorded step that it only adds memory savers to is already slower than the answer.

Limits: 200 random limits for a model on this CPU, answered by prediction alone. Each distinct
setting that was recommended is measured once, since its peak does not depend on the limit. Goals:
no measured peak is above its limit, and more memory never gives an answer that is predicted to be
slower (by more than the 2 % that the search takes for the same time). The limits come in random
order, and once more when all that the first round predicted is known.

Throughput: three models on this CPU with a limit of a share of the plain peak. All settings of a
grid are measured. The fastest that fit, the answer of `recommend`, the same once more (A/A) and the
answers of two peers are then measured in turns. Goal: at least 0.98 of the throughput of the best
of the grid, or within the A/A difference; no run out of memory on the way, five at most.

The peers, and how they are run, are in `recommend_peers.py`.
"""

import itertools
import json
import os
import random
import statistics
import tempfile
import threading
import time
from dataclasses import replace
from typing import Any

import psutil
import torch
from torch import nn

import memlab
from benchmarks import report
from benchmarks.recommend_peers import Trials, by_accelerate, by_lightning
from memlab import Outcome, StepConfig, Workload
from memlab._util.units import GIB, MIB
from memlab.running import Progress
from memlab.search import recommend
from memlab.search.alternatives import can_be_planned, with_settings
from memlab.search.search import SAME_TIME, Race, WorkloadSearch
from memlab.techniques import registry

CARD, SEARCHED_BATCH, SEARCHED_LIMITS = "rtx-4060", 240, ("600MiB", "500MiB")
FIELDS = ("precision", "optimizer", "checkpointing", "checkpoint_policy", "memory_budget",
          "accumulation_steps")  # fmt: skip
COLD_GOAL, WARM_GOAL, MEMORY_GOAL, COUNT_GOAL = 60.0, 2.0, 2 * GIB, 10_000
NUM_LIMITS, NUM_QUICK_LIMITS = 200, 6
LIMIT_SHARES = 0.3, 1.2  # of the plain peak, for the random limits
GRID_SHARE, GRID_BATCH = 0.6, 32
THROUGHPUT_GOAL, RUNS_GOAL = 0.98, 5
NUM_FINALISTS, NUM_ROUNDS, NUM_QUICK_ROUNDS = 3, 5, 2
SAMPLE_SECONDS = 0.1
PATIENCE_SECONDS, FIRST_GOAL = (
    60.0,
    10.0,
)  # of a fine-tuning that is too large for the card as it is
CHILD = "from benchmarks.recommend import searched; searched({quick})"


def workloads(quick: bool) -> list[Workload]:
    """Return the models that are measured."""
    gpt = {"num_layers": 2, "hidden_size": 128, "num_heads": 4, "sequence_length": 64}
    found = [
        memlab.workloads.get("vit-digits", num_layers=3, hidden_size=96, num_heads=4),
        memlab.workloads.get("gpt-small", **gpt),
        perceptron(),
    ]
    return found[-1:] if quick else found


def perceptron() -> Workload:
    """Return a perceptron whose activations are larger than its weights."""
    width, layers = 256, 6

    def model() -> nn.Module:
        pairs = ((nn.Linear(width, width), nn.GELU()) for _ in range(layers))
        return nn.Sequential(*itertools.chain(*pairs), nn.Linear(width, 8))

    return Workload(
        name="perceptron",
        build_model=model,
        make_batch=lambda n: (torch.randn(n, 64, width), torch.randn(n, 64, 8)),
        compute_loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    )


class Resident:
    """The most memory that this process and its children had at once, in bytes."""

    def __init__(self) -> None:
        self.most_bytes = 0
        self._ended = threading.Event()
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        this = psutil.Process()
        while not self._ended.wait(SAMPLE_SECONDS):
            total = 0
            for process in [this, *this.children(recursive=True)]:
                try:
                    total += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.most_bytes = max(self.most_bytes, total)

    def end(self) -> int:
        """Return it."""
        self._ended.set()
        return self.most_bytes


def searched(quick: bool) -> None:
    """Search in this process, which has just been started, and print what it took as JSON."""
    seen: list[WorkloadSearch] = []

    class Noted(Race):
        """Notes each search once it has ended."""

        def run(self) -> None:
            super().run()
            seen.extend(self.searches)

    recommend.Race = Noted
    workload = memlab.workloads.get("gpt-small", **({"num_layers": 1} if quick else {}))
    batch = 8 if quick else SEARCHED_BATCH
    resident, first = Resident(), SEARCHED_LIMITS[0]
    rows = []
    for what, limit in (("cold", first), ("again", first), ("another limit", SEARCHED_LIMITS[1])):
        started, used = time.perf_counter(), time.process_time()
        ranked = memlab.recommend(workload, limit, batch, CARD, allow=FIELDS, confirm=0)
        seconds = time.perf_counter() - started
        rows.append({
            "call": what, "limit": limit, "seconds": seconds,
            "of which this process computed": time.process_time() - used,
            "steps recorded": len(seen[-1].starts), "tried": len(seen[-1].tried),
            "answer": ranked[0].result.settings if len(ranked) else ranked.message,
            "predicted seconds": ranked[0].result.step_seconds if len(ranked) else None,
        })  # fmt: skip
    most_bytes = resident.end()
    print(json.dumps({"calls": rows, "resident_bytes": most_bytes, **counted(seen[0])}))


def counted(found: WorkloadSearch) -> dict[str, int]:
    """Return how many combinations are legal, and how many of them the search has judged."""
    space = found.space
    groups = (*space.faster, *space.savers)
    recorded = {with_settings(space.base, settings_of(one)): one for one in steps(groups)
                if tuple(sorted(names(settings_of(one)))) in found.starts}  # fmt: skip
    divided = {
        (plain(one.result.config, space.base), one.result.config.accumulation_steps)
        for one in found.tried
    }
    planned = {
        plain(one.result.config, space.base)
        for one in found.tried
        if one.result.config.memory_budget < 1.0
    }
    best = found.fitting[0].cost if found.fitting else float("inf")
    total = {"legal": 0, "judged by prediction": 0, "slower by a bound": 0}
    for chosen in steps(groups):
        step = with_settings(space.base, settings_of(chosen))
        is_slower = any(
            is_more(chosen, other, len(space.faster))
            and (found.starts[tuple(sorted(names(settings_of(other))))].step_seconds or 0.0)
            / SAME_TIME
            >= best
            for other in recorded.values()
        )
        budgets = (1.0, *space.budgets) if can_be_planned(step) else (1.0,)
        for divisor, budget in itertools.product(space.accumulation_steps, budgets):
            config = replace(step, accumulation_steps=divisor, memory_budget=budget)
            if registry.is_refused(config, found.target.kind):
                continue
            total["legal"] += 1
            is_judged = step in recorded and (step, divisor) in divided
            is_judged = is_judged and (budget == 1.0 or step in planned)
            total["judged by prediction"] += is_judged
            total["slower by a bound"] += is_slower and not is_judged
    return total


def steps(groups: Any) -> list[tuple[Any, ...]]:
    """Return one alternative or none (None) of each group, in every way."""
    return list(itertools.product(*((None, *group) for group in groups)))


def settings_of(chosen: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the settings of a choice."""
    return tuple(one for one in chosen if one is not None)


def names(settings: tuple[Any, ...]) -> list[str]:
    """Return the settings as `WorkloadSearch.starts` names them."""
    return [f"{name}={value}" for one in settings for name, value in one.items()]


def plain(config: StepConfig, base: StepConfig) -> StepConfig:
    """Return the step of a config: without other micro-batches and budgets."""
    return replace(
        config, accumulation_steps=base.accumulation_steps, memory_budget=base.memory_budget
    )


def is_more(chosen: tuple[Any, ...], other: tuple[Any, ...], num_faster: int) -> bool:
    """Return whether a choice is another one with savers added, and nothing else."""
    same = chosen[:num_faster] == other[:num_faster]
    pairs = zip(chosen[num_faster:], other[num_faster:], strict=True)
    return same and all(there is None or there == one for one, there in pairs)


def search_rows(quick: bool) -> dict[str, Any]:
    """Return what a search in a new process with an empty cache took."""
    before = os.environ["MEMLAB_CACHE"]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MEMLAB_CACHE"] = folder
        try:
            done = report.fresh_python(CHILD.format(quick=quick))
        finally:
            os.environ["MEMLAB_CACHE"] = before
    found: dict[str, Any] = json.loads(done.stdout.decode().splitlines()[-1])
    cold, again, other = (row["seconds"] for row in found["calls"])
    judged = found["judged by prediction"] + found["slower by a bound"]
    found["goals"] = {
        "cold": report.verdict(cold <= COLD_GOAL),
        "again": report.verdict(again <= WARM_GOAL),
        "another limit": report.verdict(other <= WARM_GOAL),
        "memory": report.verdict(found["resident_bytes"] < MEMORY_GOAL),
        "at least 10,000 legal": report.verdict(found["legal"] >= COUNT_GOAL),
        "all judged": report.verdict(judged == found["legal"]),
    }
    return found


def first_row(quick: bool) -> dict[str, Any]:
    """Return when a search for a model that does not fit has its first answer, and its best one."""
    name, tokens = ("llama-tiny", 512) if quick else ("llama-1b", 2048)
    workload = memlab.workloads.finetune(name, tokens=tokens)
    limit = "96MiB" if quick else None
    first: list[float] = []
    started = time.perf_counter()

    def told(progress: Progress) -> None:
        if "best so far" in progress.text and not first:
            first.append(time.perf_counter() - started)

    ranked = memlab.recommend(
        workload, limit, 8, CARD, confirm=0, patience=PATIENCE_SECONDS, on_progress=told
    )
    seconds = time.perf_counter() - started
    peak = ranked[0].result.counted_peak if len(ranked) else None
    row = {
        "model": workload.name, "first answer s": first[0] if first else None, "all s": seconds,
        "best": ranked[0].result.settings if len(ranked) else ranked.message,
    }  # fmt: skip
    if peak is None:
        return row | {"goal": report.verdict(False)}
    margin = 1.0 - min(peak.nbytes, peak.needed_bytes or peak.nbytes) / ranked.limit_bytes
    is_soon = bool(first) and first[0] <= FIRST_GOAL and seconds <= 2 * PATIENCE_SECONDS
    least = peak.judged_uncertainty / (1 + peak.judged_uncertainty)  # of the limit
    is_sure = ranked[0].result.fit == "fits" and margin >= least
    return row | {
        "margin": margin, "uncertainty": peak.judged_uncertainty,
        "goal": report.verdict(is_soon and is_sure),
    }  # fmt: skip


def limit_rows(quick: bool) -> dict[str, Any]:
    """Return how the answers to random limits hold, measured, and whether they are in order."""
    workload, batch = perceptron(), GRID_BATCH
    plain_peak = memlab.predict(workload, StepConfig(batch_size=batch), "cpu").peak_allocated_bytes
    assert plain_peak is not None
    draw = random.Random(0)
    count = NUM_QUICK_LIMITS if quick else NUM_LIMITS
    limits = [int(plain_peak * draw.uniform(*LIMIT_SHARES)) for _ in range(count)]
    rows: dict[str, Any] = {"limits": count}
    peaks: dict[StepConfig, int] = {}
    for what in ("asked once", "asked again"):  # once all that the first round predicted is known
        started = time.perf_counter()
        answers = {
            limit: memlab.recommend(workload, limit, batch, "cpu", confirm=0) for limit in limits
        }
        seconds = (time.perf_counter() - started) / len(limits)
        some = {limit: ranked[0].result for limit, ranked in answers.items() if len(ranked)}
        for config in {result.config for result in some.values()} - set(peaks):
            result = memlab.measure(workload, config, "cpu", repeats=1)
            peaks[config] = result.peak_allocated_bytes or 0
        times = [some[limit].step_seconds or 0.0 for limit in sorted(some)]
        slower = [later / min(times[:at]) for at, later in enumerate(times) if at]
        rows[what] = {
            "round": what,
            "with an answer": len(some),
            "distinct settings": len({result.config for result in some.values()}),
            "measured above the limit": sum(peaks[r.config] > limit for limit, r in some.items()),
            "least headroom": min(1 - peaks[r.config] / limit for limit, r in some.items()),
            "slower with more memory": sum(factor > SAME_TIME for factor in slower),
            "the most by a factor of": max(slower, default=1.0),
            "seconds a search": seconds,
        }
    return rows


def grid(quick: bool) -> list[StepConfig]:
    """Return the settings that are all measured."""
    axes: dict[str, tuple[Any, ...]] = {
        "precision": ("as-built", "bf16-mixed"),
        "optimizer_implementation": ("default", "fused"),
        "accumulation_steps": (1, 2, 4, 8),
        "memory_budget": (1.0, 0.75, 0.5, 0.0),
    }
    if quick:
        axes = {"accumulation_steps": (1, 2), "memory_budget": (1.0, 0.5)}
    return [StepConfig(batch_size=GRID_BATCH, **dict(zip(axes, values, strict=True)))
            for values in itertools.product(*axes.values())]  # fmt: skip


def throughput_rows(workload: Workload, quick: bool) -> list[dict[str, Any]]:
    """Return the answer, the best of the grid and the peers' answers, measured in turns."""
    plain_step = memlab.predict(workload, StepConfig(batch_size=GRID_BATCH), "cpu")
    assert plain_step.peak_allocated_bytes is not None
    limit = int(plain_step.peak_allocated_bytes * GRID_SHARE)

    ranked = memlab.recommend(workload, limit, GRID_BATCH, "cpu")
    if not ranked:
        raise RuntimeError(ranked.message)
    out_of_memory = sum(result.outcome is Outcome.OUT_OF_MEMORY for result in ranked.dropped)
    lightning, accelerate = (Trials(workload, limit, GRID_BATCH) for _ in range(2))
    peers = {
        "Lightning": (by_lightning(lightning), lightning),
        "accelerate": (by_accelerate(accelerate), accelerate),
    }
    measured = [memlab.measure(workload, config, "cpu", repeats=3) for config in grid(quick)]
    fitting = [r for r in measured if r.outcome is Outcome.OK
               and (r.peak_allocated_bytes or 0) <= limit]  # fmt: skip
    fitting.sort(key=lambda result: result.step_seconds or float("inf"))
    entries = {"memlab": ranked[0].config, "memlab again": ranked[0].config}
    entries |= {name: config for name, (config, _) in peers.items()}
    entries |= {f"grid {at + 1}": r.config for at, r in enumerate(fitting[:NUM_FINALISTS])}

    seconds: dict[str, list[float]] = {name: [] for name in entries}
    peaks = {}
    for _ in range(NUM_QUICK_ROUNDS if quick else NUM_ROUNDS):
        for name, config in entries.items():
            result = memlab.measure(workload, config, "cpu", repeats=3)
            seconds[name].append(result.step_seconds or float("inf"))
            peaks[name] = result.peak_allocated_bytes or 0
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    best = min([medians[n] for n in medians if n.startswith("grid")], default=None)
    same = abs(medians["memlab again"] / medians["memlab"] - 1.0)
    ran = {"memlab": (ranked.num_measured, out_of_memory)}
    ran |= {name: (trials.count, trials.num_out_of_memory) for name, (_, trials) in peers.items()}
    rows = []
    for name, config in entries.items():
        share = None if best is None else best / medians[name]
        row = {"model": workload.name, "limit MiB": limit / MIB, "who": name,
               "setting": str(config), "ms a step": 1e3 * medians[name],
               "of the best of the grid": share, "A/A": same,
               "fits, measured": peaks[name] <= limit, "runs": ran.get(name, ("", ""))[0],
               "out of memory": ran.get(name, ("", ""))[1], "goal": ""}  # fmt: skip
        if name == "memlab":
            is_met = ranked.num_measured <= RUNS_GOAL and out_of_memory == 0
            is_as_fast = share is not None and share >= min(THROUGHPUT_GOAL, 1.0 - same)
            row["goal"] = report.verdict(is_met and is_as_fast)
            if share is None:
                row["goal"] = "not judged: no setting of the grid fits"
        rows.append(row)
    return rows


def main() -> None:
    """Limits, then the search, then the grids."""
    given, before = report.options(__file__, __doc__), report.environment()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MEMLAB_CACHE"] = folder
        limits = limit_rows(given.quick)
        rounds = [limits["asked once"], limits["asked again"]]
        report.show(f"{limits['limits']} random limits on this CPU, predicted alone", rounds)
        for what in ("measured above the limit", "slower with more memory"):
            is_met = all(row[what] == 0 for row in rounds)
            print(f"goal: none {what}: {report.verdict(is_met)}")

        report.show(f"LoRA, batch 8, on {CARD}", [first_row(given.quick)])
        search = search_rows(given.quick)
        report.show(f"gpt-small on {CARD}, batch {SEARCHED_BATCH}, predicted", search["calls"])
        kinds = ("legal", "judged by prediction", "slower by a bound")
        resident = {"resident GiB": search["resident_bytes"] / GIB}
        report.show("combinations", [{kind: search[kind] for kind in kinds} | resident])
        report.show("goals", [search["goals"]])

        found = [
            row for each in workloads(given.quick) for row in throughput_rows(each, given.quick)
        ]
        report.show("against grids measured on this CPU, allocated bytes", found)
    report.write(given, before, {"search": search, "limits": limits, "throughput": found})


if __name__ == "__main__":
    main()
