"""Every recorded run of every device, predicted again here: no GPU, and nothing is timed."""

import math
from types import SimpleNamespace

import pytest
import torch

import memlab
from benchmarks import recorded, report
from memlab import StepConfig, workloads
from memlab.cost_model.targets import Kernels
from memlab.prediction import predict
from memlab.prediction.error_bounds import Compiled
from memlab.store.records import Kind
from tests.processor import has_bf16_kernels

RECORDS = {record.name: record for record in recorded.shipped()}


def taken_with(record):
    return _version(record.runs[0].result.versions["torch"])


def other_kernels(record):
    """Return why this CPU does not run the operators of a CPU's record; None if it does."""
    if record.is_card:
        return None
    if _version(torch.__version__) != taken_with(record):
        return f"a CPU runs other kernels with a torch that is not {taken_with(record)}"
    if not has_bf16_kernels():
        return f"this CPU has no bf16 kernels, which {record.name} had"
    return None


def _version(text):
    return text.partition("+")[0]


@pytest.fixture(scope="module", params=RECORDS)
def held(request):
    record = RECORDS[request.param]
    rows = recorded.held(record)
    recorded.show(record, rows)  # pytest prints it where a goal is missed
    return record, rows


@pytest.mark.slow
@pytest.mark.parametrize("what", ["allocated", "reserved"])
def test_bytes_are_predicted_within_the_goals(held, what):
    record, rows = held
    if why := other_kernels(record):
        pytest.skip(why)
    assert [row["config"] for row in rows if row["outcome"] != "ok"] == []
    found = recorded.spread(rows, f"{what} %")
    if what == "reserved" and not record.is_card:
        assert found is None
        return
    assert len(rows) >= 40
    for error, goal in zip(found, recorded.GOALS[what], strict=True):
        assert error <= goal
    aside = recorded.spread([row for row in rows if row["holdout"]], f"{what} %")
    for error, goal in zip(aside, recorded.GOALS[what], strict=True):
        assert error <= goal


@pytest.mark.slow
def test_times_are_predicted_within_the_goals(held):
    record, rows = held
    if why := other_kernels(record):
        pytest.skip(why)
    same, found = recorded.spread(rows, "A/A %"), recorded.spread(rows, "time %")
    assert all(row["time %"] is not None and math.isfinite(row["time %"]) for row in rows)
    if not recorded.is_quiet(rows):
        pytest.skip(
            f"{record.name} was at work when it was recorded: its own second readings are "
            f"{same[1]:.0f} % off at the 95th percentile, and predictions {found[1]:.0f} %"
        )
    for error, spread, goal in zip(found, same, recorded.GOALS["time"], strict=True):
        assert error - spread <= goal


@pytest.mark.slow
def test_readme_says_what_the_records_say(held):
    record, _ = held
    if why := other_kernels(record):
        pytest.skip(why)
    every = [(other, recorded.held(other)) for other in RECORDS.values() if other is not record]
    block = recorded.block(sorted([held, *every], key=lambda pair: pair[0].name))
    text = recorded.README.read_text()
    assert report.rewritten(text, recorded.MARK, block) == text, (
        "run: python -m benchmarks.recorded --write"
    )


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_whole_small_and_can_be_played_back(name):
    record = RECORDS[name]
    assert record.lines.damage == ""
    assert record.lines.path.stat().st_size < 10 * 2**20
    assert any("summary" in line for line in record.lines.of(Kind.VISIT))
    aside = {run.workload for run in record.runs if run.holdout}
    fitted = {run.workload for run in record.fitting}
    assert aside
    assert fitted
    assert not aside & fitted
    for run in record.runs[:3]:
        workload = workloads.get(run.workload, **run.options)
        found = memlab.recorded(workload, run.result.config, name)
        assert (found.outcome, found.source) == (run.result.outcome, "recorded")
        assert sum(found.peak_by_category.values()) == found.peak_allocated_bytes
        assert found.timeline.total_bytes.max() == found.peak_allocated_bytes


def test_there_is_a_record_at_all():
    assert RECORDS


def test_a_missing_mark_is_said():
    with pytest.raises(ValueError, match="has no lines"):
        report.rewritten("no marks here", "recorded", "new")
    marked = "a\n<!-- recorded: begin -->{}<!-- recorded: end -->\nb"
    assert report.rewritten(marked.format("old"), "recorded", "NEW") == marked.format("NEW")


# a time of a recorded device with unknown parts is a bound in words, and no number


DEVICE = "amd-epyc, recorded"
GPT = workloads.get("gpt-small", num_layers=2, sequence_length=64)
LSTM = workloads.get("lstm-text", sequence_length=48)


@pytest.mark.parametrize(
    ("workload", "batch_size"), [(GPT, 16), (LSTM, 6)], ids=lambda value: str(value)[:24]
)
def test_a_batch_that_was_not_recorded_has_no_time_but_a_bound(workload, batch_size):
    found = memlab.predict(workload, StepConfig(batch_size=batch_size), DEVICE)
    assert found.outcome == "ok", found.message
    assert found.step_seconds is None
    assert found.samples_per_second is None
    assert "step_seconds" not in found.uncertainty
    (note,) = (note for note in found.notes if "no known time" in note)
    assert "% of the work of the operators" in note
    assert "takes longer than" in note
    assert " a step" not in found.message


def test_a_batch_that_was_recorded_keeps_its_time():
    found = memlab.predict(GPT, StepConfig(batch_size=8), DEVICE)
    played = memlab.recorded(GPT, StepConfig(batch_size=8), "amd-epyc")
    assert abs(found.step_seconds / played.step_seconds - 1) < 2 * found.uncertainty["step_seconds"]
    assert not any("no known time" in note for note in found.notes)


@pytest.mark.parametrize(("share", "width"), [(0.0, 0.25), (0.05, 0.25 + 0.05 / 0.95)])
def test_what_is_missing_widens_the_uncertainty_before_it_takes_the_time(share, width):
    kernels = Kernels(effects=[], seconds=None, unknown_share=share)
    recording = SimpleNamespace(assumptions=(), padded_bytes=0)
    found = predict._uncertainty(100, kernels, recording, None, Compiled())
    assert found["step_seconds"] == pytest.approx(width)
