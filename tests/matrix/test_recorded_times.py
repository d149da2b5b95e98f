"""A time of a recorded device with unknown parts is a bound in words, and no number."""

from types import SimpleNamespace

import pytest

import memlab
from memlab import StepConfig, workloads
from memlab.cost_model.targets import Kernels
from memlab.prediction import predict
from memlab.prediction.memory_widths import Compiled

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
    recording = SimpleNamespace(assumptions=())
    found = predict._uncertainty(100, kernels, recording, None, Compiled())
    assert found["step_seconds"] == pytest.approx(width)
