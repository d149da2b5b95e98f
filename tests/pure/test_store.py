"""The store: results outlive processes, several write at once, and nothing measured is lost."""

import contextlib
import functools
import json
import os
import shutil
import signal
import sqlite3
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memlab
from memlab import MemlabError, StepConfig
from memlab.errors import StoreError
from memlab.store import database
from memlab.store.database import (
    FILE,
    MIGRATIONS,
    RunArguments,
    insert,
    kept,
    reading,
    row_of,
    store_path,
    write,
    writing,
)
from tests.store_parts import Forked, a_result, a_run


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.sqlite3"


def of_gpt():
    workload = memlab.workloads.get("gpt-small", num_layers=2, sequence_length=64)
    return memlab.recorded(workload, StepConfig(batch_size=4), "amd-epyc")


def version_of(path) -> int:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute("PRAGMA user_version").fetchone()[0]


# what goes in comes out


def test_a_result_comes_back_whole_with_its_timeline(path):
    result = of_gpt()
    assert write(a_run(result=result), path) is None
    (found,) = memlab.stored_results(path=path)
    assert found.to_dict() == result.to_dict()
    assert (found.timeline.bytes_by_category == result.timeline.bytes_by_category).all()


@settings(deadline=None, max_examples=25)
@given(
    outcome=st.sampled_from(list(memlab.Outcome)),
    message=st.text(max_size=20).filter(lambda text: "\ud800" not in text),
    loss=st.none() | st.floats(),
    seconds=st.none() | st.floats(1e-9, 1e6),
    peak=st.none() | st.integers(0, 2**50),
    seed=st.integers(0, 2**62),
)
def test_any_result_comes_back(outcome, message, loss, seconds, peak, seed):
    result = a_result(
        outcome=outcome, message=message, loss=loss, step_seconds=seconds, peak_allocated_bytes=peak
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / FILE
        assert write(a_run(result=result, asked=RunArguments(seed=seed)), path) is None
        (found,) = memlab.stored_results(path=path)
        assert repr(found.to_dict()) == repr(result.to_dict())  # NaN is not equal to itself
        assert memlab.results(path=path)["seed"][0] == seed


def test_results_are_a_table_with_the_newest_last(path):
    for stored_at, batch_size in ((3.0, 8), (1.0, 2), (2.0, 4)):
        result = a_result(config=StepConfig(batch_size=batch_size))
        write(a_run(stored_at=stored_at, result=result), path)

    frame = memlab.results(path=path)
    assert list(frame["batch_size"]) == [2, 4, 8]
    assert str(frame["stored_at"].iloc[-1]) == "1970-01-01 00:00:03+00:00"
    assert list(frame["peak_parameters_bytes"]) == [1024] * 3
    assert frame.to_csv().count("\n") == 4
    assert len(json.loads(frame.to_json(orient="records", date_format="iso"))) == 3


def test_results_are_chosen_by_workload_device_and_source(path):
    write(a_run(result=a_result(workload_name="a", device="cpu")), path)
    write(a_run(result=a_result(workload_name="b", device="t4", source="predicted")), path)
    assert list(memlab.results(path=path, workload="a")["device"]) == ["cpu"]
    assert list(memlab.results(path=path, device="t4")["workload_name"]) == ["b"]
    assert list(memlab.results(path=path, source="predicted")["workload_name"]) == ["b"]
    assert len(memlab.results(path=path, workload="a", device="t4")) == 0


def test_a_store_that_is_not_there_holds_nothing_and_is_not_made_by_looking(path):
    assert len(memlab.results(path=path)) == 0
    assert memlab.stored_results(path=path) == []
    assert not path.exists()


def test_the_store_lies_in_the_cache_folder_or_where_the_variable_says(monkeypatch, tmp_path):
    monkeypatch.setenv("MEMLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MEMLAB_STORE", raising=False)
    assert store_path() == tmp_path / "cache" / FILE
    monkeypatch.setenv("MEMLAB_STORE", str(tmp_path / "mine.sqlite3"))
    assert store_path() == tmp_path / "mine.sqlite3"
    assert store_path(tmp_path / "other") == tmp_path / "other"


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (3, "path="),
        ("a\0b", "path="),
        ("~nobody-of-this-name/x", "path="),
        (".", "is a folder; add the name of a file"),
    ],
)
def test_a_path_that_names_no_file_is_refused(path, named, said):
    with pytest.raises(MemlabError, match=said):
        memlab.results(path=named)
    path.write_text("a file where a folder would have to be")
    assert "writable for you" in write(a_run(), path / "results.sqlite3")


