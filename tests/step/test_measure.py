"""`measure` in this process: outcomes, the limit, what is left behind."""

import contextlib
import dataclasses
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from memlab import MemlabError, StepConfig, StepResult, measure, to_frame, workloads
from memlab.devices.here import resolve_device
from memlab.memory import cuda, meter
from memlab.memory.cuda import Peaks
from memlab.running import explain, is_out_of_memory
from memlab.trace import Phase, Place
from tests.models import blocks, linear, unseen_count

PLACE = Place(phase=Phase.FORWARD, micro_batch=0, module="layer.3")


def here(workload, config=None, **options):
    return measure(workload, config or StepConfig(), "cpu", isolate=False, **options)


def test_a_result_says_what_it_is():
    result = here(linear(), repeats=3)
    assert result.outcome == "ok"
    assert result.source == "measured"
    assert result.device == "cpu"
    assert result.versions["torch"] == torch.__version__
    assert len(result.step_seconds_all) == 3
    assert sorted(result.step_seconds_all)[1] == result.step_seconds
    assert result.samples_per_second == pytest.approx(8 / result.step_seconds)
    assert sum(result.peak_by_category.values()) == result.peak_allocated_bytes
    assert sum(h.nbytes for h in result.peak_holdings) == result.peak_allocated_bytes
    assert result.timeline.total_bytes.max() == result.peak_allocated_bytes
    assert (result.peak_reserved_bytes, result.fits) == (None, None)
    assert math.isfinite(result.loss)


def test_a_result_survives_json(tmp_path):
    import json

    result = here(linear(), repeats=1)
    again = StepResult.from_dict(json.loads(json.dumps(result.to_dict())))
    assert again.to_dict() == result.to_dict()
    nan = dataclasses.replace(result, loss=math.nan)
    assert math.isnan(StepResult.from_dict(json.loads(json.dumps(nan.to_dict()))).loss)


def test_the_last_loss_is_that_of_the_updates_before_it():
    first, third = (here(linear(), repeats=n, warmup=0).loss for n in (1, 3))
    assert third < first  # three updates on one batch


@pytest.mark.parametrize("precision", ["as-built", "fp16-mixed"])
def test_a_nan_loss_is_ok_and_not_finite(precision):
    def nan_loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1]) * math.nan

    workload = dataclasses.replace(blocks(), compute_loss=nan_loss)
    result = here(workload, StepConfig(precision=precision), repeats=1)
    assert (result.outcome, result.finite) == ("ok", False), result.message
    assert "not finite" in result.message
    has_state = not any("no optimizer state" in note for note in result.notes)
    assert has_state == (precision == "as-built")


def test_an_error_of_the_model_is_an_outcome_that_names_the_module():
    class Fails(nn.Module):
        def forward(self, x):
            raise KeyError("labels")

    workload = dataclasses.replace(
        linear(), build_model=lambda: nn.Sequential(nn.Linear(300, 3), Fails())
    )
    result = here(workload)
    assert result.outcome == "failed"
    assert "in 1" in result.message
    assert "KeyError" in result.message
    assert result.peak_allocated_bytes is None


@pytest.mark.slow
def test_the_limit_is_accounted_to_the_byte():
    peak = here(linear(), repeats=1).peak_allocated_bytes
    fits = here(linear(), repeats=1, memory_limit=peak)
    assert (fits.outcome, fits.fits, fits.memory_limit_bytes) == ("ok", True, peak)
    over = here(linear(), repeats=1, memory_limit=peak - 1)
    assert (over.outcome, over.fits) == ("out_of_memory", False)
    assert over.peak_allocated_bytes == peak
    assert over.step_seconds is None
    assert "optimizer" in over.message
    assert over.timeline is not None


def test_a_limit_below_the_model_is_crossed_while_it_is_built():
    assert "out of memory in build" in here(linear(), memory_limit="1KiB").message


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            True,
        ),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("could not create a primitive"), True),
        (RuntimeError("could not create a primitive descriptor for the LSTM"), False),
        (RuntimeError("can't start new thread"), True),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_means_out_of_memory(error, is_memory):
    assert is_out_of_memory(error) is is_memory
    assert (explain(error, PLACE)[0] == "out_of_memory") is is_memory


def test_a_missing_kernel_is_unsupported():
    outcome, message = explain(RuntimeError("\"conv\" not implemented for 'Half'"), PLACE)
    assert outcome == "unsupported"
    assert "such as 'fp32'" in message
    assert "layer.3" in message


def test_the_callers_random_numbers_are_left_alone():
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    expected = (torch.rand(1).item(), np.random.rand(), random.random())
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    here(linear(), repeats=1)
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected


def test_progress_is_told_in_words_and_never_falls():
    seen = []
    here(linear(), repeats=2, on_progress=seen.append)
    fractions = [progress.fraction for progress in seen]
    assert fractions == sorted(fractions)
    assert "timing step 2 of 2" in seen[-1].text


def test_fp16_updates_that_overflow_are_counted_out():
    def big_loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1]) * 100

    workload = dataclasses.replace(blocks(), compute_loss=big_loss)
    result = here(workload, StepConfig(precision="fp16-mixed"), repeats=1)
    assert result.outcome == "ok", result.message
    assert any("GradScaler skipped" in note for note in result.notes)
    assert any("slower" in note for note in result.notes)
    assert result.peak_by_category["optimizer_state"] > 0


