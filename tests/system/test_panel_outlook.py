"""What the panel says of a prediction: badge, costs, the table's error."""

import dataclasses

import pytest

from memlab import Outcome, StepConfig
from memlab._panel import outlook, state
from memlab._panel.outlook import Status
from memlab._panel.runs import Run, RunLog
from memlab.cost_model import power
from memlab.devices.cards import card
from memlab.result import Source
from memlab.runtime.isolation import TOO_LONG
from tests.forecast_parts import MIB, estimate, predicted, question
from tests.panel_parts import make_result, opened


@pytest.mark.parametrize(
    ("limit", "kind", "begin"),
    [
        (200 * MIB, state.GOOD, "fits: 100 of 200 MiB (50 %), predicted"),
        (80 * MIB, state.BAD, "does not fit: 100 of 80.0 MiB (125 %), predicted"),
        (95 * MIB, state.WARN, "too close to say: 100 of 95.0 MiB (105 %), predicted ± 10 %"),
        (109 * MIB, state.WARN, "too close to say: 100 of 109 MiB (92 %), predicted ± 10 %"),
    ],
)
def test_the_badge_of_a_prediction(limit, kind, begin):
    found = state.fit_verdict(predicted(100 * MIB), limit)
    assert (found.kind, found.text) == (kind, begin)


def test_on_cuda_reserved_bytes_are_compared_with_the_limit():
    result = predicted(100 * MIB, peak_reserved_bytes=150 * MIB, device="h200")
    found = state.fit_verdict(result, 120 * MIB)
    assert found.kind == state.BAD
    assert "reserved bytes, predicted for h200" in found.detail
    assert "150 MiB reserved" in outlook_of(estimate=estimate(result)).costs()


def outlook_of(*results, estimate=None, now=None, doing=""):
    log = RunLog()
    for result in results:
        log.add(result)
    asked = now or (estimate.question if estimate else question())
    return outlook.outlook(log, asked, estimate, doing)


def test_a_prediction_that_takes_too_long_is_said_and_a_run_that_did_so_has_its_own_line():
    said = f"not finished after 120 s, while recording tiny; {TOO_LONG}"
    late = predicted(0, outcome=Outcome.TIMED_OUT, message=said)
    with opened() as panel:
        failure = panel._page._failure(outlook_of(estimate=estimate(late)))
    assert failure == {
        "title": "A training step of tiny takes too long to predict",
        "sentence": "not finished after 120 s, while recording tiny. Run measures the step without "
        "a prediction.",
    }
    assert outlook_of(make_result(Outcome.TIMED_OUT, message=said)).failure is None


def test_an_interpolated_prediction_says_so_and_every_number_its_uncertainty():
    result = predicted(2**30, uncertainty={"peak_allocated_bytes": 0.013, "step_seconds": 0.25})
    said = outlook_of(estimate=estimate(result, exact=False)).costs()
    expected = "interpolated for cpu: 1.00 GiB ± 1.3 % allocated, about 500 ms ± 25 % a step"
    assert expected in said
    assert "predicted for cpu" in outlook_of(estimate=estimate(result)).costs()


def test_a_budget_says_what_recomputing_saves_and_costs():
    half = predicted(60 * MIB, config=StepConfig(memory_budget=0.5), step_seconds=0.55)
    asked = estimate(half)
    assert asked.question.plain == question()
    assert question().plain is None
    now = outlook.outlook(RunLog(), asked.question, asked, "", predicted(100 * MIB))
    assert "; recomputing: -40.0 % allocated, +10.0 % time" in now.costs()
    assert "recomputing" not in outlook_of(estimate=asked).costs()


def test_a_run_is_named_with_what_differs_and_is_past_once_the_settings_do():
    config = StepConfig(batch_size=8, precision="bf16-mixed", accumulation_steps=2)
    here, elsewhere = question(config=config), question(16)
    status = outlook.of_run(Run(number=2, result=make_result(config=config)))
    assert status.named(here).startswith("run 2, batch 8, accumulation 2, bf16-mixed: ")
    other = question(config=config, workload_name="another", device="t4")
    assert status.named(other).startswith("run 2, tiny, on cpu, batch")
    assert [status.is_past(asked) for asked in (here, elsewhere, None)] == [False, True, True]
    for asked in (here, elsewhere):
        assert outlook.told(status, asked)["isPast"] == (asked is elsewhere)
    # another sentence goes with its settings too, unless a run goes on
    said = Status(text="an error", question=here)
    assert (said.is_past(here), said.is_past(elsewhere)) == (False, True)
    assert not Status(text="measuring").is_past(elsewhere)


def test_only_predictions_of_one_kind_say_what_recomputing_costs():
    plain = predicted(100 * MIB)

    def said(result, exact=True):
        asked = estimate(result, exact=exact)
        return outlook.outlook(RunLog(), asked.question, asked, "", plain).costs()

    half = predicted(51 * MIB, config=StepConfig(memory_budget=0.5), step_seconds=0.4)
    assert "recomputing" not in said(half, exact=False)
    assert said(half).endswith("recomputing: -49.0 % allocated")  # it cannot save time
    idle = dataclasses.replace(half, peak_allocated_bytes=100 * MIB, step_seconds=0.655)
    words = "recomputing saves nothing here and costs 31 % time: set the budget to 1"
    assert words in said(idle)


def test_a_prediction_on_its_way_greys_what_there_is():
    now = outlook_of(make_result(config=StepConfig(batch_size=2)), doing="starting the worker")
    assert now.fit(None) == state.Verdict(state.OPEN, "predicting")
    assert now.note() == "predicting"
    assert "starting the worker (takes some seconds, once)" in now.costs()


def test_what_cannot_be_predicted_is_a_quiet_sentence_and_the_last_run_stays():
    refused = predicted(outcome=Outcome.UNSUPPORTED, message="eager steps only")
    last = make_result(config=StepConfig(batch_size=2), peak=MIB)
    now = outlook_of(last, estimate=estimate(refused))
    assert "no prediction (unsupported): eager steps only" in now.costs()
    assert now.fit(2 * MIB).text == "last run: fits: 1.00 of 2.00 MiB (50 %), measured"
    assert now.note() == "last run: batch 2; what is set now was not run"
    assert now.last.result is last


def test_a_run_of_this_very_setting_comes_before_its_prediction():
    now = outlook_of(
        make_result(peak=100 * MIB),
        make_result(peak=MIB, config=StepConfig(batch_size=2)),
        estimate=estimate(predicted(99 * MIB)),
    )
    assert now.run.number == 1
    assert "measured" in now.fit(200 * MIB).text
    assert "predicted 99.0 MiB (-1.00 %)" in now.costs()
    assert now.note() == ""


def test_a_laptop_without_a_limit_says_whose_watts_its_time_is_of():
    (note,) = power.notes(card("rtx-3080-laptop-16"), 1.0)
    told = make_result(source=Source.PREDICTED, device="rtx-3080-laptop-16", notes=(note,))
    line = outlook.advice_line(told, [], None)
    assert "of 150 W, the most" in line.text
    assert line.remedy is None
    other = make_result(source=Source.PREDICTED, device="rtx-4090")
    assert outlook.advice_line(other, [], None).text == ""
