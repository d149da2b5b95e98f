"""A training step and a memory meter that share no code with memlab: what it is compared with.

The loop is what a person writes by hand: AdamW, micro-batches weighted by their samples, fp32, CPU.
The bytes come from the profiler's exported chrome trace, not from its event tree, and are counted
twice over: by address here, and by the allocator itself ("Total Allocated"). It runs in a process
of its own, where no older tensor lives. Not covered: other optimizers, precisions and devices.
"""

import gc
import json
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_flatten, tree_unflatten

SEED = 0
STEP = "independent step"

Build = Callable[[], torch.nn.Module]
MakeBatch = Callable[[int], Any]
ComputeLoss = Callable[[torch.nn.Module, Any], torch.Tensor]


class BareStep:
    """Model, optimizer and micro-batches; each call is one update and returns its loss."""

    def __init__(
        self,
        build_model: Build,
        make_batch: MakeBatch,
        compute_loss: ComputeLoss,
        batch_size: int,
        accumulation_steps: int,
    ) -> None:
        torch.manual_seed(SEED)
        self.model = build_model()
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        torch.manual_seed(SEED)
        leaves, structure = tree_flatten(make_batch(batch_size))
        parts = zip(*(leaf.tensor_split(accumulation_steps) for leaf in leaves), strict=True)
        self.micro_batches = [tree_unflatten(part, structure) for part in parts]
        sizes = [len(part) for part in leaves[0].tensor_split(accumulation_steps)]
        self.weights = [size / batch_size for size in sizes]
        self.compute_loss = compute_loss

    def __call__(self) -> float:
        """Run one optimizer update."""
        total = 0.0
        for micro_batch, weight in zip(self.micro_batches, self.weights, strict=True):
            loss = self.compute_loss(self.model, micro_batch)
            total += weight * loss.item()
            (loss if weight == 1.0 else loss * weight).backward()
            del loss
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


def peak_in_profile(*definition: Any) -> dict[str, int]:
    """Return the peaks of the first and the second step of a `BareStep`, from a chrome trace."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = BareStep(*definition)
        for index in (1, 2):
            with record_function(f"{STEP} {index}"):
                step()
        del step
        gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path) as file:
            events = json.load(file)["traceEvents"]
    return peaks_of_steps(events)


def peaks_of_steps(events: list[dict[str, Any]]) -> dict[str, int]:
    """Return the most allocated bytes of each step, in the trace events of a chrome trace.

    "peak_N" is counted by address, "allocator_peak_N" is the allocator's own running total.
    """
    changes = [e for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] == 0]
    changes.sort(key=lambda event: event["ts"])
    by_address, blocks = 0, {}
    counted = [(float("-inf"), 0, 0)]  # time, bytes by address, bytes by the allocator's own count
    for event in changes:
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        if size > 0:
            blocks[address] = size
            by_address += size
        else:
            by_address -= blocks.pop(address, 0)
        counted.append((event["ts"], by_address, event["args"]["Total Allocated"]))
    peaks: dict[str, int] = {}
    for index in (1, 2):
        step = next(e for e in events if e.get("name") == f"{STEP} {index}" and e["ph"] == "X")
        begin, end = step["ts"], step["ts"] + step["dur"]
        first = sum(time < begin for time, _, _ in counted) - 1  # what stood when the step began
        inside = [row for row in counted[first:] if row[0] <= end]
        peaks[f"peak_{index}"] = max(row[1] for row in inside)
        peaks[f"allocator_peak_{index}"] = max(row[2] for row in inside)
    return peaks


def peak_in_tracker(*definition: Any) -> dict[str, int]:
    """Return the peak of the second step of a `BareStep` as PyTorch's MemTracker sees it."""
    step = BareStep(*definition)
    tracker = MemTracker()
    tracker.track_external(step.model, step.optimizer, *step.micro_batches)
    with tracker:
        step()
        tracker.reset_mod_stats()
        step()
    return {"peak_2": tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]}


def main() -> None:
    """Read a pickled (function, threads, definition) from stdin and print what it returns."""
    function, num_threads, definition = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(num_threads)
    print(json.dumps(globals()[function](*definition)))
