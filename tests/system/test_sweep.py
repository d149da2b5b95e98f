"""Sweeps with real measurements: a killed worker, and machines of dask."""

import os
import signal

import pytest

import memlab
from memlab.runtime import isolation
from tests.models import linear

pytestmark = pytest.mark.slow
QUICK = {"repeats": 1, "warmup": 0}


def test_a_sweep_measures_each_setting_though_its_worker_is_killed(tmp_path):
    path, killed = tmp_path / "results.sqlite3", []

    def kill_once(progress):
        if "batch_size=2" in progress.text and isolation.is_measuring() and not killed:
            killed.append(isolation.measuring.worker.process.pid)
            os.kill(killed[0], signal.SIGKILL)

    configs = {"batch_size": [1, 2, 3]}
    table = memlab.sweep(linear(), configs, "cpu", path=path, on_progress=kill_once, **QUICK)
    assert len(killed) == 1
    assert [str(result.outcome) for result in table] == ["ok", "ok", "ok"]
    peaks = [result.peak_allocated_bytes for result in table]
    assert peaks == sorted(peaks)
    assert all(result.timeline is not None for result in memlab.stored_results(path=path))

    again = memlab.sweep(linear(), configs, "cpu", path=path, **QUICK)
    assert again.num_reused == 3
    assert [result.peak_allocated_bytes for result in again] == peaks
    assert len(memlab.results(path=path)) == 3


def test_measure_writes_what_it_found_and_a_sweep_finds_it(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMLAB_STORE", str(tmp_path / "results.sqlite3"))
    config = memlab.StepConfig(batch_size=2)
    result = memlab.measure(linear(), config, "cpu", **QUICK)
    (found,) = memlab.stored_results(workload=linear())
    assert found.to_dict() == result.to_dict()
    assert memlab.sweep(linear(), [config], "cpu", **QUICK).num_reused == 1

    memlab.measure(linear(), config, "cpu", isolate=False, **QUICK)
    assert len(memlab.results()) == 2  # it is stored, and no sweep uses it


def test_a_machine_of_dask_that_is_lost_loses_nothing(tmp_path):
    distributed = pytest.importorskip("distributed", reason="the extra `sweep` is not installed")
    path, killed = tmp_path / "results.sqlite3", []
    cluster = distributed.LocalCluster(
        host="127.0.0.1", n_workers=2, threads_per_worker=1, dashboard_address=None
    )

    def kill_one(result):
        if not killed:
            killed.append(next(iter(cluster.workers.values())).pid)
            os.kill(killed[0], signal.SIGKILL)

    with cluster, distributed.Client(cluster) as client:
        table = memlab.sweep(
            linear(), {"batch_size": list(range(1, 9))}, "cpu", path=path,
            executor=client.get_executor(), on_result=kill_one, **QUICK,
        )  # fmt: skip

    assert len(killed) == 1
    assert {str(result.outcome) for result in table} == {"ok"}
    assert sorted(memlab.results(path=path)["batch_size"]) == list(range(1, 9))
