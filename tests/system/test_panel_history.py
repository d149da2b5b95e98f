"""What comes back into the panel of a cell from earlier kernels: settings and runs, from a file."""

import json
import subprocess
import sys
import threading

import numpy as np
import pytest

import memlab
from memlab import StepConfig, workloads
from memlab._panel import asked, runs, state
from memlab._panel.runs import FILE_NAME, History, Run
from memlab.result import StepResult
from memlab.runtime.verify_report import VerifyReport
from memlab.store import recorded
from memlab.store.records import Kind, append
from memlab.trace import CATEGORIES, Timeline
from tests.panel_parts import PATIENCE_SECONDS, move, press, rested, row, status, until
from tests.record_parts import OPTIONS, VISIT, result, run

LABEL = "t4, recorded"


@pytest.fixture(autouse=True)
def cell(tmp_path, monkeypatch):
    """Let panels be those of one cell, with a cache of their own; return how to change the cell."""
    monkeypatch.setenv("MEMLAB_CACHE", str(tmp_path / "cache"))

    def be(name):
        monkeypatch.setattr(asked, "place", lambda: name)

    be("notebook.ipynb one 0")
    return be


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """Return a function that shows a panel over a recorded device, where a run takes no time."""
    monkeypatch.setattr(recorded, "FOLDER", tmp_path)
    append(tmp_path / "t4.jsonl", Kind.VISIT, VISIT)
    measured = result(StepConfig(batch_size=4), peak_allocated_bytes=4, message="it ran")
    append(tmp_path / "t4.jsonl", Kind.RUN, run(result=measured).to_line())
    made = []

    def show(**arguments):
        made.append(memlab.panel(workloads.get("gpt-small", **OPTIONS), device=LABEL, **arguments))
        return made[-1]

    yield show
    for panel in made:
        panel.close()


def close(panel):
    """Close a panel once it has kept what is on its screen."""
    rested(panel)
    panel.close()


def test_ranks_come_back(shown):
    ranks = StepConfig(batch_size=8, sharding="hybrid", world_size=4, shard_group_size=2)
    before = shown()
    before.set(device="cpu", **{name: getattr(ranks, name) for name in state.FIELDS})
    close(before)
    assert shown().config == ranks


def test_settings_and_runs_come_back_into_the_panel_of_the_same_cell(shown):
    before = shown()
    move(before, batch_size=4, memory_limit="3 GiB")
    before.run()
    press(before, "pin", run=1, name="small")
    close(before)

    after = shown()
    told = after._told.asked
    assert (told["by"], told["fields"]["batch_size"], told["fields"]["memory_limit"]) == (
        "kernel", 4, "3 GiB",
    )  # fmt: skip
    assert after._log.runs[0].label == "small"
    assert after._log.runs[0].result.to_dict() == before.result.to_dict()
    assert after.result is None
    now = after._page.outlook()  # an earlier run is none of the model as it is now
    assert now.run is None
    assert now.last.is_earlier
    assert "run 1, earlier, batch 4: it ran" in status(after)
    assert after.results["is_earlier"].tolist() == [True]
    assert row(after)["#"] == "1 earlier small"
    assert after._told.runs["rows"][0]["isEarlier"]
    after.run()
    assert [run.number for run in after._log.runs] == [1, 2]
    close(after)
    named = shown(config=StepConfig(batch_size=6))  # what the code names is as it says
    assert (named.config.batch_size, named._asked.settings["memory_limit"]) == (6, "3 GiB")


def test_panels_of_other_cells_stay_apart(shown, cell):
    before = shown()
    before.set(batch_size=4)
    before.run()
    close(before)

    cell("notebook.ipynb two 0")
    other = shown()
    assert (other.config.batch_size, other.result) == (StepConfig().batch_size, None)


def test_without_a_cell_nothing_is_written_or_read(shown, cell, tmp_path):
    cell("")
    before = shown()
    before.set(batch_size=4)
    before.run()
    close(before)
    assert not (tmp_path / "cache" / FILE_NAME).exists()
    assert shown().result is None


def test_a_run_keeps_its_prediction_and_its_comparison_of_gradients(tmp_path):
    history = History("a cell")
    report = VerifyReport(ok=True, why="same", max_relative_error=1e-7, num_updates=3)
    kept = Run(number=1, result=result(StepConfig(batch_size=4)), report=report)
    history.note_run(kept)
    predicted = result(StepConfig(batch_size=4), peak_allocated_bytes=7)
    history.note_changes(Run(number=1, result=kept.result, prediction=predicted, key=kept.key),
                         ["prediction"])  # fmt: skip

    (found,) = History("a cell").runs()
    assert found.report == report
    assert found.result.to_dict() == kept.result.to_dict()
    assert found.prediction.to_dict() == predicted.to_dict()
    assert found.is_earlier


