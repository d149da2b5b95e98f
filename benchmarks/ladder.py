"""How far do the techniques climb together, and does the model learn the same?

Ladder: ViT-L/16, 224 px, effective batch 64, predicted for a card: goals, the first rung's peak
reserved at least 38 times the last one's (13.3 in the article's own logs, which changed the batch),
a step at most 2.5 times as long. Rungs: a small ViT on real digits, measured on this CPU, with the
prediction of each rung and the error of its gradients. Training: that ViT for 300 updates, plain
with several seeds and with all rungs; goal, the final loss within the spread of the seeds. Chunked
loss: GPT-2 small, 1024 tokens, batch 32, predicted: goal, at most 0.6 of the peak, gradient error
at most 1e-5 in fp32 (checked at a small size). Once with transformers' default GELU, whose eight
operators each save something, and once with PyTorch's kernel of the same function. Offload: the
predicted time of a step whose activations wait in the host's memory, all or a share of them, of a
wide and of a narrow model; beside it PyTorch's `save_on_cpu`, whose copies nothing hides: goal, at
most 1.15 of the plain one's at half the memory.
"""

import dataclasses
import functools
from typing import Any

import numpy as np
import torch

import memlab
from benchmarks import report
from benchmarks.recompute import done, frontier_of
from memlab import StepConfig, StepResult, Workload
from memlab._util.units import GIB, MIB
from memlab.techniques.step import build_step, set_seed
from memlab.workloads.language import Gpt

CARD = "h200"
PEAK_GOAL, TIME_GOAL = 38.0, 2.5
CHUNKED_GOAL, ERROR_GOAL = 0.6, 1e-5
OFFLOAD_TIME_GOAL, OFFLOAD_MEMORY_GOAL = 1.15, 0.5
NUM_UPDATES, NUM_UPDATES_QUICK = 300, 4
NUM_LAST = 20  # updates whose mean loss is the final one
NUM_SEEDS, NUM_SEEDS_QUICK = 5, 2
BATCH_SIZE = 32


def small_vit() -> Workload:
    """Return a ViT that learns the digits in a minute on a CPU."""
    return memlab.workloads.get("vit-digits", num_layers=4, hidden_size=96, num_heads=4)


