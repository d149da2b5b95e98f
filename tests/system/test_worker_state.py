"""What one job does to the worker never reaches the next."""

import copy
import dataclasses
import os
import sys
import time
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from memlab import StepConfig, Workload, measure, predict, workloads
from memlab._util.functions import is_library
from memlab._util.units import GIB
from memlab.runtime import isolation, process
from tests.models import blocks, linear


def building(action):
    """Return a workload whose build_model runs `action` first."""

    def build():
        action()
        return linear().build_model()

    return dataclasses.replace(linear(), name="attack", build_model=build)


def replace_a_layer():
    nn.LayerNorm = nn.RMSNorm


def patch_a_method():
    forward = nn.Linear.forward
    nn.Linear.forward = lambda self, x: forward(self, x) * 2


def patch_a_clock():
    time.perf_counter = lambda: 0.0


def enter_a_mode():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    Mode().__enter__()


def turn_a_switch():
    torch.backends.mkldnn.set_flags(False)


def register_a_hook():
    nn.modules.module.register_module_forward_hook(lambda *_: None)


def keep_tensors():
    torch.kept = [torch.ones(2**23)]


def close_the_output():
    os.close(1)


def patch_what_it_imports():
    import colorsys

    colorsys.rgb_to_hsv = None


def empty_the_modules():
    sys.modules.clear()


def show_warnings_its_own_way():
    warnings.showwarning = lambda *_: None


def show_warnings_as_a_library_does():
    warnings.showwarning = copy.copy  # monai sets its own as it is imported


def open_a_process_group():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )


ATTACKS = [
    open_a_process_group,
    show_warnings_its_own_way,
    replace_a_layer,
    patch_a_method,
    patch_a_clock,
    enter_a_mode,
    turn_a_switch,
    register_a_hook,
    keep_tensors,
    close_the_output,
    patch_what_it_imports,
    empty_the_modules,
]


@pytest.fixture(scope="module", autouse=True)
def own_lane():
    """A worker for these tests alone: a panel closed by a test before may still use its own."""
    lane = isolation.Lane(is_predicting=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolation, "measuring", lane)
        yield
    lane.worker.kill()


def worker_of(lane):
    return lane.worker.process.pid


@pytest.mark.matrix
@pytest.mark.parametrize("action", ATTACKS, ids=lambda action: action.__name__)
def test_a_changed_worker_serves_no_other_run(action):
    first = measure(building(action), StepConfig(), "cpu", repeats=1)
    changed = worker_of(isolation.measuring)
    after = measure(blocks(norm=True), StepConfig(), "cpu", repeats=1)
    here = measure(blocks(norm=True), StepConfig(), "cpu", repeats=1, isolate=False)
    if first.outcome == "ok":  # else it has been replaced already
        assert worker_of(isolation.measuring) != changed
    assert (after.outcome, after.peak_by_category) == ("ok", here.peak_by_category)


def test_a_compiled_step_ends_its_worker_without_a_look_at_what_it_imports():
    measured = measure(linear(), StepConfig(compile=True), "cpu", repeats=1)
    assert measured.outcome == "ok", measured.message
    assert verdict_of(isolation.measuring) == ["what a script or torch.compile has left"]


def test_packages_of_another_environment_are_libraries_too(tmp_path):
    package = tmp_path / "env" / "lib" / "python3" / "site-packages" / "package" / "__init__.py"
    assert is_library(str(package))
    assert not is_library(str(tmp_path / "mine.py"))


def verdict_of(lane):
    """Wait until a worker has said that it serves no other job, and return what was changed."""
    kind, changed = lane.worker.receive(lambda: None)
    assert kind == "stale"
    return changed


@pytest.mark.slow
def test_a_worker_says_what_a_job_changed():
    measure(building(replace_a_layer), StepConfig(), "cpu", repeats=1)
    assert verdict_of(isolation.measuring) == ["torch.nn.LayerNorm"]


@pytest.mark.parametrize("config", [StepConfig(), StepConfig(checkpointing="blocks")])
def test_runs_that_change_nothing_share_a_worker(config):
    measure(linear(), StepConfig(), "cpu", repeats=1)
    worker = worker_of(isolation.measuring)
    for workload in (blocks(), blocks(norm=True), linear()):
        found = measure(workload, config if workload.name != "linear" else StepConfig(), "cpu")
        assert found.outcome == "ok", found.message
        assert worker_of(isolation.measuring) == worker, workload.name


