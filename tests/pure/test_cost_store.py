"""The store of operator costs: kept between processes, and never in the way."""

import json
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import memlab
from memlab.cost_model import cost_store
from memlab.cost_model.cost_store import Store, cache_folder
from memlab.devices.operators import OperatorCost, to_text
from memlab.errors import MemlabError
from tests import ROOT
from tests.cost_parts import COST, operator

sizes = st.integers(0, 2**40)
times = st.floats(1e-9, 1e6)


@st.composite
def costs(draw):
    outputs, kept = tuple(draw(st.lists(sizes, max_size=3))), draw(sizes)
    least, seconds, median = sorted(draw(st.tuples(times, times, times)))
    return OperatorCost(
        output_bytes=outputs,
        peak_bytes=sum(outputs) + kept + draw(sizes),
        kept_bytes=kept,
        seconds=draw(st.none() | st.just(seconds)),
        extrapolated=draw(st.booleans()),
        num_repeats=draw(st.none() | st.integers(1, 9)),
        median_seconds=median,
        least_seconds=least,
        others_share=draw(st.none() | st.floats(0, 1)),
    )


@given(costs())
def test_a_cost_is_read_as_it_was_written(cost):
    assert cost_store._cost(cost_store._line(cost, "here", "x()"), "here", "x()") == cost


@given(costs(), st.integers(0, 9), st.sampled_from([-1, 0, 1, 2**61, -0.5, 0.25, None, [], [64]]))
def test_a_row_with_another_value_in_any_place_is_not_believed(cost, place, value):
    row = json.loads(cost_store._line(cost, "here", "x()"))
    if (type(row[place]), row[place]) == (type(value), value):
        return
    row[place] = value
    with pytest.raises(cost_store.DAMAGED):
        cost_store._cost(json.dumps(row), "here", "x()")


def test_a_row_of_another_operator_or_machine_is_not_believed():
    line = cost_store._line(COST, "here", "x()")
    for here, text in (("there", "x()"), ("here", "y()")):
        with pytest.raises(ValueError, match="checksum"):
            cost_store._cost(line, here, text)


def test_other_circumstances_know_nothing(tmp_path):
    Store(tmp_path).write({operator(1): COST})
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert Store(tmp_path).read([operator(1)]) == {}
    finally:
        torch.set_num_threads(before)
    assert Store(tmp_path).read([operator(1)]) == {operator(1): COST}


def test_more_operators_than_a_query_takes(tmp_path):
    many = {operator(i): OperatorCost(output_bytes=(i,), peak_bytes=i) for i in range(1200)}
    Store(tmp_path).write(many)
    assert Store(tmp_path).read(many) == many


def spoil(file: Path) -> None:
    file.write_bytes(b"this is not a database" * 100)


def put_a_file_for_the_folder(file: Path) -> None:
    file.parent.rmdir()
    file.parent.write_text("in the way")


@pytest.mark.parametrize("spoiled", [spoil, Path.mkdir, put_a_file_for_the_folder])
def test_a_file_that_cannot_be_used_leaves_a_store_in_memory_and_a_sentence(tmp_path, spoiled):
    folder = tmp_path / "costs"
    folder.mkdir()
    spoiled(folder / cost_store.FILE)
    store = Store(folder)
    assert store.read([operator(1)]) == {}
    assert str(store.path) in store.problem
    assert "MEMLAB_CACHE" in store.problem
    store.write({operator(2): COST})
    assert store.read([operator(2)]) == {operator(2): COST}


def test_a_read_only_file_is_read_and_then_left_alone(tmp_path):
    Store(tmp_path).write({operator(1): COST})
    (tmp_path / cost_store.FILE).chmod(0o444)
    store = Store(tmp_path)
    assert store.read([operator(1)]) == {operator(1): COST}
    store.write({operator(2): COST})  # who runs as root may write all the same
    assert store.read([operator(1), operator(2)]) == {operator(1): COST, operator(2): COST}