def test_what_a_closed_panel_still_notes_is_not_written(tmp_path):
    history = History("a cell")
    history.note_settings({"batch_size": 2})
    history.close()
    history.note_settings({"batch_size": 48})
    assert History("a cell").settings == {"batch_size": 2}


def test_lines_that_cannot_be_read_are_passed_over(tmp_path):
    history = History("a cell")
    history.note_run(Run(number=1, result=result(StepConfig(batch_size=2))))
    history.close()
    path = tmp_path / "cache" / FILE_NAME
    line = json.dumps({"cell": "a cell", "key": "x", "run": {"result": 3}})
    path.write_text(f"{path.read_text()}{line}\n" + path.read_text()[:50])

    assert [run.result.config.batch_size for run in History("a cell").runs()] == [2]


def test_runs_that_the_first_panels_wrote_come_back(tmp_path):
    written = {"result": result(StepConfig(batch_size=4)).to_dict(), "name": "plain"}
    path = tmp_path / "cache" / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"cell": "a cell", "key": "x", "run": written}) + "\n")
    (run,) = History("a cell").runs()
    assert (run.name, run.result.config.batch_size) == ("plain", 4)


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEMLAB_CACHE", str(tmp_path / "file"))
    history = History("a cell")
    history.note_run(Run(number=1, result=result(StepConfig())))
    history.note_settings({"batch_size": 1})
    assert (history.runs(), history.settings) == ([], {})


# how lines are written


def lines(tmp_path):
    text = (tmp_path / "cache" / FILE_NAME).read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_no_caller_waits_until_a_run_is_written(tmp_path, monkeypatch):
    threads, to_dict = [], StepResult.to_dict

    def spied(self):
        threads.append(threading.current_thread())
        return to_dict(self)

    monkeypatch.setattr(StepResult, "to_dict", spied)
    History("a cell").note_run(Run(number=1, result=result(StepConfig())))
    until(lambda: threads and (tmp_path / "cache" / FILE_NAME).exists())
    assert threading.main_thread() not in threads


def test_of_a_name_that_is_typed_only_the_last_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "MOMENT_SECONDS", PATIENCE_SECONDS)
    history, typed = History("a cell"), "a good name"
    run = Run(number=1, result=result(StepConfig()))
    history.note_run(run)
    runs.WRITER.flush()
    history.note_settings({"batch_size": object()})  # cannot be written, and takes no other along
    runs.WRITER.flush()
    history.note_settings({"batch_size": 1})
    for end in range(1, 1 + len(typed)):
        history.note_changes(Run(number=1, result=run.result, key=run.key, name=typed[:end]),
                             ["name"])  # fmt: skip
    history.note_changes(Run(number=1, result=run.result, key=run.key, cleared=True), ["cleared"])
    runs.WRITER.flush()

    run_line, *others = lines(tmp_path)
    assert "run" in run_line
    assert [line.get("changes", line.get("settings")) for line in others] == [
        {"batch_size": 1},
        {"name": typed},
        {"cleared": True},
    ]


@pytest.mark.slow
def test_what_waits_is_written_when_the_kernel_ends(tmp_path):
    code = "from memlab._panel.runs import History; History('a').note_settings({'x': 1})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_SECONDS)
    assert lines(tmp_path) == [{"cell": "a", "settings": {"x": 1}}]


def test_a_run_with_its_timeline_takes_few_bytes_and_comes_back_to_the_byte(tmp_path):
    moves = np.random.default_rng(0).integers(0, 2**20, (2500, len(CATEGORIES)))
    moves[:, 1:] = 0  # as in a step, one category changes at a time
    count = np.arange(len(moves))
    timeline = Timeline(
        bytes_by_category=2**30 + np.cumsum(moves, axis=0),
        phase=(count // 1000).astype(np.int8),
        micro_batch=np.zeros(len(moves), np.int32),
        operator=count.astype(np.int32),
    )
    made = result(StepConfig(), timeline=timeline)
    history = History("a cell")
    history.note_run(Run(number=1, result=made))
    (found,) = History("a cell").runs()
    assert found.result.to_dict() == made.to_dict()
    size = (tmp_path / "cache" / FILE_NAME).stat().st_size
    assert size < len(json.dumps(made.to_dict())) / 8
