"""What is kept of measured runs: checked as it is read, bounded, and joined over an hour."""

import dataclasses
import json
import sqlite3

import pytest

from memlab.cost_model import measured_runs
from memlab.cost_model.cost_store import Store
from memlab.cost_model.measured_runs import MeasuredRun, read_run, stamp_of, write_run
from memlab.devices.operators import OperatorCost
from tests.cost_parts import operator

RUN = MeasuredRun(
    step="a", least_seconds=0.1, median_seconds=0.11, num_repeats=5, others_share=0.01,
    peak_bytes=1000, taken_at=1e9, files={},
)  # fmt: skip


def written(store, **changes):
    write_run(store, dataclasses.replace(RUN, **changes))
    return read_run(store, RUN.step)[0]


def test_a_run_is_read_as_it_was_written_and_by_other_processes(tmp_path):
    file = tmp_path / "model.py"
    file.touch()
    run = dataclasses.replace(RUN, files={str(file): stamp_of(str(file))}, in_vain_at=1e9)
    write_run(Store(tmp_path), run)
    assert read_run(Store(tmp_path), "a") == (run, None)
    assert read_run(Store(tmp_path), "b") == (None, None)
    assert run.is_of_present_files()
    file.write_text("width = 3")
    assert not run.is_of_present_files()
    file.unlink()
    assert not run.is_of_present_files()


def test_both_tables_are_of_one_file_and_neither_disturbs_the_other(tmp_path):
    cost = OperatorCost(output_bytes=(4,), peak_bytes=4, seconds=0.5)
    store = Store(tmp_path)
    store.write({operator(1): cost})
    assert written(store) == RUN
    assert store.read([operator(1)]) == {operator(1): cost}


HUGE = f"1{'0' * 400}"
BAD_FIELDS = [
    ("least_seconds", "NaN"), ("least_seconds", "-0.1"), ("least_seconds", "0"),
    ("least_seconds", "1e999"), ("least_seconds", HUGE), ("least_seconds", '"0.1"'),
    ("least_seconds", "true"), ("least_seconds", "null"), ("median_seconds", "0.05"),
    ("others_share", "2"), ("others_share", "NaN"), ("others_share", '"0"'),
    ("num_repeats", "0"), ("num_repeats", "2.5"), ("num_repeats", HUGE), ("peak_bytes", "-1"),
    ("peak_bytes", HUGE), ("taken_at", "-1.0"), ("taken_at", "1e999"), ("taken_at", "null"),
    ("in_vain_at", "NaN"), ("files", "3"), ("files", '{"a": 3}'),
    ("files", '{"a": [1, 2, 3, "4"]}'),
]  # fmt: skip
GOOD_ROW = json.loads(
    '{"least_seconds": 0.1, "median_seconds": 0.11, "num_repeats": 5, "others_share": 0.01, '
    '"peak_bytes": 1000, "taken_at": 1e9, "in_vain_at": null, "files": {}}'
)


def row_with(name, text):
    return json.dumps({**GOOD_ROW, name: "@"}).replace('"@"', text)


BAD_ROWS = ["", "null", "3", "[]", "{}", "nonsense", "[" * 10_000, b"\xff\xfe", 7]
BAD_ROWS += [json.dumps({**GOOD_ROW, "more": 1}), json.dumps(GOOD_ROW) + " " * 200_000]
BAD_ROWS += [row_with(*field) for field in BAD_FIELDS]


@pytest.mark.parametrize("row", BAD_ROWS, ids=lambda row: str(row)[:40])
def test_a_row_that_cannot_be_is_not_used_and_a_note_says_so(tmp_path, row):
    store = Store(tmp_path)
    write_run(store, RUN)

    def read(row):
        with sqlite3.connect(store.path) as connection:
            connection.execute("UPDATE measured SET run = ?", (row,))
        connection.close()
        return read_run(store, "a")

    good = row_with("least_seconds", "0.05")  # which the bad ones are made of
    assert read(good) == (dataclasses.replace(RUN, least_seconds=0.05), None)
    found, note = read(row)
    assert found is None
    assert note.startswith("A damaged row of a measured run in")
    assert store.problem is None
    assert written(store) == RUN


def test_the_newest_are_kept_and_no_row_is_large(tmp_path, monkeypatch):
    monkeypatch.setattr(measured_runs, "MOST_ROWS", 3)
    store = Store(tmp_path)
    for step in "abcad":
        write_run(store, dataclasses.replace(RUN, step=step))
    kept = [step for step in "abcd" if read_run(store, step)[0] is not None]
    assert kept == ["a", "c", "d"]
    many = {f"/{number}": (1, 2, 3, 4) for number in range(10_000)}
    write_run(store, dataclasses.replace(RUN, step="large", files=many))
    assert read_run(store, "large") == (None, None)


def test_runs_within_an_hour_are_joined(tmp_path):
    store = Store(tmp_path)
    written(store, in_vain_at=5e8)
    joined = written(store, least_seconds=0.3, median_seconds=0.9, taken_at=1e9 + 60)
    assert (joined.least_seconds, joined.median_seconds, joined.taken_at) == (0.1, 0.11, 1e9 + 60)
    assert joined.is_quiet
    assert joined.in_vain_at == 5e8
    later = written(store, least_seconds=0.3, median_seconds=0.9, taken_at=1e9 + 9000)
    assert (later.least_seconds, later.in_vain_at) == (0.3, 5e8)
    assert written(store, least_seconds=0.4, median_seconds=0.4, peak_bytes=7).least_seconds == 0.4


@pytest.mark.parametrize(
    ("changes", "is_quiet"),
    [({}, True), ({"others_share": None}, False), ({"others_share": 0.5}, False),
     ({"num_repeats": 2}, False), ({"median_seconds": 0.2}, False)],
)  # fmt: skip
def test_only_a_steady_time_of_a_machine_known_to_be_quiet_says_that_a_step_is_slow(
    changes, is_quiet
):
    assert dataclasses.replace(RUN, **changes).is_quiet is is_quiet
