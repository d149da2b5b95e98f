"""The worker: whatever a step does to its process is an outcome, and the caller lives on."""

import ctypes
import importlib
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import memlab
from memlab import MemlabError, StepConfig, Workload, measure, predict, verify
from memlab.api import inspect_workload
from memlab.arguments.units import MIB
from memlab.devices.processes import resident_bytes
from memlab.running import Progress
from memlab.worker import isolation
from memlab.worker.process import WorkerProcess
from memlab.worker.serving import FUNCTIONS
from memlab.worker.wire import HEADER, MAGIC, Channel
from tests import ROOT
from tests.models import blocks, linear

BATCH = (torch.randn(4, 3), torch.randn(4, 3))


def doing(action, **options):
    """Measure a model whose forward runs `action` first."""

    class Acts(nn.Linear):
        def forward(self, x):
            action()
            return super().forward(x)

    workload = Workload.from_module(Acts(3, 3), BATCH, nn.functional.mse_loss)
    return measure(workload, StepConfig(), "cpu", repeats=1, **options)


def assert_worker_is_back():
    result = measure(linear(), StepConfig(), "cpu", repeats=1)
    assert result.outcome == "ok", result.message


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
        (segfault, "crashed", "SIGSEGV"),
        (kill_itself, "crashed", "SIGKILL"),
        (exhaust_memory, "out_of_memory", "allocate"),
        (lambda: 1 / 0, "failed", "ZeroDivisionError"),
        (lambda: sys.exit(2), "failed", "SystemExit: 2"),
    ],
)
def test_every_end_is_an_outcome_with_a_sentence(action, outcome, said):
    result = doing(action)
    assert (result.outcome, said in result.message) == (outcome, True), result.message
    assert result.config == StepConfig()
    assert_worker_is_back()


def test_a_crash_says_where_in_the_persons_code():
    assert "in segfault" in doing(segfault).message


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