# the schema


def test_the_schema_has_a_version_and_readers_need_not_wait_for_writers(path):
    write(a_run(), path)
    assert version_of(path) == len(MIGRATIONS)
    with contextlib.closing(sqlite3.connect(path)) as connection:  # another tool switches it back
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA journal_mode = DELETE").fetchone() == ("delete",)
    assert write(a_run(), path) is None
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    with writing(path) as connection:
        insert(connection, row_of(a_run()))
        assert len(memlab.stored_results(path=path)) == 2


@pytest.mark.parametrize("version", range(1, len(MIGRATIONS)))
def test_an_older_store_is_read_and_brought_up_to_date_by_a_write(path, version, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(database, "MIGRATIONS", MIGRATIONS[:version])
        assert write(a_run(result=of_gpt()), path) is None
    assert version_of(path) == version

    assert len(memlab.stored_results(path=path)) == 1
    assert version_of(path) == version  # reading changes nothing

    def killed_before_the_end():
        with writing(path):
            os.kill(os.getpid(), signal.SIGKILL)

    assert Forked(killed_before_the_end).wait() == -signal.SIGKILL
    assert version_of(path) == version
    assert write(a_run(), path) is None
    assert version_of(path) == len(MIGRATIONS)
    assert memlab.stored_results(path=path)[0].to_dict() == of_gpt().to_dict()
    with reading(path) as connection:
        assert connection.execute("SELECT count(*) FROM claim").fetchone() == (0,)


def test_a_newer_store_is_left_alone_with_a_sentence(path):
    write(a_run(), path)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")

    with pytest.raises(StoreError, match=r"newer version of memlab .* update memlab"):
        memlab.results(path=path)
    assert "update memlab" in write(a_run(), path)
    assert version_of(path) == len(MIGRATIONS) + 1


def test_a_database_of_another_program_is_left_alone(path):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE theirs (x)")

    before = path.read_bytes()
    assert "another program" in write(a_run(), path)
    with pytest.raises(StoreError, match="another program"):
        memlab.results(path=path)
    assert path.read_bytes() == before
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]


# problems: a sentence, and what was measured is returned


def note_of(workload) -> str:
    result = kept(a_result(), workload, RunArguments(seed=0), is_isolated=True, device=CPU)
    assert result.peak_allocated_bytes == 1024
    (note,) = result.notes
    assert note.startswith("This result is not in the store: ")
    return note


CPU = memlab.store.database.torch.device("cpu")
ZOO = "vit-digits"


@pytest.fixture
def workload(monkeypatch, path):
    monkeypatch.setenv("MEMLAB_STORE", str(path))
    return memlab.workloads.get(ZOO)


def test_what_measure_found_is_in_the_store_before_it_is_returned(workload, path):
    result = kept(a_result(), workload, RunArguments(seed=3), is_isolated=True, device=CPU)
    assert result.notes == ()
    assert list(memlab.results(path=path, workload=workload)["seed"]) == [3]


def test_a_cancelled_run_is_not_stored(workload, path):
    kept(a_result(outcome="cancelled"), workload, RunArguments(), is_isolated=True, device=CPU)
    assert not path.exists()


def test_an_error_that_nobody_expected_is_a_note_too(workload, monkeypatch):
    monkeypatch.setattr(memlab.store.database, "insert", lambda *_: 1 / 0)
    result = kept(a_result(), workload, RunArguments(), is_isolated=True, device=CPU)
    assert "ZeroDivisionError" in result.notes[0]


