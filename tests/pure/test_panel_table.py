"""The table of runs: what its rows name, clear and its undo, CSV."""

import csv
import io

import pytest

from memlab import Outcome, StepConfig
from memlab._panel import outlook, state, table
from memlab._panel.runs import RunLog
from memlab.runtime.verify_report import VerifyReport
from tests.forecast_parts import MIB, predicted, question
from tests.panel_parts import make_result, texts_of_row


def logged(*results):
    log = RunLog()
    for result in results:
        log.add(result)
    return log


def cells(log):
    """Return the texts of the newest row by heading."""
    return texts_of_row(table.told(log))


# rows


def test_a_row_names_its_settings_and_the_limit_on_screen():
    log = RunLog()
    config = StepConfig(
        batch_size=8, accumulation_steps=2, precision="bf16", memory_budget=0.5, optimizer="sgd"
    )
    log.add(make_result(peak=100 * MIB, config=config), limit_bytes=200 * MIB)
    row = cells(log)
    assert [row[name] for name in ("workload", "device", "batch", "acc.", "precision")] == [
        *("tiny", "cpu", "8", "2", "bf16"),
    ]
    assert (row["budget"], row["limit"]) == ("0.50", "fits 200 MiB")
    assert row["other"] == "sgd"
    log.add(make_result(peak=300 * MIB), limit_bytes=200 * MIB)
    assert cells(log)["limit"] == "over 200 MiB"
    kinds = [cell["kind"] for cell in table.told(log)["rows"][-1]["cells"] if "kind" in cell]
    assert kinds == [state.BAD, state.GOOD]  # of the limit, of the outcome


def test_the_error_of_the_time_stands_beside_that_of_the_memory():
    log = RunLog()
    log.add(make_result(peak=100 * MIB), predicted(101 * MIB, step_seconds=0.44))
    row = cells(log)
    assert (row["peak error"], row["time error"]) == ("+1.00 %", "-12.0 %")
    assert (row["time predicted"], row["time measured"]) == ("440 ms", "500 ms")
    titles = [column["title"] for column in table.told(log)["columns"]]
    assert "predicted time divided by measured time, minus one" in titles
    assert all(titles)
    log.add(make_result(Outcome.OUT_OF_MEMORY, step_seconds=None), predicted(step_seconds=1.0))
    assert log.last.time_error is None
    log.add(make_result(), predicted(step_seconds=None))
    assert log.last.time_error is None


def test_the_gradients_have_a_column_once_they_were_checked():
    log = logged(make_result(), make_result())
    assert "gradients" not in cells(log)
    log.change(2, report=VerifyReport(ok=True, why="no difference"))
    assert cells(log)["gradients"] == "same"


def test_a_kept_prediction_is_never_called_measured():
    log = logged(predicted(100 * MIB, device="h200", peak_reserved_bytes=150 * MIB))
    run, row = log.last, cells(log)
    assert (row["peak predicted"], row["time predicted"]) == ("100 MiB", "500 ms")
    assert row.keys().isdisjoint({"peak measured", "time measured"})
    assert row["outcome"] == "predicted"
    assert run.label == "run 1, predicted"
    assert (run.prediction_error, run.time_error) == (None, None)
    assert "measured" not in " ".join(row.values())
    said = outlook.of_run(run)
    assert (said.kind, said.text.startswith(outlook.KEPT)) == (state.OPEN, True)
    failed = logged(predicted(None, outcome=Outcome.FAILED, step_seconds=None))
    assert cells(failed)["outcome"] == "predicted: failed"


def test_a_kept_prediction_is_not_taken_for_a_run_of_the_setting():
    kept = predicted(100 * MIB)
    now = outlook.outlook(logged(kept), question(batch_size=kept.config.batch_size), None, "")
    assert now.run is None
    assert now.last.result is kept


def test_a_row_holds_what_the_page_sorts_filters_and_draws():
    log = logged(
        make_result(peak=3 * MIB, samples_per_second=10.0),
        make_result(Outcome.CANCELLED, peak=None, step_seconds=None),
        predicted(peak_reserved_bytes=2 * MIB, device="h200", workload_name="gpt"),
    )
    log.change(1, name="the plain one")
    log.compared = 1
    ran, stopped, kept = table.told(log)["rows"]
    assert (ran["peakBytes"], ran["samplesPerSecond"], ran["seconds"]) == (3 * MIB, 10.0, 0.5)
    assert (ran["label"], ran["isCompared"], ran["isPredicted"]) == ("the plain one", True, False)
    assert (stopped["peakBytes"], stopped["seconds"], stopped["isStopped"]) == (None, None, True)
    assert (kept["kindOfPeak"], kept["peakBytes"]) == ("reserved", 2 * MIB)
    assert (kept["device"], kept["workload"], kept["isPredicted"]) == ("h200", "gpt", True)
    assert (ran["settings"], ran["setting"]) == (
        "batch 8",
        {"batchSize": 8, "accumulationSteps": 1, "memoryBudget": 1.0},
    )


# clear and its undo


def test_clear_can_be_undone_until_the_next_run():
    log = logged(*(make_result() for _ in range(3)))
    log.compared = 1
    log.clear()
    assert ([run.number for run in log.visible], log.compared) == ([3], 0)
    told = table.told(log)
    assert (told["canUndo"], len(told["rows"]), told["total"]) == (True, 1, 3)
    log.undo_clear()
    assert ([run.number for run in log.visible], log.compared) == ([1, 2, 3], 1)
    assert not table.told(log)["canUndo"]
    log.clear()
    log.add(make_result())
    assert not log.can_undo_clear
    assert [run.number for run in log.visible] == [3, 4]


def test_undoing_a_clear_brings_back_only_what_that_clear_took():
    log = logged(*(make_result() for _ in range(2)))
    log.clear()
    log.add(make_result())
    log.clear()
    log.undo_clear()
    assert [run.number for run in log.visible] == [2, 3]


# CSV


def read(runs):
    return list(csv.DictReader(io.StringIO(table.as_csv(runs))))


def test_the_file_holds_every_run_with_units_in_the_names_of_its_columns():
    log = RunLog()
    log.add(make_result(peak=100 * MIB), predicted(101 * MIB, step_seconds=0.4), 200 * MIB)
    log.add(predicted(50 * MIB, device="h200"))
    log.clear()
    measured, kept = read(log.runs)
    assert measured["peak_allocated_measured_bytes"] == str(100 * MIB)
    assert float(measured["peak_error_fraction"]) == pytest.approx(0.01)
    assert float(measured["time_error_fraction"]) == pytest.approx(-0.2)
    assert (measured["limit_bytes"], measured["fits"]) == (str(200 * MIB), "True")
    assert (kept["source"], kept["peak_allocated_measured_bytes"]) == ("predicted", "")
    assert kept["peak_allocated_predicted_bytes"] == str(50 * MIB)


def test_a_text_survives_the_file_and_is_no_formula():
    said = 'a "quoted", line\nand ü'
    log = logged(make_result(message=said, workload_name="=HYPERLINK(1)"))
    (row,) = read(log.runs)
    assert (row["message"], row["workload"]) == (said, "'=HYPERLINK(1)")
