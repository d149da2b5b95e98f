"""The result of a whole run, and its picture: what does not fit is named, every byte is drawn."""

import dataclasses
import json

import pytest

from memlab import Evaluation, MemlabError, Outcome, StepConfig, TrainingRun, plots
from memlab.prediction.run_result import RunResult, StageCost
from memlab.prediction.run_stages import judged
from memlab.result import Source

MIB = 2**20


def stage(name, allocated, reserved=None, **held):
    return StageCost(
        name=name, peak_allocated_bytes=allocated, peak_reserved_bytes=reserved,
        bytes_by_category=held or {"parameters": allocated},
    )  # fmt: skip


def result_of(*stages, limit=None):
    found = RunResult(
        outcome=Outcome.OK, message="", source=Source.PREDICTED, device="t4", versions={},
        config=StepConfig(), run=TrainingRun(), workload_name="mine", stages=stages,
        memory_limit_bytes=limit, uncertainty=0.01,
    )  # fmt: skip
    counted = [found.counted(each) for each in stages]
    return dataclasses.replace(found, stages=judged(stages, counted, limit))


def test_a_run_names_the_stage_of_its_peak_and_what_does_not_fit():
    step = stage("step", 60 * MIB, parameters=20 * MIB, activations=40 * MIB)
    evaluation = stage("evaluation", 90 * MIB, **{"kept outputs": 90 * MIB})
    close = stage("saving", int(79.9 * MIB))
    found = result_of(step, evaluation, close, limit=80 * MIB)
    assert found.worst.name == "evaluation"
    assert [str(each.fit) for each in found.stages] == ["fits", "does not fit", "too close"]
    assert found.fits is False
    assert str(found) == (
        "mine on t4: the peak is in the evaluation: 90.0 MiB allocated; evaluation does not fit "
        "80.0 MiB"
    )
    fine = result_of(step, close, limit=80 * MIB)
    assert str(fine).endswith("every stage fits 80.0 MiB, saving only within the uncertainty")
    assert result_of(step).fits is None
    with pytest.raises(MemlabError, match="'generation' is no stage of this run"):
        found.stage("generation")


def test_a_run_of_a_workload_comes_back_from_its_json():
    run = TrainingRun(evaluate=Evaluation(batch_size=4), save=True, ema=True)
    found = dataclasses.replace(result_of(stage("step", 60 * MIB, 70 * MIB), limit=MIB), run=run)
    data = json.loads(json.dumps(found.to_dict()))
    assert RunResult.from_dict(data) == found
    for name, wrong in (("stages", [{"name": "step"}]), ("outcome", "fine"), ("config", "x=1")):
        with pytest.raises(MemlabError):
            RunResult.from_dict({**data, name: wrong})


def test_the_picture_draws_every_byte_of_every_stage():
    step = stage("step", 60 * MIB, 70 * MIB, parameters=20 * MIB, activations=40 * MIB)
    held = {"kept outputs": 50 * MIB, "EMA weights": 25 * MIB, "KV cache": 15 * MIB}
    evaluation = stage("evaluation", 90 * MIB, 100 * MIB, **held)
    figure = plots.run(result_of(step, evaluation, limit=80 * MIB))
    allocated, reserved = figure.axes
    assert sum(box.get_width() for box in allocated.patches) == 150 * MIB
    assert [box.get_width() for box in reserved.patches] == [70 * MIB, 100 * MIB]
    # the limit counts against what is reserved, and stands there only
    assert [line.get_xdata()[0] for line in reserved.lines] == [80 * MIB]
    assert not allocated.lines
    # a label stands at the end of its bar, or after the limit where its line would go through it
    assert [label.get_position()[0] for label in reserved.texts] == [80 * MIB, 100 * MIB]
    said = [text.get_text() for text in figure.texts]
    assert "MiB reserved, limit 80.0 MiB" in said
    assert any("the peak is in the evaluation" in text for text in said)
    assert plots.to_png(figure)[1:4] == b"PNG"
    failed = dataclasses.replace(result_of(), outcome=Outcome.UNSUPPORTED, message="no cache here")
    assert "no cache here" in plots.run(failed).texts[0].get_text()
