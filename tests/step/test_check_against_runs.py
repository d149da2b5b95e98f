"""A prediction that a measured run of the same step speaks against: mended, or its claim wider."""

import json
import sqlite3
import time
from dataclasses import astuple, replace
from types import SimpleNamespace

import pytest
import torch

import memlab
from memlab import StepConfig, Workload
from memlab.cost_model import cost_store
from memlab.cost_model.cost_store import Store, cost_from_row
from memlab.cost_model.measured_runs import MeasuredRun, read_run, write_run
from memlab.prediction import check_against_runs as checking
from memlab.prediction.check_against_runs import Attempt, check_against_runs
from memlab.runtime.same_step import recall
from tests.models import made_of

PEAK = 1000


def run_of(least, *, quiet=True, **changes):
    fields = {
        "step": "a", "least_seconds": least, "median_seconds": least, "num_repeats": 5,
        "others_share": 0.0 if quiet else 0.9, "peak_bytes": PEAK, "taken_at": time.time() - 60,
        "files": {},
    }  # fmt: skip
    return MeasuredRun(**{**fields, **changes})


@pytest.fixture
def predict(monkeypatch, tmp_path):
    """Predict from kept costs, and from new ones where those are doubted."""
    monkeypatch.setattr(checking, "Store", lambda: Store(tmp_path))

    def predict(run, kept, new=None, *, noise=0.0, note=None, is_whole=True):
        dates = []

        def attempt(remeasure_before):
            dates.append(remeasure_before)
            facts = {
                "step_seconds": kept if remeasure_before is None else new,
                "peak_allocated_bytes": PEAK,
                "uncertainty": {"peak_allocated_bytes": 0.01, "step_seconds": 0.25 + noise},
                "notes": ("the first",),
            }
            kernels = SimpleNamespace(noisy_share=noise)
            return Attempt(
                kernels=kernels, size_model=None, facts=facts, noise=noise, is_whole=is_whole
            )

        if run is not None:
            write_run(Store(tmp_path), run)
        facts = check_against_runs((run, note), attempt).facts
        first, *notes = facts["notes"]
        assert first == "the first"
        assert facts["uncertainty"]["peak_allocated_bytes"] == 0.01
        width = facts["uncertainty"]["step_seconds"]
        kept_run = None if run is None else read_run(Store(tmp_path), run.step)[0]
        return SimpleNamespace(
            seconds=facts["step_seconds"], width=width, notes=notes, dates=dates, run=kept_run
        )

    return predict


def test_a_prediction_without_a_measured_run_or_with_one_that_agrees_stays(predict):
    assert predict(None, 1.0, note="damaged").notes == ["damaged"]
    for least in (0.76, 1.0, 1.24):
        found = predict(run_of(least), 1.0)
        assert (found.seconds, found.width, found.notes, found.dates) == (1.0, 0.25, [], [None])


@pytest.mark.parametrize(
    ("least", "kept", "new"), [(0.1, 2.0, 0.11), (0.5, 0.7, 0.6), (2.0, 0.1, 1.9), (0.6, 0.4, 0.5)]
)
def test_costs_that_a_run_speaks_against_are_found_again(predict, least, kept, new):
    run = run_of(least)
    found = predict(run, kept, new)
    assert (found.seconds, found.width) == (new, 0.25)
    assert found.dates == [None, run.taken_at]
    (note,) = found.notes
    assert "was predicted, but this step took" in note
    assert "were taken again" in note
    assert found.run.in_vain_at is None


@pytest.mark.parametrize(("least", "kept", "new"), [(0.1, 2.0, 1.0), (2.0, 0.1, 0.2)])
def test_what_still_disagrees_is_covered_and_not_tried_again_for_an_hour(predict, least, kept, new):
    found = predict(run_of(least), kept, new)
    assert abs(least - new) <= found.width * new
    assert "wider than usual" in found.notes[-1]
    assert found.run.in_vain_at == pytest.approx(time.time(), abs=600)

    again = predict(found.run, new)
    assert again.dates == [None]
    assert again.width == found.width
    assert again.notes == found.notes[-1:]

    later = predict(run_of(least, step="b", in_vain_at=time.time() - 9000), kept, least)
    assert later.seconds == least


