"""Sweeps: each setting once, whatever is killed, refused, paused or broken."""

import contextlib
import functools
import os
import platform
import queue
import random
import re
import signal
import sqlite3
import threading
import time
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime

import pytest

import memlab
from memlab import MemlabError, StepConfig
from memlab.errors import ConfigError, DeviceError, StoreError
from memlab.search import sweep as sweep_tasks
from memlab.store import database
from memlab.store.database import claim, owner, release
from tests.store_parts import Forked, a_result
from tests.sweep_parts import CRASH, WORKLOAD, Runs, once, sizes


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.sqlite3"


@pytest.fixture
def runs(monkeypatch, tmp_path):
    made = Runs(tmp_path / "runs.txt")
    monkeypatch.setattr(sweep_tasks, "measure_only", made.measure)
    monkeypatch.setenv("MEMLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sweep_tasks, "ASK_SECONDS", 0.01)
    return made


def swept(path, configs, **options):
    return memlab.sweep(WORKLOAD, configs, "cpu", path=path, **options)


def stored(path) -> list[int]:
    return sorted(result.config.batch_size for result in memlab.stored_results(path=path))


# each setting once


def test_each_setting_runs_once_and_is_written_before_it_is_shown(path, runs):
    shown, said = [], []

    def show(result):
        assert stored(path)[-1] == result.config.batch_size
        shown.append(result.config.batch_size)

    table = swept(path, sizes(5), on_result=show, on_progress=said.append)
    assert [progress.fraction for progress in said] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert said[0].text == "1 of 5 settings have ended; batch_size=1: ok"
    assert shown == [result.config.batch_size for result in table] == [1, 2, 3, 4, 5]
    assert runs.ended() == once(5)
    assert table.num_reused == 0
    assert str(table) == "sweep of 5 settings: 5 ok."


def test_what_is_in_the_store_is_not_run_again(path, runs):
    swept(path, sizes(3))
    table = swept(path, sizes(5))
    assert table.num_reused == 3
    assert [result.peak_allocated_bytes for result in table] == [1, 2, 3, 4, 5]
    assert runs.ended() == once(5)
    assert stored(path) == [1, 2, 3, 4, 5]
    table = swept(path, [StepConfig(batch_size=6), StepConfig(batch_size=6)])
    assert [result.config.batch_size for result in table] == [6, 6]
    assert runs.ended() == once(6)  # a setting that is named twice runs once


def test_another_seed_limit_workload_or_device_is_another_setting(path, runs):
    swept(path, sizes(1))
    swept(path, sizes(1), seed=1)
    swept(path, sizes(1), memory_limit="1GiB")
    swept(path, sizes(1), repeats=2)
    other = replace(WORKLOAD, make_batch=lambda n: 2)
    table = memlab.sweep(other, sizes(1), "cpu", path=path)
    assert runs.ended() == {1: 5}
    assert "4 results of another workload named 'stand-in'" in table.notes[0]


def test_what_measure_has_stored_counts(path, runs, monkeypatch):
    monkeypatch.setenv("MEMLAB_STORE", str(path))
    monkeypatch.setattr("memlab.api.measure_only", runs.measure)
    memlab.measure(WORKLOAD, StepConfig(batch_size=1), "cpu")
    assert memlab.sweep(WORKLOAD, sizes(2), "cpu").num_reused == 1
    assert runs.ended() == once(2)


# killed


def test_a_setting_whose_worker_was_killed_is_run_again(path, runs):
    random.seed(0)
    killed = set(random.sample(range(1, 31), 20))
    runs.doing = lambda size: CRASH if size in killed and runs.begun()[size] == 1 else None

    table = swept(path, sizes(30))
    assert {str(result.outcome) for result in table} == {"ok"}
    assert stored(path) == list(range(1, 31))
    assert all(runs.begun()[size] == 1 + (size in killed) for size in range(1, 31))


def test_a_setting_that_always_crashes_ends_after_three_times_and_stops_nothing(path, runs):
    runs.doing = lambda size: CRASH if size == 1 else None
    table = swept(path, sizes(2))
    assert [str(result.outcome) for result in table] == ["crashed", "ok"]
    assert runs.begun() == {1: 3, 2: 1}
    swept(path, sizes(2))  # a later sweep tries it again
    assert runs.begun() == {1: 6, 2: 1}


@pytest.mark.parametrize("seed", range(3))
def test_a_sweep_that_is_killed_twice_runs_no_finished_setting_again(path, runs, seed):
    count, drawn = 40, random.Random(seed)
    runs.doing = lambda size: time.sleep(0.002)
    finished: list[set[int]] = []
    for _ in range(2):
        process = Forked(functools.partial(swept, path, sizes(count)))
        target = sum(runs.begun().values()) + drawn.randint(3, 12)
        while sum(runs.begun().values()) < target:
            time.sleep(0.0005)
        process.kill()
        finished.append(set(stored(path)))

    begun = runs.begun()
    table = swept(path, sizes(count))
    assert stored(path) == list(range(1, count + 1))  # none is lost, none is there twice
    assert all(runs.begun()[size] == begun[size] for size in finished[-1])
    assert sum(runs.begun().values()) <= count + 2
    assert table.num_reused == len(finished[-1])


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_sweep_that_is_killed_while_it_writes_loses_its_claim(path, runs, monkeypatch, when):
    write = database.insert

    def killed(connection, run):
        if when == "after":
            write(connection, run)  # the row is there, and its transaction has not ended
        os.kill(os.getpid(), signal.SIGKILL)

    def sweep_until_killed():
        with monkeypatch.context() as patch:
            swept(path, sizes(3))
            patch.setattr(database, "insert", killed)
            swept(path, sizes(6))

    assert Forked(sweep_until_killed).wait() == -signal.SIGKILL
    assert stored(path) == [1, 2, 3]
    assert len(list(path.parent.glob("*.lock"))) == 1
    swept(path, sizes(6))
    assert list(path.parent.glob("*.lock")) == []
    assert stored(path) == [1, 2, 3, 4, 5, 6]
    assert runs.begun() == {**once(6), 4: 2}  # the one whose result was not written
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("SELECT count(*) FROM claim").fetchone() == (0,)


# two at once


def test_two_sweeps_at_once_share_the_settings(path, runs):
    runs.doing = lambda size: time.sleep(0.002)
    both = [Forked(functools.partial(swept, path, sizes(30))) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert runs.ended() == once(30)
    assert stored(path) == list(range(1, 31))


def test_a_claim_holds_as_long_as_its_owner_lives(path):
    with owner(path) as one, owner(path) as other:
        assert claim(path, "setting", one, 1.0).owner == one
        assert claim(path, "setting", one, 1.0).owner == one
        assert claim(path, "setting", other, 1.0).owner == one
        release(path, "setting", other)  # it is not its own
        assert claim(path, "setting", other, 1.0).owner == one
        release(path, "setting", one)
        assert claim(path, "setting", other, 1.0).owner == other
    with owner(path) as third:
        assert claim(path, "setting", third, 1.0).owner == third
    assert list(path.parent.glob("*.lock")) == []


def test_one_measurement_at_a_time_runs_on_a_machine(path, runs):
    at_work, most = [0], [0]

    def work(size):
        at_work[0] += 1
        most[0] = max(most[0], at_work[0])
        time.sleep(0.005)
        at_work[0] -= 1

    runs.doing = work
    with ThreadPoolExecutor(4) as executor:
        swept(path, sizes(8), executor=executor)
    assert runs.ended() == once(8)
    assert most == [1]


def test_without_a_folder_for_the_lock_a_note_says_so(path, runs, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("MEMLAB_CACHE", str(tmp_path / "file"))
    (result,) = swept(path, sizes(1))
    assert "Another sweep may have measured at the same time" in result.notes[0]


# what is asked for


def test_a_dict_of_lists_is_all_combinations_of_the_base(path, runs):
    configs = {"precision": ["fp32", "bf16-mixed"], "batch_size": [1, 2]}
    table = swept(path, configs, base=StepConfig(optimizer="sgd"))
    frame = table.frame()
    assert list(frame["batch_size"]) == [1, 2, 1, 2]
    assert list(frame["precision"]) == ["fp32", "fp32", "bf16-mixed", "bf16-mixed"]
    assert set(frame["optimizer"]) == {"sgd"}
    assert table.varied == ["batch_size", "precision"]
    assert "bf16-mixed" in table._repr_html_()


def test_a_combination_that_is_not_allowed_is_a_row_with_the_reason(path, runs):
    table = swept(path, {"batch_size": [1, 4], "accumulation_steps": [1, 2]})
    frame = table.frame()
    assert list(frame["outcome"]) == ["ok", "unsupported", "ok", "ok"]
    assert list(frame["accumulation_steps"]) == [1, 2, 1, 2]
    assert "accumulation_steps=2 is more than batch_size=1" in frame["message"][1]
    assert len(table.results) == 3
    assert str(table) == "sweep of 4 settings: 3 ok, 1 unsupported."
    before = runs.begun()
    nothing = swept(path, {"batch_size": [1], "accumulation_steps": [2, 3]})
    assert list(nothing.frame()["outcome"]) == ["unsupported"] * 2
    assert runs.begun() == before


def test_a_config_that_the_step_refuses_is_a_row(path, runs):
    def refuse(size):
        if size == 1:
            raise ConfigError("checkpoint_policy names no operator")

    runs.doing = refuse
    table = swept(path, sizes(2))
    assert [str(result.outcome) for result in table] == ["unsupported", "ok"]


@pytest.mark.parametrize(
    ("configs", "said"),
    [
        ({"batchsize": [1]}, "configs name 'batchsize'; allowed is a field of StepConfig"),
        ({"precision": ["fp32", "bf17"]}, "precision='bf17' is unknown"),
        ({"batch_size": 8}, r"is not a list; allowed is a list: \{'batch_size': \[8\]\}"),
        ({"precision": "fp32"}, "is not a list"),
        ({"batch_size": []}, "holds no value"),
        ([], "holds no setting"),
        ([3], r"configs\[0\]=3 is not a StepConfig"),
        (StepConfig(), "is not a list"),
        ({"batch_size": range(1, 2000), "loss_chunks": range(1, 2000)}, "combinations"),
    ],
)
def test_what_can_be_known_before_anything_runs_is_an_error(path, runs, configs, said):
    with pytest.raises(MemlabError, match=said):
        swept(path, configs)
    assert runs.begun() == {}
    with pytest.raises(MemlabError, match="leave base out"):
        swept(path, [StepConfig()], base=StepConfig())


def test_a_card_that_is_not_here_is_predicted_and_an_unknown_one_is_refused(
    path, runs, monkeypatch
):
    asked = []

    def predict(workload, config, device, **options):
        asked.append(device)
        return a_result(config=config, source="predicted", device=device)

    monkeypatch.setattr(sweep_tasks, "predict", predict)
    table = memlab.sweep(WORKLOAD, sizes(2), "t4", path=path)
    assert {str(result.source) for result in table} == {"predicted"}
    assert memlab.sweep(WORKLOAD, sizes(2), "T4", path=path).num_reused == 2
    assert asked == ["t4", "t4"]
    with pytest.raises(DeviceError, match="is not a card that memlab knows"):
        memlab.sweep(WORKLOAD, sizes(2), "gpu9000", path=path)


# pause, stop, failures


def test_what_measure_has_stored_is_never_deleted(path, runs, monkeypatch):
    monkeypatch.setenv("MEMLAB_STORE", str(path))
    monkeypatch.setattr("memlab.api.measure_only", runs.measure)
    runs.doing = lambda size: {"outcome": "failed", "message": "stored by measure"}
    memlab.measure(WORKLOAD, StepConfig(batch_size=1), "cpu")
    runs.doing = lambda size: None
    assert memlab.sweep(WORKLOAD, sizes(1), "cpu").num_reused == 0
    assert list(memlab.results(path=path)["outcome"]) == ["failed", "ok"]


@pytest.mark.parametrize("outcome", ["failed", "unsupported", "crashed"])
def test_what_may_have_had_a_cause_elsewhere_is_run_again_by_the_next_sweep(path, runs, outcome):
    runs.doing = lambda size: {"outcome": outcome, "message": "no such file, or package"}
    swept(path, sizes(1))
    runs.doing = lambda size: None
    (result,) = swept(path, sizes(1))
    assert result.outcome == "ok"
    assert stored(path) == [1]  # it has replaced the earlier one
    swept(path, sizes(1))
    assert runs.ended() == {1: 4 if outcome == "crashed" else 2}


def test_out_of_memory_stays_and_what_took_too_long_is_run_again_with_more_time_only(path, runs):
    runs.doing = lambda size: {"outcome": "out_of_memory", "message": "above the limit"}
    swept(path, [StepConfig(batch_size=2)])
    assert swept(path, [StepConfig(batch_size=2)]).num_reused == 1
    runs.doing = lambda size: {"outcome": "timed_out", "message": "not finished"}
    swept(path, sizes(1), timeout_seconds=5)
    swept(path, sizes(1), timeout_seconds=5)
    assert runs.ended() == {1: 1, 2: 1}
    swept(path, sizes(1), timeout_seconds=6)
    assert runs.ended() == {1: 2, 2: 1}


def test_a_sweep_that_is_stopped_keeps_what_it_has_and_goes_on_later(path, runs):
    cancel = threading.Event()
    runs.doing = lambda size: cancel.set() if size == 2 else None
    table = swept(path, sizes(4), cancel=cancel)
    assert [str(result.outcome) for result in table] == ["ok", "ok", "cancelled", "cancelled"]
    assert "call sweep again" in table.results[-1].message
    assert stored(path) == [1, 2]
    assert swept(path, sizes(4)).num_reused == 2
    assert runs.ended() == once(4)


@pytest.mark.parametrize("threads", [0, 2])
def test_a_sweep_that_is_paused_begins_nothing_until_it_goes_on(path, runs, threads):
    pause, is_paused = threading.Event(), threading.Event()

    def pause_at_two(size):
        if size == 2 and not is_paused.is_set():
            pause.set()
            is_paused.set()

    runs.doing = pause_at_two
    pool = ThreadPoolExecutor(threads) if threads else contextlib.nullcontext()
    with pool as executor, ThreadPoolExecutor(1) as aside:
        job = aside.submit(swept, path, sizes(60), pause=pause, executor=executor)
        assert is_paused.wait(60)
        while not is_quiet(runs):
            time.sleep(0.01)
        assert sum(runs.ended().values()) < 60
        pause.clear()
        assert len(job.result(600)) == 60
    assert runs.ended() == once(60)


def test_pauses_are_no_tries(path, runs):
    pause = threading.Event()
    executor = Unhurried()
    runs.doing = lambda size: CRASH if runs.begun()[size] < sweep_tasks.MOST_TRIES else None

    def pause_and_go_on(progress):  # what was handed over is taken back each time
        if "handed to" in progress.text and executor.num_handed <= 5:
            pause.set()
            threading.Timer(0.1, pause.clear).start()

    table = swept(path, sizes(1), executor=executor, pause=pause, on_progress=pause_and_go_on)
    assert executor.num_handed > 5
    assert runs.begun() == {1: sweep_tasks.MOST_TRIES}
    assert [str(result.outcome) for result in table] == ["ok"]


class Unhurried(Executor):
    """Begins nothing of the first five that it is handed, and runs the others at once."""

    def __init__(self):
        self.num_handed = 0

    def submit(self, function, *arguments):
        self.num_handed += 1
        future = Future()
        if self.num_handed > 5:
            future.set_result(function(*arguments))
        return future


def test_a_paused_sweep_leaves_what_it_does_not_run_to_others(path, runs, monkeypatch):
    monkeypatch.setattr(sweep_tasks, "turn", lambda *_: contextlib.nullcontext(""))
    pause, may_end, said = threading.Event(), threading.Event(), queue.Queue()

    def hold_the_first(size):
        if size == 1:
            until(lambda: num_claims(path) == 4)
            pause.set()
            assert may_end.wait(60)

    runs.doing = hold_the_first
    with ThreadPoolExecutor(1) as executor, ThreadPoolExecutor(2) as aside:
        first = aside.submit(swept, path, sizes(4), pause=pause, executor=executor)
        try:
            until(lambda: pause.is_set() and num_claims(path) == 1)
            second = aside.submit(swept, path, sizes(4), on_progress=said.put)
            until(lambda: stored(path) == [2, 3, 4])
            *_, last = [said.get(timeout=60).text for _ in range(4)]
            time.sleep(0.2)
            assert said.empty()  # it is said once
        finally:
            may_end.set()
            pause.clear()
        assert [each.result(60).num_reused for each in (first, second)] == [3, 1]

    machine = re.sub(r"[^\w.-]", "_", platform.node())
    assert last.startswith(
        "3 of 4 settings have ended; waiting for another sweep, which has claimed 1 of them: "
        f"batch_size=1 is claimed by {machine}-process-{os.getpid()}-"
    )
    since = datetime.strptime(last.rpartition(" since ")[2], "%Y-%m-%d %H:%M:%S")
    assert 0 <= (datetime.now() - since).total_seconds() < 600
    assert runs.ended() == once(4)


def until(is_so) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def num_claims(path) -> int:
    if not path.exists():
        return 0
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT count(*) FROM claim").fetchone()[0]


def is_quiet(runs) -> bool:
    before = runs.begun()
    time.sleep(0.3)
    return runs.begun() == before == runs.ended()


def test_an_interrupted_cell_leaves_no_claim_behind(path, runs):
    def interrupt(size):
        if size == 2:
            raise KeyboardInterrupt

    runs.doing = interrupt
    with pytest.raises(KeyboardInterrupt):
        swept(path, sizes(3))
    assert stored(path) == [1]
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM claim").fetchone() == (0,)


def test_a_store_that_cannot_be_used_is_an_error_before_anything_runs(path, runs):
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(StoreError, match="move it away"):
        swept(path, sizes(2))
    assert runs.begun() == {}


def test_results_that_cannot_be_written_are_returned_with_a_note(path, runs, monkeypatch):
    finish = sweep_tasks.finish

    def full(*arguments):
        raise StoreError("the disk is full")

    monkeypatch.setattr(sweep_tasks, "finish", full)
    table = swept(path, sizes(2))
    assert [result.peak_allocated_bytes for result in table] == [1, 2]
    assert "This result is not in the store: the disk is full." in table.results[0].notes
    assert stored(path) == []

    # one that is locked for a while only is written at the end
    monkeypatch.setattr(sweep_tasks, "finish", full)
    table = swept(
        path, sizes(2), on_result=lambda _: monkeypatch.setattr(sweep_tasks, "finish", finish)
    )
    assert stored(path) == [1, 2]
    assert table.results[0].notes == ()


# executors


def test_settings_run_in_the_threads_of_an_executor(path, runs):
    with ThreadPoolExecutor(3) as executor:
        table = swept(path, sizes(30), executor=executor)
    assert [result.config.batch_size for result in table] == list(range(1, 31))
    assert runs.ended() == once(30)
    assert swept(path, sizes(30)).num_reused == 30  # it ran on this machine


def test_an_executor_whose_process_is_killed_loses_nothing(path, runs):
    import multiprocessing

    def killed_once(size):
        if size == 5 and runs.begun()[size] == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    runs.doing = killed_once
    forked = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, mp_context=forked) as executor:
        table = swept(path, sizes(8), executor=executor)
    assert "Call sweep again with a new one" in table.notes[0]
    done = stored(path)
    assert done == [1, 2, 3, 4]

    with ProcessPoolExecutor(1, mp_context=forked) as executor:
        table = swept(path, sizes(8), executor=executor)
    assert {str(result.outcome) for result in table} == {"ok"}
    assert runs.ended() == once(8)


def test_what_has_run_is_written_though_the_sweep_is_ended_by_an_error(path, runs):
    executor = ThreadPoolExecutor(1)

    def fail(result):
        executor.shutdown(wait=True)  # by now all others have run too
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        swept(path, sizes(5), executor=executor, on_result=fail)
    assert stored(path) == sorted(runs.ended())
    swept(path, sizes(5))
    assert runs.ended() == once(5)


def test_a_workload_that_no_executor_can_be_sent_is_refused_by_name(path, runs):
    lock = threading.Lock()
    workload = replace(WORKLOAD, build_model=lambda: lock)
    with ThreadPoolExecutor(1) as executor, pytest.raises(MemlabError, match="'stand-in' cannot"):
        memlab.sweep(workload, sizes(2), "cpu", path=path, executor=executor)
    table = memlab.sweep(workload, sizes(2), "cpu", path=path)
    assert "runs every setting again" in table.notes[0]
    assert stored(path) == [1, 2]


def test_an_argument_that_is_none_is_said_with_what_there_is():
    with pytest.raises(ConfigError, match=r"config=.*did you mean 'configs'.*allowed are workload"):
        memlab.sweep(WORKLOAD, config=StepConfig())
    with pytest.raises(TypeError, match="sweep: missing a required argument: 'configs'; allowed"):
        memlab.sweep(WORKLOAD)