def test_a_device_that_is_not_here_lists_what_is():
    for name in ("h200", "cuda:99", "mps", "tpu"):
        with pytest.raises(MemlabError) as caught:
            measure(linear(), StepConfig(), name)
        assert f"device={name!r}" in str(caught.value)
        assert "'cpu'" in str(caught.value)
    assert resolve_device("cpu:0") == torch.device("cpu")


def test_a_frame_has_one_row_a_result():
    ok, over = here(linear(), repeats=1), here(linear(), memory_limit="1KiB")
    frame = to_frame([ok, over])
    assert list(frame["outcome"]) == ["ok", "out_of_memory"]
    assert frame.loc[0, "peak_parameters_bytes"] == ok.peak_by_category["parameters"]
    assert frame.loc[0, "batch_size"] == 8
    assert to_frame([]).empty


def test_results_read_as_one_line_and_as_a_table():
    result = here(linear(), repeats=1)
    assert "peak" in str(result)
    assert "allocated" in str(result)
    assert "<table>" in result._repr_html_()
    named = dataclasses.replace(result, workload_name="<b>")
    assert "<b>" not in named._repr_html_()


@pytest.mark.slow
def test_statistics_that_agree_with_the_trace_add_what_is_reserved(monkeypatch):
    peak = here(linear(), repeats=1).peak_allocated_bytes
    peaks = Peaks(allocated_bytes=peak, reserved_bytes=2**21)
    monkeypatch.setattr(cuda, "read_peaks", lambda device: peaks)
    result = here(linear(), repeats=1)
    assert (result.peak_allocated_bytes, result.peak_reserved_bytes) == (peak, 2**21)
    assert sum(result.peak_by_category.values()) == peak


@pytest.mark.parametrize("events", ["as they are", "none"])
def test_statistics_that_disagree_with_the_trace_are_quoted_without_a_breakdown(
    monkeypatch, events
):
    peaks = Peaks(allocated_bytes=12345, reserved_bytes=2**21)
    monkeypatch.setattr(cuda, "read_peaks", lambda device: peaks)
    if events == "none":
        monkeypatch.setattr(meter, "_walk", lambda roots, device: meter._Seen())
    result = here(linear(), repeats=1)
    assert result.outcome == "ok", result.message
    assert (result.peak_allocated_bytes, result.peak_by_category) == (12345, None)
    assert "no breakdown" in result.notes[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-small", "resnet-digits", "vit-digits", "lstm-text"])
def test_the_zoo_runs_and_nets_to_zero(name):
    result = here(workloads.get(name), StepConfig(batch_size=2), repeats=1)
    assert result.outcome == "ok", result.message
    assert not any("still held" in note for note in result.notes)
    again = here(workloads.get(name), StepConfig(batch_size=2), repeats=1)
    assert again.peak_by_category == result.peak_by_category


def test_tensors_that_the_workload_holds_are_counted():
    samples = torch.randn(64, 300)
    workload = dataclasses.replace(linear(), make_batch=lambda n: samples[:n])
    result = here(workload, repeats=1)
    assert result.peak_by_category == here(linear(), repeats=1).peak_by_category


def test_a_model_that_was_not_built_for_this_run_is_refused():
    model = nn.Linear(300, 200, bias=False)
    result = here(dataclasses.replace(linear(), build_model=lambda: model))
    assert result.outcome == "failed"
    assert "copy.deepcopy" in result.message


def test_a_complex_buffer_stays_complex():
    class Rotates(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(300, 2)
            self.register_buffer("turn", torch.polar(torch.ones(8), torch.ones(8)))

        def forward(self, x):
            assert self.turn.is_complex()
            return self.linear(x)

    result = here(dataclasses.replace(linear(), build_model=Rotates), repeats=1)
    assert result.outcome == "ok", result.message
    assert result.peak_by_category["buffers"] == 8 * 8


def test_a_block_that_is_not_the_same_twice_is_unsupported():
    calls = unseen_count()  # which a recompute cannot put back

    class Fickle(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x):
            return self.linear(x) if (calls() + 1) % 3 else self.linear(x).relu().sin()

    workload = dataclasses.replace(
        blocks(), build_model=lambda: nn.Sequential(*(Fickle() for _ in range(4)))
    )
    result = here(workload, StepConfig(checkpointing="blocks"))
    assert result.outcome == "unsupported"
    assert "3 cannot be recomputed: running again, it saves fewer tensors" in result.message


def test_an_earlier_caught_error_is_not_blamed():
    class Catches(nn.Module):
        def forward(self, x):
            raise KeyError("caught by its parent")

    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.quirk = nn.Linear(300, 2), Catches()

        def forward(self, x):
            with contextlib.suppress(KeyError):
                self.quirk(x)
            return self.linear(x)

    def broken_loss(model, x):
        model(x)
        raise RuntimeError("the loss is broken")

    workload = dataclasses.replace(linear(), build_model=Parent, compute_loss=broken_loss)
    assert "quirk" not in here(workload).message


def test_the_limit_of_a_build_says_what_the_build_needs():
    def build():
        torch.ones(2**20)  # 4 MiB that are gone again
        return nn.Linear(300, 200, bias=False)

    message = here(dataclasses.replace(linear(), build_model=build), memory_limit="1MiB").message
    assert "this run needs 4.00 MiB of allocated memory" in message
    assert "batch_size" not in message
