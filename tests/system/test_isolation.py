"""The worker: whatever a step does to its process is an outcome, and the caller lives on."""

import contextlib
import ctypes
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from memlab import MemlabError, StepConfig, Workload, measure, predict, verify
from memlab.api import inspect_workload, predict_with_size_model
from memlab.runtime import isolation
from memlab.runtime.serving import FUNCTIONS
from tests import ROOT
from tests.models import blocks, linear, made_of
from tests.worker_parts import BATCH, assert_worker_is_back, doing, parameters_of


def test_the_worker_measures_what_this_process_would():
    away = measure(linear(), StepConfig(), "cpu", repeats=1)
    here = measure(linear(), StepConfig(), "cpu", repeats=1, isolate=False)
    assert away.peak_by_category == here.peak_by_category
    assert away.loss == here.loss


def test_the_worker_stays_warm():
    measure(linear(), StepConfig(), "cpu", repeats=1)
    first = isolation.measuring.worker.process.pid
    measure(linear(), StepConfig(), "cpu", repeats=1)
    assert isolation.measuring.worker.process.pid == first != os.getpid()


def segfault():
    ctypes.string_at(0)


def kill_itself():
    os.kill(os.getpid(), 9)


def exhaust_memory():
    torch.ones(2**50)


@pytest.mark.parametrize(
    ("action", "outcome", "said"),
    [
        (lambda: os._exit(3), "crashed", "exited with 3"),
        (segfault, "crashed", "SIGSEGV|in segfault"),  # where it was in the person's code
        (kill_itself, "crashed", "SIGKILL"),
        (exhaust_memory, "out_of_memory", "allocate"),
        (lambda: 1 / 0, "failed", "ZeroDivisionError"),
        (lambda: sys.exit(2), "failed", "SystemExit: 2"),
    ],
)
def test_every_end_is_an_outcome_with_a_sentence(action, outcome, said):
    result = doing(action)
    assert result.outcome == outcome, result.message
    assert all(each in result.message for each in said.split("|")), result.message
    assert result.config == StepConfig()
    assert_worker_is_back()


def abort_here():
    os.abort()


def test_a_prediction_that_aborts_is_a_sentence_with_its_place():
    class Aborts(torch.nn.Linear):
        def forward(self, x):
            abort_here()
            return super().forward(x)

    workload = Workload.from_module(Aborts(3, 3), BATCH, torch.nn.functional.mse_loss)
    result = predict(workload, StepConfig(batch_size=4), "rtx-3090")
    assert result.outcome == "crashed"
    for said in ("SIGABRT", "in abort_here", "the next run starts a new worker"):
        assert said in result.message, result.message
    again = predict(linear(), StepConfig(batch_size=4), "rtx-3090")
    assert again.outcome == "ok", again.message


def end_for_want_of_a_thread():
    os.write(2, b"terminate called after throwing an instance of 'std::system_error'\n"
             b"  what():  Resource temporarily unavailable\n")  # fmt: skip
    os.abort()


def test_an_abort_for_want_of_a_thread_is_out_of_memory():
    result = doing(end_for_want_of_a_thread)
    assert (result.outcome, "Resource temporarily" in result.message) == ("out_of_memory", True)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's data")