def test_a_busy_machine_makes_no_prediction_too_fast(predict):
    found = predict(run_of(2.0, quiet=False), 0.1)
    assert (found.seconds, found.width, found.notes, found.dates) == (0.1, 0.25, [], [None])


def test_a_step_of_which_too_much_is_not_known_is_never_too_fast(predict):
    assert predict(run_of(2.0), 0.1, is_whole=False).dates == [None]
    assert predict(run_of(0.1), 2.0, 1.0, is_whole=False).width == 0.25


def test_what_is_claimed_for_a_busy_machine_does_not_hide_that_costs_are_too_slow(predict):
    found = predict(run_of(0.2), 2.0, 0.6, noise=0.7)
    assert (found.seconds, found.width) == (0.6, 0.95)
    assert len(found.notes) == 1, "the noise explains the rest"
    assert found.run.in_vain_at is None, "they are taken again once it is quiet"


@pytest.mark.parametrize(
    "changes", [{"peak_bytes": 1100}, {"peak_bytes": 900}], ids=["more memory", "less memory"]
)
def test_a_run_of_another_peak_says_nothing(predict, changes):
    assert predict(run_of(0.1, **changes), 2.0).notes == []


def test_a_run_of_the_future_discards_nothing(predict):
    found = predict(run_of(0.1, taken_at=time.time() + 1e6), 2.0)
    assert found.dates == [None]
    assert found.width >= 0.95


def line(width):
    return made_of(
        lambda: torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU()),
        lambda n: torch.ones(n, width),
    )


def slow_down(factor):
    """Multiply all kept times of operators, and let them look as if the machine had been quiet."""
    path = cost_store.cache_folder() / cost_store.FILE
    select = "SELECT circumstances, operator, cost FROM cost WHERE operator NOT LIKE ?"
    with sqlite3.connect(path) as connection:
        for key in connection.execute(select, (f"{cost_store.OVERHEAD}%",)).fetchall():
            cost = cost_from_row(json.loads(key[2])[:-1])  # less the checksum, which it may lack
            assert cost.seconds is not None
            seconds = cost.seconds * factor
            quiet = replace(
                cost, seconds=seconds, median_seconds=seconds, least_seconds=seconds,
                others_share=0.0,
            )  # fmt: skip
            connection.execute(
                "UPDATE cost SET cost = ? WHERE circumstances = ? AND operator = ?",
                (json.dumps(astuple(quiet)), *key[:2]),
            )
    connection.close()


@pytest.mark.slow
def test_costs_that_are_far_too_slow_are_mended_by_a_measured_run(monkeypatch, tmp_path):
    monkeypatch.setenv("MEMLAB_CACHE", str(tmp_path))
    workload, config = line(256), StepConfig(batch_size=128)
    learned = memlab.predict(workload, config, "cpu")
    slow_down(100_000)  # far beyond what a busy machine makes of a time meanwhile
    measured = memlab.measure(workload, config, "cpu")
    right = memlab.predict(workload, config, "cpu")
    assert [note for note in right.notes if "were taken again" in note]
    assert right.step_seconds < learned.step_seconds * 1000
    width = right.uncertainty["step_seconds"] * right.step_seconds
    assert min(measured.step_seconds_all) >= (right.step_seconds - width) * 0.99


@pytest.mark.slow
def test_a_model_whose_file_was_edited_is_compared_with_no_run_of_the_old_one(
    monkeypatch, tmp_path
):
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "edited_later.py"
    text = "import torch\n\ndef build():\n    return torch.nn.Linear(8, 8)  # {}\n"
    file.write_text(text.format("first"))

    def build_model():
        import edited_later  # in the worker alone

        return edited_later.build()

    workload = Workload(
        name="edited", build_model=build_model, make_batch=lambda n: torch.ones(n, 8),
        compute_loss=lambda model, batch: model(batch).sum(),
    )  # fmt: skip
    memlab.measure(workload, StepConfig(), "cpu", repeats=1)
    (step,) = [step for step, run in stored_runs() if str(file) in json.loads(run)["files"]]
    assert recall(step)[0] is not None
    file.write_text(text.format("second"))
    assert recall(step) == (None, None)


def stored_runs():
    with sqlite3.connect(cost_store.cache_folder() / cost_store.FILE) as connection:
        rows = connection.execute("SELECT step, run FROM measured").fetchall()
    connection.close()
    return rows