def test_a_locked_store(workload, path, monkeypatch):
    monkeypatch.setattr(memlab.store.database, "SHORT_WAIT_SECONDS", 0.05)
    write(a_run(), path)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert "locked by another program; close" in note_of(workload)
        assert len(memlab.stored_results(path=path)) == 1  # what is there can still be read
    assert len(memlab.stored_results(path=path)) == 1


def test_a_broken_file(workload, path):
    path.write_bytes(b"no database at all, but long enough to be one" * 100)
    assert "move it away" in note_of(workload)
    with pytest.raises(StoreError, match="move it away"):
        memlab.results(path=path)
    assert path.read_bytes().startswith(b"no database")


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_store_that_was_cut_short(workload, path, share):
    for _ in range(20):
        write(a_run(result=of_gpt()), path)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    os.truncate(path, int(path.stat().st_size * share))
    # the list of rows is there, or it is said to be damaged; never a wrong number of good ones
    try:
        found = memlab.stored_results(path=path)
    except StoreError as error:
        found, said = [], str(error)
        assert "move it away" in said
    assert all(each.to_dict() == of_gpt().to_dict() for each in found)


def test_a_damaged_row_is_left_out_with_a_warning(path):
    for _ in range(3):
        write(a_run(), path)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE result SET result = '{}' WHERE id = 2")
        connection.commit()

    with pytest.warns(UserWarning, match="1 damaged rows .* number 2"):
        assert len(memlab.results(path=path)) == 2


def test_a_full_disk(workload, path, monkeypatch):
    write(a_run(), path)
    connected = database._connected

    def on_a_full_disk(*arguments):
        connection = connected(*arguments)
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
        return connection

    with monkeypatch.context() as patch:
        patch.setattr(database, "_connected", on_a_full_disk)
        patch.setattr(memlab.store.database, "insert", insert_many)
        assert "free some space" in note_of(workload)

    assert len(memlab.stored_results(path=path)) == 1
    assert write(a_run(), path) is None  # when there is space again


def insert_many(connection, row):
    for _ in range(200):
        insert(connection, row)


@pytest.mark.skipif(not hasattr(os, "setuid"), reason="permissions of POSIX")
def test_a_store_that_may_not_be_written():
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # a folder of pytest is closed to other users
    path = folder / "results.sqlite3"
    write(a_run(), path)
    path.chmod(0o444)
    folder.chmod(0o555)

    def as_another():
        if os.getuid() == 0:  # for whom no permission counts
            os.setuid(65534)
        assert "make the file and its folder writable" in write(a_run(), path)
        assert len(memlab.stored_results(path=path)) == 1

    assert Forked(as_another).wait() == 0
    folder.chmod(0o755)
    shutil.rmtree(folder)


# several at once


def write_many(path, name, count):
    for number in range(count):
        result = a_result(workload_name=name, peak_allocated_bytes=number)
        assert write(a_run(result=result), path, wait_seconds=60) is None


def test_two_processes_that_write_at_once_lose_nothing(path):
    both = [Forked(functools.partial(write_many, path, name, 100)) for name in ("a", "b")]
    assert [process.wait() for process in both] == [0, 0]
    frame = memlab.results(path=path)
    for name in ("a", "b"):
        mine = frame[frame["workload_name"] == name]
        assert sorted(mine["peak_allocated_bytes"]) == list(range(100))


@pytest.mark.parametrize("seconds", [0.0, 0.003, 0.01, 0.05])
def test_a_process_that_is_killed_while_it_writes_leaves_whole_rows(path, seconds):
    said = path.with_name("said.txt")

    def write_and_say():
        with said.open("w") as stream:
            for number in range(10**6):
                result = a_result(peak_allocated_bytes=number)
                assert write(a_run(result=result), path) is None
                print(number, file=stream, flush=True)

    process = Forked(write_and_say)
    while not said.exists() or said.read_text().count("\n") < 20:
        time.sleep(0.001)
    time.sleep(seconds)
    process.kill()

    found = [result.peak_allocated_bytes for result in memlab.stored_results(path=path)]
    assert found == list(range(len(found)))
    assert len(found) >= said.read_text().count("\n")  # what was said to be written is there
    assert write(a_run(), path) is None
    with reading(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
