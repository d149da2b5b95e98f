"""The panel over a recorded device: its runs play back, and where there is none it says so."""

from contextlib import closing

import pytest

import memlab
from memlab import StepConfig, workloads
from memlab._panel import choices, outlook
from memlab.errors import DeviceError
from memlab.result import Source
from memlab.store import recorded
from memlab.store.records import Kind, append
from tests.panel_parts import line, status, until, use
from tests.record_parts import OPTIONS, VISIT, result, run

LABEL = "t4, recorded"


@pytest.fixture
def panel(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded, "FOLDER", tmp_path)
    append(tmp_path / "t4.jsonl", Kind.VISIT, VISIT)
    for batch_size in (4, 8):
        measured = result(StepConfig(batch_size=batch_size), peak_allocated_bytes=batch_size)
        append(tmp_path / "t4.jsonl", Kind.RUN, run(result=measured).to_line())
    with closing(memlab.panel(workloads.get("gpt-small", **OPTIONS), device=LABEL)) as made:
        yield made


def test_it_is_offered_by_its_title_with_the_memory_of_the_card(panel):
    assert ("Tesla T4, recorded", LABEL, "recorded") in choices.devices("cpu")
    assert panel._asked.limit == recorded.capacity(LABEL) > 2**30
    assert "is another machine: Run shows what was measured there" in status(panel)
    with pytest.raises(DeviceError, match="allowed is one of 't4'"):
        panel.set(device="h200, recorded")


def test_run_plays_back_what_was_recorded(panel):
    panel.set(batch_size=4)
    found = panel.run()
    assert (found.source, found.device) == (Source.RECORDED, LABEL)
    assert found.peak_allocated_bytes == 4
    code = panel._asked.source()
    assert "result = memlab.recorded(workload, config, device='t4, recorded')" in code
    assert "memlab.workloads.get('gpt-small', num_layers=1" in code


def test_what_is_not_recorded_leads_to_the_nearest_that_is(panel):
    panel.set(batch_size=9)
    until(lambda: "nearest recorded run is batch_size=8" in line(panel, "advice")["text"])
    assert panel.run().outcome == "unsupported"
    use(panel, "advice")
    assert panel.config == StepConfig(batch_size=8)
    until(lambda: "nearest" not in line(panel, "advice")["text"])
    assert panel.run().peak_allocated_bytes == 8
    panel.set(sample_size=16, batch_size=4)  # nor is this size
    until(lambda: "sequence_length=8" in line(panel, "advice")["text"])
    assert panel.run().outcome == "unsupported"
    panel.set(sample_size=None)
    assert panel.run().peak_allocated_bytes == 4


def test_other_sizes_of_the_workload_are_named(panel):
    with closing(memlab.panel(workloads.get("gpt-small"), device=LABEL)) as other:
        until(lambda: "num_layers=1" in line(other, "advice")["text"])
    assert "memlab.panel(" not in outlook.recorded_line(StepConfig(), None, "").text


def test_a_setting_without_a_control_is_left_to_code():
    nearest = StepConfig(checkpointing="blocks", checkpoint_modules="every 2")
    line = outlook.recorded_line(StepConfig(), nearest, "")
    assert "which memlab.recorded shows" in line.text
    assert line.remedy is None


@pytest.mark.slow
def test_a_prediction_for_it_takes_its_operators_times(panel):
    found = memlab.predict(panel.workload, StepConfig(batch_size=4), LABEL)
    assert (found.outcome, found.device) == ("ok", LABEL), found.message
    assert memlab.predict(panel.workload, StepConfig(batch_size=4), "t4").device == "t4"
    with pytest.raises(DeviceError, match="allowed is one of 't4'"):
        memlab.predict(panel.workload, StepConfig(), "h100, recorded")


def test_a_recorded_size_plays_back_under_the_name_on_screen(panel):
    options = {**OPTIONS, "sequence_length": 16}
    with closing(memlab.panel(workloads.get("gpt-small", **options), device=LABEL)) as other:
        other.set(sample_size=OPTIONS["sequence_length"], batch_size=4)
        found = other.run()
        assert (found.workload_name, found.peak_allocated_bytes) == (other.workload.name, 4)
        assert other._page.outlook().run is not None