@pytest.mark.slow
def test_processes_write_at_once_and_nothing_is_lost(tmp_path):
    code = f"""
import sys, torch; from pathlib import Path
from memlab.cost_model.cost_store import Store
from tests.cost_parts import COST, operator
torch.set_num_threads({torch.get_num_threads()})
for i in range(20):
    Store(Path({str(tmp_path)!r})).write({{operator(100 * int(sys.argv[1]) + i): COST}})
"""
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(number)], cwd=ROOT) for number in range(3)
    ]
    assert [process.wait(timeout=900) for process in running] == [0, 0, 0]
    wanted = [operator(100 * number + i) for number in range(3) for i in range(20)]
    assert len(Store(tmp_path).read(wanted)) == 60


def test_the_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("MEMLAB_CACHE", "/a/b")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert cache_folder() == Path("/a/b")
    monkeypatch.delenv("MEMLAB_CACHE")
    assert cache_folder() == Path("/c/memlab")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder().name in ("memlab", "Cache")
    assert Path.home() in cache_folder().parents


@pytest.mark.parametrize("variable", ["MEMLAB_CACHE", "XDG_CACHE_HOME", "HOME"])
def test_a_home_that_is_not_there_is_a_sentence_with_a_remedy(monkeypatch, variable):
    for name in ("MEMLAB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    if variable == "HOME":

        def home():
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", home)
    else:
        monkeypatch.setenv(variable, "~nobodyhere/x")
    if variable == "HOME" and sys.platform == "win32":
        pytest.skip("the folder is in another variable")

    with pytest.raises(MemlabError, match="set MEMLAB_CACHE to a folder that can be written"):
        memlab.forget_costs()
    store = Store()
    store.write({operator(1): COST})
    assert store.read([operator(1)]) == {operator(1): COST}
    (note,) = store.notes
    assert note.startswith("Costs of operators are not cached on disk: ")
    assert "MEMLAB_CACHE" in note


def test_reading_asks_the_file_once(tmp_path, monkeypatch):
    Store(tmp_path).write({operator(1): COST})
    store = Store(tmp_path)
    store.read([operator(1)])
    monkeypatch.setattr(cost_store.sqlite3, "connect", None)  # calling it would raise
    assert store.read([operator(1)]) == {operator(1): COST}


def test_a_file_that_was_deleted_and_written_anew_is_not_the_old_one(tmp_path):
    store, other = Store(tmp_path), Store(tmp_path)
    for seconds in (1.0, 2.0, 3.0, 4.0):  # faster than the system's dates of files move
        store.path.unlink(missing_ok=True)
        cost = replace(COST, seconds=seconds)
        other.write({operator(1): cost})
        assert store.read([operator(1)]) == {operator(1): cost}
    store.path.unlink()
    assert store.read([operator(1)]) == {}


def test_what_another_process_has_written_replaces_what_is_held(tmp_path):
    store, other = Store(tmp_path), Store(tmp_path)
    store.write({operator(1): COST})
    store.read([operator(1)])
    other.write({operator(1): replace(COST, seconds=7.0)})
    assert store.read([operator(1)])[operator(1)].seconds == 7.0


def test_costs_near_a_date_are_forgotten(tmp_path):
    taken = {1: 1000.0, 2: 1500.0, 3: 2500.0, 4: None, 5: 1600.0}
    store = Store(tmp_path)
    store.write({operator(n): replace(COST, taken_at=date) for n, date in taken.items()})
    every = [operator(n) for n in taken]
    store.forget_near([], within_seconds=1e9, before=1e9)
    assert len(store.read(every)) == 5

    store.forget_near([1100.0], within_seconds=600, before=1550.0)
    assert set(store.read(every)) == {operator(3), operator(4), operator(5)}
    assert set(Store(tmp_path).read(every)) == {operator(3), operator(4), operator(5)}
    store.forget_near([0.0], within_seconds=600, before=1e9)
    assert set(store.read(every)) == {operator(3), operator(5)}


BAD_ROWS = [
    "", "null", "3", "{}", "[]", "nonsense", "[[28], 64]", '[["28"], 64, 0, 0.1, false]',
    "[[28], -1, 0, 0.1, false]", "[[true], 64, 0, 0.1, false]", "[[28], 1e3, 0, 0.1, false]",
    "[[28], 64, 0, NaN, false]", "[[28], 64, 0, Infinity, false]", "[[28], 64, 0, 1e999, false]",
    '[[28], 64, 0, "0.1", false]', "[[28], 64, 0, true, false]", "[[28], 64, 0, 0.1, 1]",
    "[28, 64, 0, 0.1, false]", "[[[28]], 64, 0, 0.1, false]",
    f"[[28], 1{'0' * 400}, 0, 0.1, false]",
    f"[[28], 1{'0' * 5000}, 0, 0.1, false]", "[" * 10_000, "[[28], 64, 0, 0.1, false, 1, 1, 1, 1]",
    b"\xff\xfe", 7, "[[28], 64, 0, 0.1, false, 3, 0.1, 0.1, 0.0, 1e999]",
    "[[28], 64, 0, 0.1, false, 3, 0.1, 0.1, 0.0, NaN]",
    # what a file could say, and no operator can cost; without a checksum, as in earlier versions
    "[[28], 64, 0, -1e-9, false]", "[[28], 64, 0, 0.0, false]", "[[28], 64, 0, 1e7, false]",
    "[[28], 27, 0, 0.1, false]", "[[28], 64, 37, 0.1, false]", f"[[28], {2**61}, 0, 0.1, false]",
    f"[[28], {2**62}, {2**61}, 0.1, false]",
    "[[28], 64, 0, 0.1, false, -3, 0.1, 0.1, 0.0, 1.0]",
    "[[28], 64, 0, 0.1, false, 0, 0.1, 0.1, 0.0, 1.0]",
    "[[28], 64, 0, 0.1, false, 2.5, 0.1, 0.1, 0.0, 1.0]",
    "[[28], 64, 0, 0.1, false, true, 0.1, 0.1, 0.0, 1.0]",
    "[[28], 64, 0, 0.1, false, 3, 0.1, 0.1, -2.0, 1.0]",
    "[[28], 64, 0, 0.1, false, 3, 0.1, 0.1, 1.5, 1.0]",
    "[[28], 64, 0, 0.1, false, 3, 0.1, 0.2, 0.0, 1.0]",
    "[[28], 64, 0, 0.1, false, 3, 0.1, -0.1, 0.0, 1.0]",
    "[[28], 64, 0, 0.5, false, 3, 0.1, 0.1, 0.0, 1.0]",
]  # fmt: skip


@pytest.mark.parametrize("row", BAD_ROWS, ids=lambda row: str(row)[:24])
def test_a_row_that_cannot_be_is_dropped_with_a_note_and_the_others_are_read(tmp_path, row):
    Store(tmp_path).write({operator(1): COST, operator(2): COST})
    store = Store(tmp_path)
    with sqlite3.connect(store.path) as connection:
        connection.execute("UPDATE cost SET cost = ? WHERE operator = ?",
                           (row, to_text(operator(1))))  # fmt: skip
    connection.close()
    assert store.read([operator(1), operator(2)]) == {operator(2): COST}
    (note,) = store.notes
    assert note.startswith("1 damaged rows of")
    assert str(store.path) in note
    store.write({operator(1): COST})
    assert Store(tmp_path).read([operator(1)]) == {operator(1): COST}


def test_an_overhead_may_come_out_a_little_below_nothing_and_no_more(tmp_path):
    overhead = (f"{cost_store.OVERHEAD}forward", (), ())
    bare = OperatorCost(output_bytes=(), peak_bytes=0)
    for seconds, is_believed in ((-1e-7, True), (3e-6, True), (-1.0, False), (2.0, False)):
        Store(tmp_path).write({overhead: replace(bare, seconds=seconds)})
        store = Store(tmp_path)
        assert bool(store.read([overhead])) is is_believed
        assert bool(store.notes) is not is_believed
