"""The table of runs: what its rows name, their order, the filter, clear and its undo, CSV."""

import csv
import io
import re
import threading
import urllib.parse

import pytest

from memlab import Outcome, StepConfig
from memlab._panel import app, outlook, state
from memlab._panel import table as csv_link
from memlab._panel import table as rows
from memlab._panel.runs import RunLog
from memlab._panel.table import Table
from memlab._panel.texts import Line
from memlab.runtime.verify_report import VerifyReport
from tests.forecast_parts import MIB, predicted, question
from tests.panel_parts import make_result, until


def logged(*results):
    log = RunLog()
    for result in results:
        log.add(result)
    return log


def cells(log):
    """Return the texts of the first row by heading."""
    table = rows.table_html(log.visible[::-1])
    heads = re.findall(r"<th[^>]*>([^<]*)</th>", table)
    first = table.split("<tbody><tr", 1)[1].split("</tr>", 1)[0]
    texts = [re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<td.*?</td>", first)]
    return dict(zip(heads, texts, strict=True))


@pytest.fixture
def table():
    made = Table(logged(), lambda: None)
    yield made
    made.close()
    made.box.close()


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
    assert (row["budget"], row["limit"]) == ("0.50", "✔ fits 200 MiB")
    assert row["other"] == "sgd"
    log.add(make_result(peak=300 * MIB), limit_bytes=200 * MIB)
    assert cells(log)["limit"] == "✖ over 200 MiB"


def test_the_error_of_the_time_stands_beside_that_of_the_memory():
    log = RunLog()
    log.add(make_result(peak=100 * MIB), predicted(101 * MIB, step_seconds=0.44))
    row = cells(log)
    assert (row["peak error"], row["time error"]) == ("+1.00 %", "-12.0 %")
    assert (row["time predicted"], row["time measured"]) == ("440 ms", "500 ms")
    titles = re.findall(r'title="([^"]*)"', rows.table_html(log.visible).split("<tbody>")[0])
    assert "predicted time divided by measured time, minus one" in titles
    assert len(titles) == rows.table_html(log.visible).count("<th ")
    log.add(make_result(Outcome.OUT_OF_MEMORY, step_seconds=None), predicted(step_seconds=1.0))
    assert log.last.time_error is None
    log.add(make_result(), predicted(step_seconds=None))
    assert log.last.time_error is None


def test_the_gradients_have_a_column_once_they_were_checked():
    log = logged(make_result(), make_result())
    assert "gradients" not in cells(log)
    log.change(2, report=VerifyReport(ok=True, why="no difference"))
    assert cells(log)["gradients"] == "✔ same"


def test_a_kept_prediction_is_never_called_measured():
    log = logged(predicted(100 * MIB, device="h200", peak_reserved_bytes=150 * MIB))
    run, row = log.last, cells(log)
    assert (row["peak predicted"], row["time predicted"]) == ("100 MiB", "500 ms")
    assert row.keys().isdisjoint({"peak measured", "time measured"})
    assert row["outcome"] == "○ predicted"
    assert run.label == "run 1, predicted"
    assert (run.prediction_error, run.time_error) == (None, None)
    assert "measured" not in " ".join(row.values())
    said = outlook.of_run(run)
    assert (said.kind, said.text.startswith(outlook.KEPT)) == (state.OPEN, True)
    failed = logged(predicted(None, outcome=Outcome.FAILED, step_seconds=None))
    assert cells(failed)["outcome"] == "○ predicted: failed"


def test_a_kept_prediction_is_not_taken_for_a_run_of_the_setting():
    kept = predicted(100 * MIB)
    now = outlook.outlook(logged(kept), question(batch_size=kept.config.batch_size), None, "")
    assert now.run is None
    assert now.last.result is kept
    still = app.still_of(logged(kept), now.last, None)
    assert f"<b>tiny, predicted for {kept.device}: budget 1, batch" in still["text/html"]
    assert still["image/png"].startswith("iVBOR")


def test_every_cell_is_escaped():
    evil = '<img src=x onerror="x">'
    log = RunLog()
    log.add(make_result(workload_name=evil, message=evil, device=evil), limit_bytes=MIB)
    log.pin(1, evil)
    assert evil not in rows.table_html(log.visible)
    assert "&lt;img" in rows.table_html(log.visible)
    assert evil not in Line(evil).html()
    assert evil not in app.as_html([log.last], log.last, None)


# order and filter


def numbers(log, words="", order=rows.NEWEST, stopped=False):
    found = rows.listed(log.visible, words=words, order=order, stopped=stopped)
    return [run.number for run in found]


def test_rows_are_sorted_and_those_without_the_number_come_last():
    log = logged(
        make_result(peak=3 * MIB, samples_per_second=10.0),
        make_result(peak=1 * MIB, samples_per_second=30.0),
        make_result(Outcome.FAILED, peak=None, step_seconds=None),
        make_result(peak=2 * MIB, samples_per_second=20.0),
    )
    assert numbers(log) == [4, 3, 2, 1]
    assert numbers(log, order=rows.LEAST) == [2, 4, 1, 3]
    assert numbers(log, order=rows.FASTEST) == [2, 4, 1, 3]


def test_a_row_is_found_by_all_of_the_words_in_any_of_its_columns():
    log = logged(
        make_result(workload_name="GPT", device="h200", config=StepConfig(optimizer="sgd")),
        make_result(workload_name="GPT", device="cpu"),
    )
    assert numbers(log, "gpt") == [2, 1]
    assert numbers(log, "gpt  H200") == [1]
    assert numbers(log, "sgd") == [1]
    assert numbers(log, "nothing") == []


def test_stopped_runs_are_folded_away_until_they_are_asked_for_or_pinned():
    log = logged(make_result(), make_result(Outcome.CANCELLED, peak=None, step_seconds=None))
    assert numbers(log) == [1]
    assert numbers(log, stopped=True) == [2, 1]
    log.pin(2, "why")
    assert numbers(log) == [2, 1]


def test_the_bar_says_how_many_rows_are_shown_and_how_many_runs_were_stopped(table):
    table._log.add(make_result())
    table._log.add(make_result(Outcome.CANCELLED, peak=None, step_seconds=None))
    table.show()
    assert "runs: 1 of 2" in table._count.value
    assert (table.stopped.description, table.stopped.disabled) == ("1 stopped", False)
    table.stopped.value = True
    assert "runs: 2" in table._count.value
    table.words.value = "nothing of this"
    assert "No run has all of these words" in table._table.value


def test_the_buttons_of_a_row_are_those_of_its_run_in_any_order(table):
    for peak in (MIB, 3 * MIB, 2 * MIB):
        table._log.add(make_result(peak=peak))
    table.order.value = rows.LEAST
    assert [pin.description for pin, _ in table._toggles] == [
        *("pin run 1", "pin run 3", "pin run 2"),
    ]
    table._toggles[1][0].value = True
    assert [run.number for run in table._log.runs if run.name] == [3]
    table.words.value = "3.00 MiB"
    assert len(table._buttons.children) == 1 + 1
    assert table._toggles[0][1].description == "compare run 2"


@pytest.mark.parametrize("what", ["pin", "name"])
def test_what_a_person_does_while_the_rows_are_shown_is_not_lost(table, what):
    table._log.add(make_result(peak=MIB))
    table._log.pin(1, "run 1")
    table.show()
    pin, _ = table._toggles[0]
    widget, value = (pin, False) if what == "pin" else (table.name, "good")

    def do(_):
        """Do it in another thread, as a person does, and wait until its widget knows."""
        thread.start()
        until(lambda: widget.value == value)

    thread = threading.Thread(target=lambda: setattr(widget, "value", value))
    table._corner.observe(do, "value")
    table._show_name = lambda: (Table._show_name(table), setattr(table._corner, "value", "now"))
    table.show()
    thread.join()

    assert table._log.runs[0].name == ("" if what == "pin" else "good")
    assert widget.value == value


# clear and its undo


def test_clear_can_be_undone_until_the_next_run():
    log = logged(*(make_result() for _ in range(3)))
    log.pin(2, "good")
    log.pin(2, "")
    log.compared = 1
    log.clear()
    assert ([run.number for run in log.visible], log.compared) == ([3], 0)
    assert log.can_undo_clear
    log.undo_clear()
    assert ([run.number for run in log.visible], log.compared) == ([1, 2, 3], 1)
    assert not log.can_undo_clear
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


def test_the_button_offers_the_undo_in_its_place(table):
    assert table.clear.disabled
    for _ in range(2):
        table._log.add(make_result())
    table.show()
    assert (table.clear.description, table.clear.disabled) == ("clear", False)
    table.clear.click()
    assert (table.clear.description, table.clear.disabled) == ("undo clear", False)
    table.clear.click()
    assert [run.number for run in table._log.visible] == [1, 2]
    assert table.clear.description == "clear"


# CSV


def read(runs):
    return list(csv.DictReader(io.StringIO(csv_link.as_csv(runs))))


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


def test_the_link_holds_the_file_and_nothing_that_ends_its_attribute():
    log = logged(make_result(message="\"><script>x</script>&'"))
    link = csv_link.link(log.runs)
    assert "<script>" not in link
    data = re.search(r'href="data:text/csv;charset=utf-8,([^"]*)"', link).group(1)
    assert urllib.parse.unquote(data) == csv_link.as_csv(log.runs)
    assert "href" not in csv_link.link([])
