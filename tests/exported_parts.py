"""What the tests of whole exported files share: they run in a process that has no memlab."""

import json
import os
import re
import subprocess
import sys

from memlab.exporting.export import plan_of
from memlab.step import build_step
from tests import ROOT

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
from memlab.meters.meter import Meter, record
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
