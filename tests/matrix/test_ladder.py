"""The ladder: rungs on top of each other, left out with a reason, drawn as a waterfall."""

import dataclasses

import pytest

import memlab
from benchmarks import ladder as benchmark
from memlab import StepConfig, StepResult
from memlab.errors import MemlabError
from memlab.result import Outcome
from memlab.search.ladder import RUNGS
from tests.figure_parts import texts_of
from tests.models import blocks, linear


def wide():
    return blocks(width=64, depth=3)


def test_each_rung_stands_on_those_before_it_at_the_same_batch():
    rungs = [{"optimizer": "sgd"}, {"precision": "bf16"}]
    plain, first, second = memlab.ladder(wide(), rungs, device="rtx-4090", batch_size=32)
    assert plain.config == StepConfig(batch_size=32)
    assert first.config == dataclasses.replace(plain.config, optimizer="sgd")
    assert second.config == dataclasses.replace(first.config, precision="bf16")
    assert {result.source for result in (plain, first, second)} == {"predicted"}
    states = plain.peak_by_category["optimizer_state"]
    assert first.peak_by_category["optimizer_state"] == 0 < states
    assert second.peak_by_category["parameters"] * 2 == pytest.approx(
        plain.peak_by_category["parameters"], rel=0.05
    )


def test_a_given_rung_that_cannot_be_keeps_its_outcome_and_is_not_stood_on():
    rungs = [{"offload_activations": True}, {"optimizer": "sgd"}]
    plain, refused, after = memlab.ladder(linear(), rungs, device="cpu", batch_size=4, repeats=1)
    assert (plain.outcome, refused.outcome, after.outcome) == ("ok", "unsupported", "ok")
    assert "does nothing on a CPU" in refused.message
    assert not after.config.offload_activations
    assert {plain.source, after.source} == {"measured"}


def test_of_the_usual_rungs_what_cannot_be_or_spares_nothing_is_named():
    results = memlab.ladder(wide(), device="cpu", batch_size=64, repeats=1)
    assert {result.outcome for result in results} == {Outcome.OK}
    peaks = [result.peak_allocated_bytes for result in results]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)
    left_out = [note for note in results[-1].notes if "is left out: " in note]
    assert len(results) - 1 + len(left_out) == len(RUNGS)
    assert any("offload_activations=True is left out: " in note for note in left_out)
    assert all("is left out: " not in note for result in results[:-1] for note in result.notes)


def test_a_rung_that_raises_what_is_reserved_is_left_out_whatever_is_allocated(monkeypatch):
    known = {"source": "predicted", "device": "h200", "versions": {}, "workload_name": "linear"}
    plain = StepResult(outcome=Outcome.OK, message="", config=StepConfig(batch_size=4), **known)

    def raising(workload, config, device, **_):
        peaks = (150, 60) if config.optimizer_in_backward else (100, 80)
        peaks = (100, 70) if config.expandable_segments else peaks
        return dataclasses.replace(
            plain, config=config, peak_reserved_bytes=peaks[0], peak_allocated_bytes=peaks[1]
        )

    monkeypatch.setattr("memlab.search.ladder.predict", raising)
    found = memlab.ladder(linear(), device="h200", batch_size=4)
    assert [result.peak_allocated_bytes for result in found] == [80, 70]
    assert not found[-1].config.optimizer_in_backward
    said = dict(
        note.split(" is left out: ") for note in found[-1].notes if " is left out: " in note
    )
    assert said["optimizer_in_backward=True"] == "it raises the peak here"
    assert said["optimizer='adafactor'"] == "it does not lower the peak here"


@pytest.mark.slow
def test_all_rungs_hold_the_factor_of_a_large_vit():
    every = {name: value for rung in RUNGS for name, value in rung.items()}
    workload = memlab.workloads.get("vit-large")
    plain, last = (
        memlab.predict(workload, config, benchmark.CARD, timeout_seconds=600)
        for config in (StepConfig(batch_size=64), StepConfig(batch_size=64, **every))
    )
    assert plain.peak_reserved_bytes / last.peak_reserved_bytes >= benchmark.PEAK_GOAL