def climbed(quick: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the rungs of the large ViT on the card, and how they meet the goals."""
    large = memlab.workloads.get("vit-large", **({"num_layers": 2} if quick else {}))
    results = memlab.ladder(large, device=CARD)
    rows = [_row(result, results[0]) for result in results]
    last = rows[-1]
    judged = {
        "reserved, times less": last["reserved, times less"],
        "peak goal": report.verdict(last["reserved, times less"] >= PEAK_GOAL),
        "allocated, times less": last["allocated, times less"],
        "time / plain": last["time / plain"],
        "time goal": report.verdict(last["time / plain"] <= TIME_GOAL),
    }
    return rows, judged


def _row(result: StepResult, first: StepResult) -> dict[str, Any]:
    peak, reserved = result.peak_allocated_bytes or 1, result.peak_reserved_bytes or 1
    seconds, plain = result.step_seconds or 0.0, first.step_seconds or 1.0
    return {
        "setting": str(result.config),
        "outcome": str(result.outcome),
        "allocated GiB": peak / GIB,
        "reserved GiB": reserved / GIB,
        "allocated, times less": (first.peak_allocated_bytes or 0) / peak,
        "reserved, times less": (first.peak_reserved_bytes or 0) / reserved,
        "time / plain": seconds / plain,
    }


def measured_rungs() -> list[dict[str, Any]]:
    """Return the rungs of the small ViT on this CPU: measured, predicted, verified."""
    workload = small_vit()
    results = memlab.ladder(workload, device="cpu", batch_size=BATCH_SIZE)
    rows = []
    for result in results:
        predicted = done(memlab.predict(workload, result.config, "cpu", timeout_seconds=600))
        checked = memlab.verify(workload, result.config, "cpu")
        peak = result.peak_allocated_bytes or 1
        rows.append(
            {
                "setting": str(result.config),
                "measured MiB": peak / MIB,
                "times less": (results[0].peak_allocated_bytes or 0) / peak,
                "predicted error %": 100 * ((predicted.peak_allocated_bytes or 0) / peak - 1),
                "time / plain": (result.step_seconds or 0.0) / (results[0].step_seconds or 1.0),
                "gradients": "within tolerance" if checked.ok else checked.why,
                "gradient error": checked.global_relative_error,
            }
        )
    return rows


def final_loss(workload: Workload, config: StepConfig, num_updates: int, seed: int) -> float:
    """Return the mean loss of the last updates of a training run in this process."""
    frontier = frontier_of(workload, config) if config.is_planned else None
    plan = frontier.pick(config.memory_budget) if frontier else None
    step = build_step(workload, config, "cpu", plan=plan, seed=seed)
    losses = []
    for number in range(num_updates):
        step.take_batch(config, seed=num_updates * seed + number)
        losses.append(step())
    return float(np.mean(losses[-NUM_LAST:]))


def trained(config: StepConfig, quick: bool) -> list[dict[str, Any]]:
    """Return the final losses, plain with several seeds and with all rungs."""
    workload, plain = small_vit(), StepConfig(batch_size=BATCH_SIZE)
    seeds = range(NUM_SEEDS_QUICK if quick else NUM_SEEDS)
    updates = NUM_UPDATES_QUICK if quick else NUM_UPDATES
    reference = [final_loss(workload, plain, updates, seed) for seed in seeds]
    climbed = [final_loss(workload, config, updates, seed) for seed in seeds]
    same = min(reference) <= float(np.median(climbed)) <= max(reference)
    lower = float(np.median(climbed)) < min(reference)
    return [
        {
            "updates": updates,
            "setting": str(setting),
            "least": min(losses),
            "median": float(np.median(losses)),
            "most": max(losses),
            "goal": said,
        }
        for setting, losses, said in (
            (plain, reference, ""),
            (config, climbed, report.verdict(same or lower) + (", lower" if lower else "")),
        )
    ]


def chunked(quick: bool) -> list[dict[str, Any]]:
    """Return what a loss in chunks leaves of the peak of GPT-2 small, and its gradient's error."""
    sizes = {"num_layers": 12, "hidden_size": 768, "num_heads": 12, "sequence_length": 1024}
    large = Gpt(vocab_size=50257, **(sizes if not quick else sizes | {"num_layers": 2}))
    workload = large.workload("gpt2")
    fused = dataclasses.replace(workload, build_model=functools.partial(_with_gelu_kernel, large))
    small = memlab.workloads.get("gpt-small", num_layers=2)
    checked = memlab.verify(small, StepConfig(batch_size=4, loss_chunks=4), "cpu")
    error = {
        "gradient error": checked.max_relative_error,
        "error goal": report.verdict((checked.max_relative_error or 1.0) <= ERROR_GOAL),
    }
    named = (("transformers' operators", workload), ("one kernel of PyTorch", fused))
    return [{"GELU": name, **_chunked_row(each), **error} for name, each in named]


def _with_gelu_kernel(spec: Gpt) -> torch.nn.Module:
    """Return a GPT-2 whose GELU is the same function in one kernel, which saves its input alone."""
    model: Any = spec.build()
    for block in model.transformer.h:
        block.mlp.act = torch.nn.GELU(approximate="tanh")
    return model


def _chunked_row(workload: Workload) -> dict[str, Any]:
    plain = StepConfig(batch_size=32)
    whole, parts, blocks, both = (
        done(memlab.predict(workload, config, CARD, timeout_seconds=600))
        for config in (
            plain,
            dataclasses.replace(plain, loss_chunks=32),
            dataclasses.replace(plain, checkpointing="blocks"),
            dataclasses.replace(plain, checkpointing="blocks", loss_chunks=32),
        )
    )
    share = (parts.peak_allocated_bytes or 0) / (whole.peak_allocated_bytes or 1)
    return {
        "plain GiB": (whole.peak_allocated_bytes or 0) / GIB,
        "chunked / plain": share,
        "goal": report.verdict(share <= CHUNKED_GOAL),
        "with blocks recomputed": (both.peak_allocated_bytes or 0)
        / (blocks.peak_allocated_bytes or 1),
    }


def offloaded(quick: bool) -> list[dict[str, Any]]:
    """Return what offloading the activations of a GPT costs on the card, predicted."""
    wide = Gpt(num_layers=6, hidden_size=2048, num_heads=16, sequence_length=1024, vocab_size=50257)
    workloads = {"6 layers, 2048 wide": wide.workload("gpt-wide")}
    if not quick:
        workloads["gpt2-medium (1024 wide)"] = memlab.workloads.get("gpt2-medium")
    rows = []
    for name, workload in workloads.items():
        plain = StepConfig(batch_size=8)
        before = done(memlab.predict(workload, plain, CARD, timeout_seconds=600))
        for fraction in (0.5, 0.6, 1.0):
            config = dataclasses.replace(plain, offload_activations=True, offload_fraction=fraction)
            after = done(memlab.predict(workload, config, CARD, timeout_seconds=600))
            rows.append(_offloaded_row(name, f"{fraction:.0%} offloaded", before, after))
        naive = dataclasses.replace(workload, compute_loss=functools.partial(_on_cpu, workload))
        after = done(memlab.predict(naive, plain, CARD, timeout_seconds=600))
        rows.append(_offloaded_row(name, "torch's save_on_cpu", before, after))
    return rows


def _on_cpu(workload: Workload, model: Any, batch: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return workload.compute_loss(model, batch)


def _offloaded_row(name: str, what: str, before: StepResult, after: StepResult) -> dict[str, Any]:
    held = [(result.peak_by_category or {}).get("activations", 0) for result in (before, after)]
    time = (after.step_seconds or 0.0) / (before.step_seconds or 1.0)
    is_met = held[1] <= OFFLOAD_MEMORY_GOAL * held[0] and time <= OFFLOAD_TIME_GOAL
    return {
        "model": name,
        "what": what,
        "activations at the peak, GiB": held[1] / GIB,
        "of the plain ones": held[1] / held[0],
        "time / plain": time,
        "goal": report.verdict(is_met),
    }


def main() -> None:
    """Climb, measure, train, and judge."""
    given, before = report.options(__file__, __doc__), report.environment()
    set_seed(0)
    rungs, judged = climbed(given.quick)
    report.show(f"ViT-L/16, effective batch 64, predicted for {CARD}", rungs)
    report.show("against the goals", [judged])
    measured = measured_rungs()
    report.show("a small ViT on this CPU", measured)
    all_rungs = memlab.ladder(small_vit(), device="cpu", batch_size=BATCH_SIZE, repeats=1)[-1]
    learnt = trained(all_rungs.config, given.quick)
    report.show("trained on digits", learnt)
    loss = chunked(given.quick)
    report.show(f"GPT-2 small, 1024 tokens, batch 32, predicted for {CARD}, allocated", loss)
    moved = offloaded(given.quick)
    report.show(f"activations offloaded, batch 8, fp32, predicted for {CARD}", moved)
    results = {"ladder": rungs, "judged": judged, "measured": measured, "trained": learnt}
    report.write(given, before, results | {"chunked": loss, "offloaded": moved})


if __name__ == "__main__":
    main()
