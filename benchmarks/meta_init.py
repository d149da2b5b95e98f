"""How much of the host's memory does it take to build a model: plain, and on the meta device?

Each row is a process of its own. Counted is how far its resident memory (VmHWM of Linux) rises
above what it was just before the build. A plain build holds the model before it can be moved; a
build on meta holds shapes and notes, and the model is made where it is trained: on a card that is
none of the host's memory, on a CPU it is the same again. Left out: the CUDA context, which is
started before.

A second table has two real ranks that share the model by zero3, over Gloo: how far the resident
memory of rank 0 rises, and the most bytes that its allocator held during the build, measured by
memlab's meter and predicted.
"""

import functools
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import report
from memlab import StepConfig, Workload, workloads
from memlab._util.units import KIB
from memlab.cost_model.traced_step import Failure, TracedStep, from_traced_step
from memlab.devices.cards import Target
from memlab.memory.lifetimes import build_peak_bytes
from memlab.memory.meter import Meter, record
from memlab.techniques.deferred import build_on_meta, noted_build
from memlab.techniques.sharding.ranks import local
from memlab.techniques.step import build_step, set_seed
from memlab.trace import Phase
from memlab.tracing.assembly import sizes_of

NUM_LAYERS, NUM_LAYERS_QUICK = 24, 4
WAYS = ("plain", "noted on meta, not made", "on meta, then made")
NUM_RANKS = 2


def resident(field: str) -> int:
    """Return bytes of this process's resident memory: "VmRSS" now, "VmHWM" at most so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * KIB
    raise OSError(f"/proc/self/status has no {field}")


def built(way: str, num_layers: int) -> dict[str, Any]:
    """Return what one way to build a GPT-2 takes, in this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.zeros(1, device=device)
    build = workloads.get("gpt2-medium", num_layers=num_layers).build_model
    workloads.get("gpt-small").build_model()  # libraries are imported, and hold what they hold
    build_on_meta(nn.Identity, device)
    set_seed(0)
    before, start = resident("VmRSS"), time.perf_counter()
    ways = {
        "plain": lambda: build().to(device),
        "noted on meta, not made": functools.partial(noted_build, build),
        "on meta, then made": functools.partial(build_on_meta, build, device),
    }
    made = ways[way]()
    seconds = time.perf_counter() - start
    model = made if isinstance(made, nn.Module) else made[0]
    return {
        "build": way,
        "device": str(device),
        "parameters, bytes": sum(p.nbytes for p in model.parameters()),
        "host peak above before, bytes": resident("VmHWM") - before,
        "seconds": seconds,
    }


def rows(num_layers: int) -> list[dict[str, Any]]:
    """Return one row for each way, each from a fresh process."""
    code = "import json; from benchmarks import meta_init; print(json.dumps(meta_init.built(*{})))"
    return [json.loads(report.fresh_python(code.format((way, num_layers))).stdout) for way in WAYS]


def sharded_rows(num_layers: int) -> list[dict[str, Any]]:
    """Return one row for each way to build a model that ranks share."""
    found = []
    for on_meta in (False, True):
        done = subprocess.run(
            [
                sys.executable, "-m", "torch.distributed.run", "--standalone",
                f"--nproc-per-node={NUM_RANKS}", "-m", "benchmarks.meta_init", "--as-rank",
                str(num_layers), str(int(on_meta)),
            ],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        row = json.loads(done.stdout.strip().splitlines()[-1])
        found.append(row | {"predicted, bytes": predicted(num_layers, on_meta=on_meta)})
    return found


def sharded(num_layers: int, *, on_meta: bool) -> tuple[Workload, StepConfig]:
    """Return the model and the settings of the ranks."""
    config = StepConfig(
        batch_size=NUM_RANKS, sharding="zero3", world_size=NUM_RANKS, init_on_meta=on_meta
    )
    return workloads.get("gpt2-medium", num_layers=num_layers), config


def predicted(num_layers: int, *, on_meta: bool) -> int:
    """Return the predicted peak of a rank's build."""

    def peak(step: TracedStep) -> int:
        own = sizes_of(step.program.recording, step.program.layout, step.kernels().effects)
        return build_peak_bytes(step.program.trace(own, step.config.micro_batch_sizes))

    found = from_traced_step(
        peak, *sharded(num_layers, on_meta=on_meta), Target(kind="cpu", card=None, name="cpu"),
        seed=0, report=lambda progress: None, purpose="for its build",
    )  # fmt: skip
    if isinstance(found, Failure):
        raise RuntimeError(found.message)
    return found


def print_as_rank(num_layers: int, *, on_meta: bool) -> None:
    """Be one of the ranks: build the model twice, without and with a meter; rank 0 prints."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    workload, config = sharded(num_layers, on_meta=on_meta)
    small = workloads.get("gpt-small")
    build_step(small, replace(config, init_on_meta=True), "cpu")  # libraries are imported
    before = resident("VmRSS")
    step = build_step(workload, config, "cpu")
    peak = resident("VmHWM") - before
    held = sum(local(parameter).nbytes for parameter in step.model.parameters())
    del step
    meter = Meter()

    def build() -> None:
        build_step(workload, config, "cpu", mark=partial(meter.mark, -1))
        meter.mark(0, Phase.FORWARD, 0)
        torch.empty(1)

    trace = record(build, meter, torch.device("cpu"))
    if dist.get_rank() == 0:
        print(
            json.dumps(
                {
                    "build": "on meta" if on_meta else "plain",
                    "parameters of the rank, bytes": held,
                    "resident peak above before, bytes": peak,
                    "allocated, bytes": build_peak_bytes(trace),
                }
            ),
            flush=True,
        )
    dist.barrier()
    os._exit(0)  # Gloo's threads can abort a process that ends in the ordinary way


def main() -> None:
    """Build a GPT-2 in every way."""
    if "--as-rank" in sys.argv:
        num_layers, on_meta = map(int, sys.argv[-2:])
        print_as_rank(num_layers, on_meta=bool(on_meta))
    given, before = report.options(__file__, __doc__), report.environment()
    num_layers = NUM_LAYERS_QUICK if given.quick else NUM_LAYERS
    found = rows(num_layers)
    report.show(f"a GPT-2 of {num_layers} layers, hidden size 1024, fp32", found)
    shared = sharded_rows(num_layers)
    report.show(f"the same, shared by {NUM_RANKS} ranks with zero3", shared)
    report.write(given, before, {"rows": found, "sharded": shared})


if __name__ == "__main__":
    main()