def test_a_limit_on_data_from_outside_is_kept_and_ends_no_job():
    code = """
import resource, sys
from memlab.runtime.serving import limit_memory
hard = 2**33
resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
for guard in (2**40, None, sys.maxsize, 2**20):
    limit_memory(guard)
    print(resource.getrlimit(resource.RLIMIT_DATA)[0] <= hard)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.stdout.split() == ["True"] * 4, done.stderr
    assert done.returncode == 0


def test_what_a_model_prints_does_not_reach_the_protocol_or_the_caller(capfd):
    assert doing(lambda: print("x" * 10_000)).outcome == "ok"
    assert "xxx" not in capfd.readouterr().out


def test_the_time_limit_ends_a_run():
    started = time.monotonic()
    result = doing(lambda: time.sleep(600), timeout_seconds=1.5)
    assert result.outcome == "timed_out"
    assert "timeout_seconds" in result.message
    assert time.monotonic() - started < 300
    assert_worker_is_back()


def test_a_worker_that_does_not_start_is_not_the_fault_of_the_step(monkeypatch):
    monkeypatch.setattr(isolation, "START_SECONDS", 0.0)
    monkeypatch.setattr(isolation.spare, "take", lambda: None)
    isolation.measuring.replace()
    result = measure(linear(), StepConfig(), "cpu", repeats=1)
    assert result.outcome == "timed_out"
    assert "while starting; other programs keep the processor busy" in result.message
    assert "timeout_seconds" not in result.message
    monkeypatch.undo()
    assert_worker_is_back()


@pytest.mark.slow
def test_stop_ends_a_run_without_waiting_for_it():
    measure(linear(), StepConfig(), "cpu", repeats=1)  # the worker is warm
    cancel, began, times = threading.Event(), threading.Event(), []

    def progress(step):
        if "first step" in step.text:
            began.set()

    def stop():
        began.wait(600)
        time.sleep(0.2)
        times.append(time.monotonic())
        cancel.set()

    threading.Thread(target=stop).start()
    result = doing(lambda: time.sleep(600), cancel=cancel, on_progress=progress)
    assert result.outcome == "cancelled"
    assert "stopped" in result.message
    assert time.monotonic() - times[0] < 60
    assert_worker_is_back()


def test_a_prediction_that_is_given_up_leaves_its_worker():
    """Even of a model that never ends and passes over every error."""

    def endless(model, batch):
        outputs = model(batch)
        while True:
            with contextlib.suppress(Exception):
                outputs = outputs + 1

    known = predict(linear(), StepConfig(), "cpu").peak_allocated_bytes
    worker, cancel = isolation.predicting.worker, threading.Event()
    workload = made_of(lambda: nn.Linear(3, 3), (3,), endless)
    timer = threading.Timer(0.5, cancel.set)
    timer.start()
    found = predict_with_size_model(workload, StepConfig(), "cpu", cancel=cancel).result
    assert found.outcome == "cancelled"
    assert predict(linear(), StepConfig(), "cpu").peak_allocated_bytes == known
    assert isolation.predicting.worker is worker


@pytest.mark.parametrize("isolate", [True, False])
def test_two_measurements_take_turns(isolate):
    outcomes = []

    def run():
        result = measure(linear(), StepConfig(), "cpu", repeats=1, isolate=isolate)
        outcomes.append(result.outcome)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert outcomes == ["ok"] * 3


def test_a_run_that_waits_can_be_stopped():
    cancel = threading.Event()
    cancel.set()
    with isolation.measuring.lock:
        result = measure(linear(), StepConfig(), "cpu", cancel=cancel)
    assert (result.outcome, result.message) == ("cancelled", "stopped before it began")


def test_the_physical_guard_lets_allocations_fail_and_not_the_machine():
    def take_memory():
        keep = [torch.ones(2**24) for _ in range(64)]  # 4 GiB, really touched
        assert len(keep) == 64

    class Takes(nn.Linear):
        def forward(self, x):
            take_memory()
            return super().forward(x)

    arguments = {
        "workload": Workload.from_module(Takes(3, 3), BATCH, nn.functional.mse_loss),
        "config": StepConfig(),
        "device": torch.device("cpu"),
        "repeats": 1, "warmup": 0, "seed": 0, "memory_limit": None,
    }  # fmt: skip
    guarded = isolation.run("measure", arguments, timeout_seconds=60, guard_bytes=2**29)
    assert guarded.outcome == "out_of_memory"
    assert "forward of micro-batch 1" in guarded.message
    assert_worker_is_back()


def test_the_accounted_limit_is_told_from_the_worker():
    result = measure(linear(), StepConfig(), "cpu", memory_limit="100KiB")
    assert (result.outcome, result.fits) == ("out_of_memory", False)
    assert "limit is 100 KiB" in result.message


def test_repeated_out_of_memory_does_not_grow_the_worker():
    def resident(pid):
        fields = Path(f"/proc/{pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    pids = []
    for _ in range(4):
        assert doing(exhaust_memory).outcome == "out_of_memory"
        pid = isolation.measuring.worker.process.pid
        pids.append((pid, resident(pid)))
    assert len({pid for pid, _ in pids}) == 1
    assert pids[-1][1] - pids[0][1] < 50 * 2**20


def test_what_cannot_be_sent_is_said_in_the_caller():
    lock = threading.Lock()
    workload = made_of(
        lambda: nn.Linear(3, 3) if lock else None,
        (3,),
        lambda model, x: model(x).mean(),
        name="locked",
    )
    with pytest.raises(MemlabError, match=r"'locked' cannot be sent.*isolate=False"):
        measure(workload, StepConfig(), "cpu")
    assert measure(workload, StepConfig(), "cpu", repeats=1, isolate=False).outcome == "ok"


def test_verify_and_inspect_run_in_the_worker_too():
    assert verify(blocks(), StepConfig(checkpointing="blocks"), "cpu").ok
    facts = inspect_workload(blocks(norm=True, dropout=0.1, depth=2))
    assert facts.sample_mixing_modules == ("0.1", "1.1")
    assert facts.random_modules == ("0.4", "1.4")
    assert facts.blocks == ("0", "1")
    assert facts.num_parameters == 2 * (2 * (32 * 32 + 32) + 64) + 32 * 3 + 3
    assert facts.sample_bytes == 4 * 32 + 8
    known = {"measure", "predict", "plan", "operators", "graph", "verify", "inspect", "loading"}
    in_others = {"layers", "measure_ranks", "verify_ranks"}  # test_exported_layers, test_ranks
    in_others |= {"measure_run", "predict_run"}  # test_whole_runs
    in_others |= {"accumulation", "per_sample"}  # test_accumulation_effect
    in_others |= {"loss"}  # test_several_losses
    in_others |= {"predict_script", "script_step"}  # test_person_script, test_script_step
    assert set(FUNCTIONS) == known | in_others


@pytest.mark.slow
def test_a_workload_that_cannot_be_built_is_said():
    workload = made_of(lambda: 1 / 0, lambda n: torch.ones(n), lambda model, x: x.sum(), name="no")
    with pytest.raises(MemlabError, match=r"'no' cannot be built.*ZeroDivisionError"):
        inspect_workload(workload)


@pytest.mark.slow
def test_the_worker_ends_with_its_caller():
    script = textwrap.dedent(
        """
        import os, torch
        from memlab import StepConfig, measure
        from memlab.runtime import isolation
        from tests.models import linear
        measure(linear(), StepConfig(), "cpu", repeats=1)
        print(isolation.measuring.worker.process.pid, flush=True)
        os._exit(0)  # as a killed kernel does: nothing is tidied up
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=900
    )
    pid = int(done.stdout.split()[-1])
    deadline = time.monotonic() + 120
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_a_run_that_the_end_of_its_kernel_stops_has_not_crashed():
    script = """
import atexit, threading, time
found = []
atexit.register(lambda: (found[0].join(60), print(*found[1:])))  # runs last
from memlab import StepConfig, measure
from tests.worker_parts import doing
started = threading.Event()

def work():
    result = doing(lambda: time.sleep(600), on_progress=lambda _: started.set())
    found.append((str(result.outcome), result.message))

found.append(threading.Thread(target=work, daemon=True))
found[0].start()
started.wait()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert "('cancelled', 'stopped, because its kernel or script ended')" in done.stdout


def test_a_run_inside_a_run_is_refused_rather_than_waited_for():
    said = []

    def again(progress):
        try:
            measure(linear(), StepConfig(), "cpu")
        except MemlabError as error:
            said.append(str(error))

    assert measure(linear(), StepConfig(), "cpu", repeats=1, on_progress=again).outcome == "ok"
    assert "inside it" in said[0]


@pytest.mark.parametrize("isolate", [True, False])
def test_what_on_progress_raises_is_the_callers(isolate):
    def stumble(progress):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        measure(linear(), StepConfig(), "cpu", on_progress=stumble, isolate=isolate)
    assert_worker_is_back()


@pytest.mark.slow
def test_a_worker_killed_while_idle_is_replaced():
    assert_worker_is_back()
    os.kill(isolation.measuring.worker.process.pid, 9)
    assert_worker_is_back()


@pytest.mark.slow
def test_a_forked_child_leaves_the_worker_to_its_parent():
    script = textwrap.dedent(
        """
        import os, sys
        from memlab import StepConfig, measure
        from memlab.runtime import isolation
        from tests.models import linear
        measure(linear(), StepConfig(), "cpu", repeats=1)
        pid = isolation.measuring.worker.process.pid
        child = os.fork()
        if child == 0:
            sys.exit(0)  # with its exit handlers
        os.waitpid(child, 0)
        result = measure(linear(), StepConfig(), "cpu", repeats=1)
        print(result.outcome, isolation.measuring.worker.process.pid == pid)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=900
    )
    assert done.stdout.split()[-2:] == ["ok", "True"]


