"""Where only what Windows has is there too: no fork, no signals, no poll, no sockets of Unix."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests import ROOT

STEPS = """
import os, signal, sys, torch
from tests import without_posix
without_posix.take_away()
import memlab
from memlab import StepConfig, Workload
from memlab.runtime import isolation, process
spawned = process.SpawnedProcess
process.SpawnedProcess = lambda command, environment: spawned(
    [*command[:2], without_posix.__file__, *command[2:]], environment)

def said(name, result):
    print(name, result.outcome, getattr(result, "message", ""), *getattr(result, "notes", ()))

workload = memlab.workloads.get("plain-mlp")
config = StepConfig(batch_size=4, accumulation_steps=2)
predicted = memlab.predict(workload, config, "cpu")
measured = memlab.measure(workload, config, "cpu")
said("measured", measured)
print("bytes", predicted.peak_allocated_bytes / measured.peak_allocated_bytes)
print("verified", memlab.verify(workload, config, "cpu").ok)
said("card", memlab.predict(workload, config, "t4"))
sharded = StepConfig(batch_size=4, sharding="ddp", world_size=2)
said("ranks", memlab.measure(workload, sharded, "cpu"))
memlab.panel(workload, device="cpu").close()

def build_model():
    print("a line of the model")
    print("its last words", file=sys.stderr)
    os._exit(3)

crashing = Workload(name="crashing", build_model=build_model, make_batch=workload.make_batch,
                    compute_loss=workload.compute_loss)
said("crashed", memlab.measure(crashing, config, "cpu"))
said("late", memlab.measure(workload, config, "cpu", timeout_seconds=0.001))
said("again", memlab.measure(workload, config, "cpu"))
print("worker", isolation.measuring.worker.process.pid, flush=True)
input()
"""


@pytest.mark.slow
def test_memlab_predicts_measures_and_leaves_no_process_without_what_posix_alone_has(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MEMLAB_CACHE": str(tmp_path)}
    caller = subprocess.Popen(
        [sys.executable, "-c", STEPS], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    lines: dict[str, str] = {}
    everything = []
    for line in caller.stdout:
        everything.append(line)
        word, _, rest = line.strip().partition(" ")
        lines[word] = rest
        if word == "worker":
            break
    assert "worker" in lines, "".join(everything)

    assert lines["measured"].startswith("ok "), lines
    assert "memlab cannot limit a process's memory on this system" in lines["measured"]
    assert float(lines["bytes"]) == pytest.approx(1, abs=0.01)
    assert lines["verified"] == "True"
    assert lines["card"].startswith("ok ")
    assert lines["ranks"].startswith("unsupported sharding='ddp' runs in processes")
    assert lines["crashed"].startswith("crashed the worker exited with 3")
    assert lines["late"].startswith("timed_out ")
    assert lines["again"].startswith("ok ")

    worker = int(lines["worker"])
    os.kill(worker, 0)  # it is there
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    deadline = time.monotonic() + 600
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(worker), "a worker outlived its caller"


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
