"""What the tests of whole exported files share: they run in a process that has no memlab."""

import json
import os
import re
import subprocess
import sys

import torch
from torch import nn

from memlab import Workload
from memlab.integrations.export import plan_of
from memlab.techniques.step import build_step
from tests import ROOT

IGNORED = -100
RUNNER = """
import contextlib, io, json, runpy, sys
sys.modules["memlab"] = None  # importing it raises ImportError
found = []
for path in sys.argv[1:]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(path, run_name="__main__")
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    if "accelerate" in sys.modules:  # it keeps the precision of the first script of a process
        state = sys.modules["accelerate.state"]
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()
    found.append(said.getvalue())
print(json.dumps(found))
"""


def losses_of(texts, folder, *paths):
    """Return the losses that scripts print, each a list of floats; one process runs all of them.

    `paths` are folders of packages that scripts may import besides those of the environment.
    """
    files = []
    for index, text in enumerate(texts):
        file = folder / f"script_{index}.py"
        file.write_text(text, encoding="utf-8")
        files.append(str(file))
    code = f"import sys; sys.path += {list(map(str, paths))!r}\n{RUNNER}"
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, *files],
        capture_output=True, text=True, cwd=folder, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    return [[float(x) for x in re.findall(r"^step \d+: loss (\S+)$", each, re.M)] for each in said]


METERED = """
import contextlib, io, sys
import torch
from memlab.memory.meter import Meter, record
path, num_steps, *folders = sys.argv[1:]
sys.path += folders
names = {"__name__": "exported", "__file__": path}
exec(compile(open(path, encoding="utf-8").read(), path, "exec"), names)
names["NUM_STEPS"] = int(num_steps)
with contextlib.redirect_stdout(io.StringIO()):
    trace = record(names["main"], Meter(), torch.device("cpu"))
print("peak", trace.nbytes.cumsum().max())
"""


def peak_of(text, folder, *paths, num_steps=3):
    """Return the peak of allocated bytes of a script, as the meter of `memlab.measure` counts them.

    It runs in a process of its own, since a second profile in one process can report stale sizes.
    """
    file = folder / "metered.py"
    file.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", METERED, str(file), str(num_steps), *map(str, paths)],
        capture_output=True, text=True, cwd=folder, timeout=1800,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return int(done.stdout.split()[-1])


def losses_of_step(workload, config, num_steps=10):
    """Return the losses of memlab's own step."""
    step = build_step(workload, config, "cpu", plan=plan_of(workload, config, "cpu"))
    return [step() for _ in range(num_steps)]


def own_functions(kind):
    """Return workloads of functions that need what lies around them."""
    size = {"terms": 5, "rows": 3}[kind]

    def build_model():
        return nn.Sequential(nn.Linear(size, 8), nn.Dropout(0.2), nn.Linear(8, 4))

    def make_batch(n):
        if kind == "rows":
            return torch.randn(2 * n, size), torch.randint(4, (2 * n,))
        targets = torch.randint(4, (n,))
        return torch.randn(n, size), torch.where(torch.rand(n) < 0.4, IGNORED, targets)

    def compute_loss(model, batch):
        return loss(model(batch[0]), batch[1])

    loss = nn.CrossEntropyLoss(ignore_index=IGNORED)
    more = {"num_loss_terms": lambda batch: int((batch[1] != IGNORED).sum())}
    if kind == "rows":
        more = {
            "count_samples": lambda batch: len(batch[0]) // 2,
            "split_batch": lambda batch, sizes: list(
                zip(*(t.split([2 * n for n in sizes]) for t in batch), strict=True)
            ),
        }
    return Workload(
        name=kind, build_model=build_model, make_batch=make_batch, compute_loss=compute_loss, **more
    )