@pytest.mark.slow
def test_a_switch_that_a_model_turned_is_turned_back_for_the_next():
    assert doing(lambda: torch.set_default_dtype(torch.float64)).outcome
    away = measure(blocks(), StepConfig(), "cpu", repeats=1)
    here = measure(blocks(), StepConfig(), "cpu", repeats=1, isolate=False)
    assert away.peak_by_category == here.peak_by_category


def test_a_crash_that_leaves_a_process_behind_is_noticed():
    def leave_a_child_and_die():
        if os.fork() == 0:
            time.sleep(100)
            os._exit(0)
        os._exit(3)

    started = time.monotonic()
    assert doing(leave_a_child_and_die).outcome == "crashed"
    assert time.monotonic() - started < 75


@pytest.mark.slow
def test_what_an_earlier_job_printed_is_not_taken_for_this_ones():
    assert doing(lambda: os.write(2, b"std::bad_alloc was caught\n")).outcome == "ok"
    assert doing(lambda: os._exit(3)).outcome == "crashed"


def test_a_model_that_asks_is_not_waited_for():
    assert "EOFError" in doing(lambda: input("name? ")).message


@pytest.mark.slow
def test_the_worker_stays_warm_for_a_script_too(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            from memlab import StepConfig, measure
            from memlab.runtime import isolation
            from tests.models import linear
            pids = set()
            for _ in range(2):
                measure(linear(), StepConfig(), "cpu", repeats=1)
                pids.add(isolation.measuring.worker.process.pid)
            print(len(pids))
            """
        )
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, env=env
    )
    assert done.stdout.split()[-1] == "1"


def test_a_config_that_holds_a_function_comes_back_with_it():
    def policy(context, op, *args, **kwargs):
        return op is torch.ops.aten.addmm.default

    config = StepConfig(checkpointing="blocks", checkpoint_policy=policy)
    measured = measure(blocks(), config, "cpu", repeats=1)
    assert measured.outcome == "ok", measured.message
    assert measured.config is config
    assert predict(blocks(), config, "cpu").config is config


@pytest.mark.slow
def test_predictions_see_no_card_and_measurements_see_those_of_the_caller(monkeypatch):
    def build():
        print("cards:", repr(os.environ["CUDA_VISIBLE_DEVICES"]))
        return nn.Linear(3, 3)

    build.__module__ = "__main__"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    workload = made_of(
        build, lambda n: torch.ones(n, 3), lambda model, batch: model(batch).mean(), name="cards"
    )
    for _ in range(2):  # nor does the second one need another worker
        found = predict(workload, StepConfig(), "cpu")
        assert "cards: ''" in found.printed
    assert "cards: '1'" in measure(workload, StepConfig(), "cpu", repeats=1).printed
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.slow
def test_the_environment_is_the_callers(monkeypatch):
    def build():
        return nn.Linear(3, int(os.environ["MODEL_WIDTH"]))

    build.__module__ = "__main__"
    found = []
    for out in ("3", "5"):
        monkeypatch.setenv("MODEL_WIDTH", out)
        found.append(parameters_of(build))
    assert found == [4 * (3 * out + out) for out in (3, 5)]