def test_a_rung_that_crashes_is_not_stood_on(monkeypatch):
    plain = memlab.predict(linear(), StepConfig(batch_size=4), "h200")

    def crashing(workload, config, device, **_):
        outcome = Outcome.CRASHED if config.optimizer == "sgd" else Outcome.OK
        return dataclasses.replace(plain, config=config, outcome=outcome)

    monkeypatch.setattr("memlab.search.ladder.predict", crashing)
    rungs = [{"optimizer": "sgd"}, {"precision": "bf16"}]
    found = memlab.ladder(linear(), rungs, device="h200", batch_size=4)
    assert [result.outcome for result in found] == ["ok", "crashed", "ok"]
    assert found[2].config.optimizer == "adamw"


@pytest.mark.parametrize(
    ("rungs", "said"),
    [
        ([{"optimiser": "sgd"}], r"'optimiser'; allowed is a field of StepConfig.*optimizer"),
        ([{"batch_size": 8}], "'batch_size'; allowed is a field"),
        ([{"accumulation_steps": 128}], "accumulation_steps"),
        ([{"precision": "int3"}], "precision='int3'"),
    ],
)
def test_a_rung_that_is_no_config_raises_before_anything_runs(rungs, said, monkeypatch):
    monkeypatch.setattr("memlab.search.ladder.measure", pytest.fail)
    with pytest.raises(MemlabError, match=said):
        memlab.ladder(linear(), rungs, device="cpu", batch_size=4)
    with pytest.raises(MemlabError, match="no-such-card"):
        memlab.ladder(linear(), [], device="no-such-card")


def test_the_waterfall_says_what_each_rung_changed_and_spared():
    rungs = [{"optimizer": "sgd"}, {"precision": "bf16"}]
    results = memlab.ladder(wide(), rungs, device="rtx-4090", batch_size=32)
    figure = memlab.plots.waterfall(results)
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["plain", "optimizer=sgd", "precision=bf16"]
    times = results[0].peak_reserved_bytes / results[2].peak_reserved_bytes
    assert any(f"{times:.1f}x less" in text for text in texts_of(figure))
    assert any("reserved (predicted" in text for text in texts_of(figure)), texts_of(figure)
    bars = {round(bar.get_width()) for bar in figure.axes[0].patches}
    assert {result.peak_reserved_bytes for result in results} <= bars


def test_the_waterfall_stands_with_a_refused_rung_with_reports_and_with_nothing():
    plain, _, after = results = memlab.ladder(
        linear(), [{"offload_activations": True}, {"optimizer": "sgd"}], device="cpu", repeats=1
    )
    reports = [memlab.verify(linear(), r.config, "cpu", isolate=False) for r in (plain, after)]
    figure = memlab.plots.waterfall([plain, after], reports=reports)
    assert sum("gradient error" in text for text in texts_of(figure)) == 2
    said = texts_of(memlab.plots.waterfall(results))
    assert "unsupported" in said
    assert any("allocated (measured" in text for text in said), said
    assert "No rung yet." in texts_of(memlab.plots.waterfall([]))


def test_training_is_judged_by_the_spread_of_the_seeds(monkeypatch):
    losses = {"adamw": [0.3, 0.5], "sgd": [0.4, 0.4], "adam": [0.9, 0.9], "adafactor": [0.1, 0.2]}
    monkeypatch.setattr(
        benchmark,
        "final_loss",
        lambda workload, config, updates, seed: losses[config.optimizer][seed],
    )

    def goal(optimizer):
        return benchmark.trained(StepConfig(optimizer=optimizer), quick=True)[1]["goal"]

    assert goal("sgd") == "met"
    assert goal("adam") == "MISSED"
    assert goal("adafactor") == "met, lower"


def test_training_runs_and_its_loss_falls():
    fits_zero = dataclasses.replace(
        wide(), compute_loss=lambda model, batch: model(batch[0]).square().mean()
    )
    few, more = (
        benchmark.final_loss(fits_zero, StepConfig(batch_size=32), updates, seed=0)
        for updates in (1, 60)
    )
    assert more < few