def test_two_measurements_take_turns():
    results = []
    threads = [
        threading.Thread(
            target=lambda: results.append(measure(linear(), StepConfig(), "cpu", repeats=1))
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [result.outcome for result in results] == ["ok"] * 3


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


def test_a_module_that_was_edited_is_read_anew(tmp_path, monkeypatch):
    source = "from torch import nn\ndef build():\n    return nn.Linear(3, {out})\n"
    file = tmp_path / "persons_model.py"
    file.write_text(source.format(out=3))
    monkeypatch.syspath_prepend(tmp_path)
    import persons_model

    def parameters():
        workload = Workload(
            name="mine",
            build_model=persons_model.build,
            make_batch=lambda n: torch.randn(n, 3),
            compute_loss=lambda model, x: model(x).mean(),
        )
        return measure(workload, StepConfig(), "cpu", repeats=1).peak_by_category["parameters"]

    assert parameters() == 4 * (3 * 3 + 3)
    file.write_text(source.format(out=5))  # edited, and not reloaded here
    assert parameters() == 4 * (3 * 5 + 5)


def test_a_module_that_does_not_import_is_an_outcome(tmp_path, monkeypatch):
    file = tmp_path / "broken_model.py"
    file.write_text("from torch import nn\ndef build():\n    return nn.Linear(3, 3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    import broken_model

    file.write_text("this is no python\n")
    workload = Workload(
        name="mine",
        build_model=broken_model.build,
        make_batch=lambda n: torch.randn(n, 3),
        compute_loss=lambda model, x: model(x).mean(),
    )
    result = measure(workload, StepConfig(), "cpu", repeats=1)
    assert result.outcome == "failed"
    assert "SyntaxError" in result.message


def test_what_cannot_be_sent_is_said_in_the_caller():
    lock = threading.Lock()
    workload = Workload(
        name="locked",
        build_model=lambda: nn.Linear(3, 3) if lock else None,
        make_batch=lambda n: torch.randn(n, 3),
        compute_loss=lambda model, x: model(x).mean(),
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
    known = {"measure", "predict", "plan", "operators", "verify", "inspect", "loading"}
    assert set(FUNCTIONS) == known


def test_a_workload_that_cannot_be_built_is_said():
    workload = Workload(
        name="no",
        build_model=lambda: 1 / 0,
        make_batch=lambda n: torch.ones(n),
        compute_loss=lambda model, x: x.sum(),
    )
    with pytest.raises(MemlabError, match=r"'no' cannot be built.*ZeroDivisionError"):
        inspect_workload(workload)


def test_the_worker_ends_with_its_caller():
    script = textwrap.dedent(
        """
        import os, torch
        from memlab import StepConfig, measure
        from memlab.worker import isolation
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


def test_a_run_inside_a_run_is_refused_rather_than_waited_for():
    said = []

    def again(progress):
        try:
            measure(linear(), StepConfig(), "cpu")
        except MemlabError as error:
            said.append(str(error))

    assert measure(linear(), StepConfig(), "cpu", repeats=1, on_progress=again).outcome == "ok"
    assert "inside it" in said[0]


def test_runs_in_this_process_take_turns_too():
    outcomes = []

    def run():
        outcomes.append(measure(linear(), StepConfig(), "cpu", repeats=1, isolate=False).outcome)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert outcomes == ["ok"] * 3


@pytest.mark.parametrize("isolate", [True, False])
def test_what_on_progress_raises_is_the_callers(isolate):
    def stumble(progress):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        measure(linear(), StepConfig(), "cpu", on_progress=stumble, isolate=isolate)
    assert_worker_is_back()


def test_a_worker_killed_while_idle_is_replaced():
    assert_worker_is_back()
    os.kill(isolation.measuring.worker.process.pid, 9)
    assert_worker_is_back()


def test_a_forked_child_leaves_the_worker_to_its_parent():
    script = textwrap.dedent(
        """
        import os, sys
        from memlab import StepConfig, measure
        from memlab.worker import isolation
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


def test_what_an_earlier_job_printed_is_not_taken_for_this_ones():
    assert doing(lambda: os.write(2, b"std::bad_alloc was caught\n")).outcome == "ok"
    assert doing(lambda: os._exit(3)).outcome == "crashed"


def test_a_model_that_asks_is_not_waited_for():
    assert "EOFError" in doing(lambda: input("name? ")).message


def test_the_callers_folder_does_not_shadow_pythons_own_modules(tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise SystemExit('not the real one')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)  # one with "." in it is a person's own choice
    isolation.measuring.replace()
    assert_worker_is_back()


def persons_module(folder, out):
    folder.mkdir(exist_ok=True)
    file = folder / "twice_named.py"
    file.write_text(f"from torch import nn\ndef build():\n    return nn.Linear(3, {out})\n")
    return file


def parameters_of(build):
    workload = Workload(
        name="mine",
        build_model=build,
        make_batch=lambda n: torch.randn(n, 3),
        compute_loss=lambda model, x: model(x).mean(),
    )
    result = measure(workload, StepConfig(), "cpu", repeats=1)
    assert result.outcome == "ok", result.message
    return result.peak_by_category["parameters"]


def test_a_module_of_the_same_name_elsewhere_is_not_mistaken(tmp_path, monkeypatch):
    found = []
    for name, out in (("one", 3), ("other", 5)):
        file = persons_module(tmp_path / name, out)
        monkeypatch.syspath_prepend(file.parent)
        sys.modules.pop("twice_named", None)
        import twice_named

        found.append(parameters_of(twice_named.build))
    assert found == [4 * (3 * 3 + 3), 4 * (3 * 5 + 5)]


def test_a_file_that_is_replaced_by_one_with_an_old_date_is_read_anew(tmp_path, monkeypatch):
    file = persons_module(tmp_path / "dated", 3)
    monkeypatch.syspath_prepend(file.parent)
    sys.modules.pop("twice_named", None)
    import twice_named

    found = []
    for out in (3, 5, 7):
        persons_module(file.parent, out)
        os.utime(file, (1_700_000_000, 1_700_000_000))  # as cp -p and rsync do
        found.append(parameters_of(twice_named.build))
    assert found == [4 * (3 * out + out) for out in (3, 5, 7)]


def test_the_worker_stays_warm_for_a_script_too(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            from memlab import StepConfig, isolation, measure
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


# whatever a model does to its process: the next result is still the next question's


def fork_in_c():
    ctypes.CDLL(None).fork()  # no handler of Python's runs in the child


def fork_in_a_library():
    child = multiprocessing.get_context("fork").Process(target=os.getpid)
    child.start()
    child.join()


def answer_twice():
    content = pickle.dumps(("result", "of nobody's question"))
    os.write(worker_socket(), HEADER.pack(MAGIC, 0, len(content)) + content)


def worker_socket():
    """Return the descriptor that the worker answers on."""
    sockets = [
        int(name)
        for name in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{name}")
        and stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode)
    ]
    assert len(sockets) == 1
    return sockets[0]


@pytest.mark.parametrize(
    "action",
    [os.fork, os.forkpty, fork_in_c, fork_in_a_library, answer_twice],
    ids=lambda action: action.__name__,
)
def test_each_result_is_that_of_its_own_question(action):
    assert doing(action).outcome == "ok"
    for batch_size in (1, 2, 3):
        result = measure(linear(), StepConfig(batch_size=batch_size), "cpu", repeats=1)
        here = measure(linear(), StepConfig(batch_size=batch_size), "cpu", repeats=1, isolate=False)
        assert result.peak_by_category == here.peak_by_category
        assert result.workload_name == "linear"


def write_to_the_socket(content):
    return lambda: os.write(worker_socket(), content)


def close_all():
    os.closerange(3, 4096)


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (
            write_to_the_socket(struct.pack("!i", 1000)),
            "cannot be read",
        ),  # only a header, elsewhere
        (close_all, "socket was closed"),
        (lambda: os.kill(os.getppid(), 9), "SIGKILL"),  # of what keeps the worker
    ],
)
def test_whatever_a_model_does_to_the_line_is_an_outcome(action, said):
    result = doing(action)
    assert (result.outcome, said in result.message) == ("crashed", True), result.message


def test_a_header_without_a_body_ends_with_the_time_limit():
    result = doing(write_to_the_socket(HEADER.pack(MAGIC, 1, 10**6)), timeout_seconds=5)
    assert result.outcome == "timed_out"
    assert_worker_is_back()


@pytest.mark.parametrize(
    "other",
    [(blocks(), StepConfig()), (linear(), StepConfig(optimizer="sgd"))],
    ids=["workload", "config"],
)
def test_an_answer_to_another_question_is_not_taken(monkeypatch, other):
    answer = measure(*other, "cpu", repeats=1, isolate=False)
    monkeypatch.setattr(isolation, "run", lambda *_, **__: answer)
    result = measure(linear(), StepConfig(), "cpu")
    assert (result.outcome, result.config) == ("crashed", StepConfig())
    assert "another question" in result.message


class FakeProcess:
    """A worker that has ended, or not."""

    def poll(self):
        return None


@pytest.fixture
def line():
    """A worker as its caller holds it, and the channel at its other end."""
    ours, theirs = socket.socketpair()
    worker = object.__new__(WorkerProcess)
    worker.process, worker.channel = FakeProcess(), Channel(ours, blocks=False)
    worker.number, worker.doing = 7, "testing"
    yield worker, Channel(theirs, blocks=True)
    ours.close()
    theirs.close()


def test_messages_of_other_jobs_are_not_heard(line):
    worker, end = line
    for number in (6, 8, 0, 7, 7):  # the last is a second answer
        end.send(number, pickle.dumps(("result", number)))
    assert worker.receive(lambda: None) == ("result", 7)
    worker.number = 9
    end.send(9, pickle.dumps(("result", 9)))
    assert worker.receive(lambda: None) == ("result", 9)


class Unreadable:
    def __reduce__(self):
        return (int, ("no number",))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no!",
        bytes(range(100, 200)),
        pickle.dumps(Unreadable()),
        pickle.dumps(("result", 1, 2)),
        pickle.dumps(("unheard of", 1)),
        pickle.dumps(([], 1)),
        pickle.dumps(("progress", "no progress")),
        pickle.dumps(Progress(text="x", fraction=0)),
        pickle.dumps(None),
    ],
    ids=range(10),
)
def test_what_cannot_be_read_is_a_crash_with_a_sentence(line, content):
    worker, end = line
    end.send(7, content)
    with pytest.raises(isolation.Ended, match="while testing cannot be read") as ended:
        worker.receive(lambda: None)
    assert ended.value.outcome == "crashed"


def test_a_large_workload_can_be_stopped_while_it_is_sent():
    held = torch.zeros(2**26)  # 256 MiB
    workload = Workload(
        name="large",
        build_model=lambda: nn.Linear(held.shape[0] // 2**24, 1),
        make_batch=lambda n: torch.randn(n, 4),
        compute_loss=lambda model, x: model(x).mean(),
    )
    assert_worker_is_back()
    former = isolation.measuring.worker
    os.kill(former.process.pid, signal.SIGSTOP)  # it reads nothing any more
    cancel = threading.Event()
    stop = threading.Timer(0.5, cancel.set)
    stop.start()
    result = measure(workload, StepConfig(), "cpu", cancel=cancel)
    assert (result.outcome, result.message) == ("cancelled", "stopped while taking the job")

    isolation.measuring.worker.receive(lambda: None)  # it is ready
    isolation.measuring.worker.doing = "idle"
    os.kill(isolation.measuring.worker.process.pid, signal.SIGSTOP)
    result = measure(workload, StepConfig(), "cpu", timeout_seconds=0.5)
    assert (result.outcome, "taking the job" in result.message) == ("timed_out", True)
    assert former.has_ended()
    assert_worker_is_back()


def print_without_end():
    for _ in range(64):
        os.write(1, b"x" * MIB)
    os.abort()


def test_what_a_model_prints_has_a_bound():
    assert_worker_is_back()
    before = resident_bytes()
    result = doing(print_without_end)
    assert (result.outcome, "in print_without_end" in result.message) == ("crashed", True)
    assert resident_bytes() - before < 16 * MIB

    output = Path(f"/proc/{isolation.measuring.worker.process.pid}/fd/1")
    assert wait_until(output.is_fifo)  # no file that would grow


def wait_until(state):
    deadline = time.monotonic() + 20
    while not (found := state()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def test_files_named_as_pythons_own_modules_beside_memlab_do_no_harm(tmp_path):
    clone = tmp_path / "a:clone"
    shutil.copytree(Path(memlab.__file__).parent, clone / "memlab")
    script = textwrap.dedent(
        f"""
        import os, pathlib, sys
        sys.path.insert(0, {str(clone)!r})
        import cloudpickle
        import memlab
        import memlab.predicting.predict
        from memlab import StepConfig, measure, predict, workloads
        assert memlab.__file__.startswith({str(clone)!r})
        def outcomes():
            workload = workloads.get("gpt-small", num_layers=1, hidden_size=32)
            for function in (measure, predict):
                result = function(workload, StepConfig(batch_size=1), "cpu")
                print(result.outcome, result.message)
        for name in sys.stdlib_module_names - set(sys.modules):
            pathlib.Path({str(clone)!r}, name + ".py").write_text("raise SystemExit(__file__)")
        for name in ("random", "types", "socket", "queue", "json", "ctypes"):
            pathlib.Path({str(clone)!r}, name + ".py").write_text("raise SystemExit(__file__)")
        os.environ["PYTHONPATH"] = {str(clone)!r}  # since the start of this process
        os.environ["PYTHONHOME"] = "/nowhere"
        os.chdir({str(clone)!r})
        sys.path.insert(0, "")
        outcomes()
        """
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, env=environment
    )
    outcomes = [line.split()[0] for line in done.stdout.splitlines()]
    assert outcomes == ["ok", "ok"], done.stdout + done.stderr


def own_module(folder, monkeypatch, source, name):
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(folder)
    sys.modules.pop(name, None)
    return importlib.import_module(name)


def test_what_a_notebook_sets_on_an_own_module_is_measured(tmp_path, monkeypatch):
    source = """
        from types import SimpleNamespace
        from torch import nn
        WIDTH = 3
        SIZES = {"more": 0}
        CONFIG = SimpleNamespace(width=0)
        def more():
            return 0
        class Model(nn.Linear):
            width = 0
        def build():
            width = WIDTH + SIZES["more"] + CONFIG.width + more() + Model.width
            return Model(3, width)
    """
    module = own_module(tmp_path, monkeypatch, source, "set_from_outside")
    found = [parameters_of(module.build)]
    module.WIDTH = 4
    found.append(parameters_of(module.build))
    module.Model.width = 1
    found.append(parameters_of(module.build))
    module.SIZES["more"] = 1
    found.append(parameters_of(module.build))
    module.CONFIG.width = 1
    found.append(parameters_of(module.build))
    module.more = eval("lambda: 1", {"__name__": "__main__"})
    found.append(parameters_of(module.build))
    module.WIDTH = 3
    found.append(parameters_of(module.build))
    assert found == [4 * (3 * out + out) for out in (3, 4, 5, 6, 7, 8, 7)]


def test_data_that_an_own_module_read_as_it_was_imported_is_read_anew(tmp_path, monkeypatch):
    data = tmp_path / "width.json"
    data.write_text("3")
    source = f"""
        import json
        from pathlib import Path
        from torch import nn
        WIDTHS = [nn.Identity(), json.loads(Path({str(data)!r}).read_text())]
        def build():
            return nn.Linear(3, WIDTHS[1])
    """
    module = own_module(tmp_path, monkeypatch, source, "reads_data")
    found = [parameters_of(module.build)]
    data.write_text("5")
    found.append(parameters_of(module.build))
    assert found == [4 * (3 * out + out) for out in (3, 5)]


def test_another_path_finds_another_module(tmp_path, monkeypatch):
    def build():
        import found_on_the_path

        return found_on_the_path.build()

    build.__module__ = "__main__"  # sent by value, as what a notebook defines
    found = []
    for name, out in (("one", 3), ("other", 5)):
        folder = tmp_path / name
        folder.mkdir()
        source = f"from torch import nn\ndef build():\n    return nn.Linear(3, {out})\n"
        (folder / "found_on_the_path.py").write_text(source)
        monkeypatch.syspath_prepend(folder)
        found.append(parameters_of(build))
    assert found == [4 * (3 * out + out) for out in (3, 5)]


def test_the_environment_is_the_callers(monkeypatch):
    def build():
        return nn.Linear(3, int(os.environ["MODEL_WIDTH"]))

    build.__module__ = "__main__"
    found = []
    for out in ("3", "5"):
        monkeypatch.setenv("MODEL_WIDTH", out)
        found.append(parameters_of(build))
    assert found == [4 * (3 * out + out) for out in (3, 5)]