class Doubled(nn.Module):
    """A layer whose weight is parametrized for as long as a forward, as peft does it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(128, 128, bias=False)

    def forward(self, x):
        parametrize.register_parametrization(self.inner, "weight", Twice())
        with parametrize.cached():
            made = self.inner(x)
        parametrize.remove_parametrizations(self.inner, "weight", leave_parametrized=False)
        return made


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_a_worker_holds_no_cache_that_pytorch_has_dropped():
    of = {"build_model": Doubled, "make_batch": lambda n: torch.ones(n, 128)}
    workload = Workload(name="doubled", compute_loss=lambda model, x: model(x).sum(), **of)
    measure(linear(), StepConfig(), "cpu", repeats=1)
    worker = worker_of(isolation.measuring)
    measured = measure(workload, StepConfig(batch_size=4), "cpu", repeats=1)
    # the weight that the first step has doubled, 65,536 bytes, was still there in the second
    assert measured.peak_by_category["buffers"] == 0
    predicted = predict(workload, StepConfig(batch_size=4), "cpu")
    assert abs(predicted.peak_allocated_bytes - measured.peak_allocated_bytes) < 100
    assert worker_of(isolation.measuring) == worker


def test_a_library_that_shows_warnings_its_own_way_keeps_the_worker():
    measure(building(show_warnings_as_a_library_does), StepConfig(), "cpu", repeats=1)
    worker = worker_of(isolation.measuring)
    assert measure(linear(), StepConfig(), "cpu", repeats=1).outcome == "ok"
    assert worker_of(isolation.measuring) == worker


@pytest.mark.slow
def test_predictions_share_a_worker_until_one_changes_it():
    predict(linear(), StepConfig(), "cpu")
    worker = worker_of(isolation.predicting)
    assert predict(blocks(), StepConfig(), "t4").outcome == "ok"
    assert worker_of(isolation.predicting) == worker

    predict(building(replace_a_layer), StepConfig(), "cpu")
    predict(linear(), StepConfig(), "cpu")
    assert worker_of(isolation.predicting) != worker


@pytest.mark.slow
def test_predictions_of_fine_tunings_share_a_worker():
    pytest.importorskip("peft")
    workers = set()
    for base in ("bf16", "int8-weight-only"):
        workload = workloads.finetune("llama-tiny", base=base, tokens=16)
        found = predict(workload, StepConfig(batch_size=1), "rtx-4060")
        assert found.outcome == "ok", found.message
        workers.add(worker_of(isolation.predicting))
    assert len(workers) == 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("4x-h100", marks=pytest.mark.slow)])
def test_predictions_of_ranks_share_a_worker(device):
    predict(linear(), StepConfig(), "cpu")
    worker = worker_of(isolation.predicting)
    two, four = {"world_size": 2}, {"world_size": 4, "batch_size": 4}
    for fields in (
        {"sharding": "ddp", **two},
        {"sharding": "zero1", **two},
        {"sharding": "zero3", "init_on_meta": True, **two},
        {"sharding": "hybrid", "shard_group_size": 2, **four},
        {"sharding": "tensor", **two},
        {"sharding": "zero2", **four},
    ):
        found = predict(linear(), StepConfig(**{"batch_size": 2, **fields}), device)
        assert found.outcome == "ok", found.message
        assert worker_of(isolation.predicting) == worker, fields


@pytest.mark.slow
def test_a_spare_worker_takes_the_place_of_a_changed_one(monkeypatch):
    monkeypatch.setattr(process, "machine_memory_bytes", lambda: 4 * GIB)
    measure(linear(), StepConfig(), "cpu", repeats=1)
    while (spare := isolation.spare.worker) is None:
        time.sleep(0.05)
    measure(building(replace_a_layer), StepConfig(), "cpu", repeats=1)
    measure(linear(), StepConfig(), "cpu", repeats=1)
    assert worker_of(isolation.measuring) == spare.process.pid


@pytest.mark.parametrize(
    ("num_bytes", "is_started"), [(2 * GIB, False), (4 * GIB, True), (None, True)]
)
def test_a_machine_of_little_memory_gets_no_spare_worker(monkeypatch, num_bytes, is_started):
    class Started:
        """Stands for a worker, so that no process is started."""

    monkeypatch.setattr(process, "machine_memory_bytes", lambda: num_bytes)
    monkeypatch.setattr(process, "WorkerProcess", Started)
    replaced = []
    spare = process.Spare(before_start=lambda: replaced.append(True))
    spare._start()
    assert replaced  # a changed worker is replaced all the same
    assert (spare.worker is not None) == is_started


@pytest.mark.parametrize(("num_bytes", "num_workers"), [(2 * GIB, 1), (4 * GIB, 2), (None, 2)])
def test_a_panel_on_little_memory_keeps_one_worker_until_it_measures(
    monkeypatch, num_bytes, num_workers
):
    monkeypatch.setattr(process, "machine_memory_bytes", lambda: num_bytes)
    started = []
    monkeypatch.setattr(isolation, "_ensure", started.extend)
    isolation.prewarm()
    assert set(started) == {*[isolation.predicting, isolation.measuring][:num_workers]}


def test_with_little_memory_the_worker_that_measures_ends_while_nothing_runs(monkeypatch):
    monkeypatch.setattr(process, "machine_memory_bytes", lambda: 2 * GIB)
    monkeypatch.setattr(process, "IDLE_SECONDS", 3600.0)
    monkeypatch.setattr(process, "LITTLE_MEMORY_IDLE_SECONDS", 0.1)
    assert measure(linear(), StepConfig(), "cpu", repeats=1).outcome == "ok"
    while isolation.measuring.worker is not None:
        time.sleep(0.05)
    assert measure(linear(), StepConfig(), "cpu", repeats=1).outcome == "ok"


def test_a_changed_worker_is_replaced_while_nothing_runs():
    measure(building(replace_a_layer), StepConfig(), "cpu", repeats=1)
    changed = isolation.measuring.worker
    while not changed.is_spent():
        time.sleep(0.05)
    isolation.spare.before_start()
    assert isolation.measuring.worker is not changed
    assert not isolation.measuring.worker.is_spent()
