"""What the tests of the store and of sweeps share: results that nothing ran, and processes."""

import os
import signal
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable

import numpy as np

from memlab import StepConfig, StepResult
from memlab._util.units import MIB
from memlab.prediction.run_result import (
    FaultKind,
    LineHolding,
    RunResult,
    RunTimeline,
    ScriptFault,
    StageCost,
)
from memlab.store.database import RunArguments, StoredRun
from tests import ROOT


def a_result(**fields) -> StepResult:
    """Return a result that nothing ran; `fields` replace its own."""
    return StepResult(
        **{
            "outcome": "ok",
            "message": "peak 1 KiB",
            "source": "measured",
            "device": "cpu",
            "config": StepConfig(),
            "workload_name": "mine",
            "versions": {"memlab": "0.1.0", "torch": "2.13.0"},
            "peak_allocated_bytes": 1024,
            "peak_by_category": {"parameters": 1024},
            "step_seconds": 0.5,
            "step_seconds_all": (0.5, 0.6),
            **fields,
        }
    )


def a_stage(name, nbytes=3 * MIB, **fields) -> StageCost:
    """Return a stage of which a MiB are parameters; `fields` replace its own."""
    held = {"activations": nbytes - MIB, "parameters": MIB}
    return StageCost(**{
        "name": name, "peak_allocated_bytes": nbytes, "peak_reserved_bytes": 2 * nbytes,
        "bytes_by_category": held, "fits": True, "close_to_limit": False, **fields,
    })  # fmt: skip


def a_fault(line=7, text="model(x)", **fields) -> ScriptFault:
    """Return something wrong in a script; `fields` replace its own."""
    return ScriptFault(**{
        "kind": FaultKind.UNUSED_GRAPH, "file": "/here/train.py", "line": line, "text": text,
        "nbytes": MIB, "per": "", "change": "run it under torch.no_grad()", "stage": "evaluation",
        "before_bytes": 3 * MIB, "after_bytes": 2 * MIB, **fields,
    })  # fmt: skip


def a_script_run(**fields) -> RunResult:
    """Return what a script was never seen to hold; `fields` replace its own."""
    lines = [("model = Net()", 3, "parameters", MIB), ("loss = f(x)", 9, "activations", 2 * MIB)]
    held = np.zeros((4, 7), np.int64)
    held[:, 0] = MIB
    held[1::2, 4] = 2 * MIB
    return RunResult(**{
        "outcome": "ok", "message": "", "source": "predicted", "device": "t4",
        "versions": {"torch": "2.13.0", "device_name": "Tesla T4"}, "config": None, "run": None,
        "workload_name": "train.py", "memory_limit_bytes": 8 * MIB,
        "stages": (a_stage("step"), a_stage("evaluation")),
        "lines": tuple(
            LineHolding(file="/here/train.py", line=line, category=category, num_blocks=1,
                        nbytes=nbytes, text=text)
            for text, line, category, nbytes in lines
        ),
        "modules": {"h.0.mlp": MIB, "": MIB, "h.1.mlp": MIB},
        "step_seconds": 0.5, "seconds_uncertainty": 0.3,
        "timeline": RunTimeline(
            bytes_by_category=held, stage=np.array([0, 0, 1, 1]), stages=("step", "evaluation"),
            operator=np.array([0, 2, 5, 9]),
        ),
        **fields,
    })  # fmt: skip


def a_run(**fields) -> StoredRun:
    """Return a row for the store; `fields` replace its own."""
    return StoredRun(
        **{"stored_at": 1.0, "result": a_result(), "asked": RunArguments(seed=0), **fields}
    )


def python(code: str, *arguments: str) -> str:
    """Return what a new Python prints that imports what this one does; it must end well."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        text=True,
        capture_output=True,
        timeout=900,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path]))},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class Forked:
    """A process that runs a function; it begins at once, with all that this one has imported."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                function()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)

    def wait(self) -> int:
        """Return its exit status, below zero for a signal."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        """End it as `kill -9` does."""
        os.kill(self.pid, signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL
