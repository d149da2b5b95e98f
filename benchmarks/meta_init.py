"""How much of the host's memory does it take to build a model: plain, and on the meta device?

Each row is a process of its own. Counted is how far its resident memory (VmHWM of Linux) rises
above what it was just before the build. A plain build holds the model before it can be moved; a
build on meta holds shapes and notes, and the model is made where it is trained: on a card that is
none of the host's memory, on a CPU it is the same again. Left out: the CUDA context, which is
started before.
"""

import functools
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import report
from memlab import workloads
from memlab.arguments.units import KIB
from memlab.step import set_seed
from memlab.techniques.building.deferred import build_on_meta, noted_build

NUM_LAYERS, NUM_LAYERS_QUICK = 24, 4
WAYS = ("plain", "noted on meta, not made", "on meta, then made")


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


def main() -> None:
    """Build a GPT-2 in every way."""
    given, before = report.options(__file__, __doc__), report.environment()
    num_layers = NUM_LAYERS_QUICK if given.quick else NUM_LAYERS
    found = rows(num_layers)
    report.show(f"a GPT-2 of {num_layers} layers, hidden size 1024, fp32", found)
    report.write(given, before, {"rows": found})


if __name__ == "__main__":
    main()
