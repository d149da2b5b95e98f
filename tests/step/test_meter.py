"""The meter against bytes counted by hand."""

import dataclasses

import pytest
import torch
from torch import nn

from memlab import StepConfig, measure
from memlab.memory.meter import Meter, record
from memlab.techniques.optimizers.optimizers import states_of
from memlab.trace import Phase
from tests.models import IN, OUT, linear, made_of

CPU = torch.device("cpu")
SGD = StepConfig(batch_size=16, optimizer="sgd")


def measured(workload, config, **options):
    result = measure(workload, config, "cpu", repeats=1, isolate=False, **options)
    assert result.outcome == "ok", result.message
    return result


def test_a_linear_is_counted_to_the_byte():
    n = SGD.batch_size
    result = measured(linear(), SGD)
    weight, inputs, output = 4 * IN * OUT, 4 * n * IN, 4 * n * OUT
    assert result.peak_by_category["parameters"] == weight
    assert result.peak_by_category["inputs"] == inputs
    assert result.peak_by_category["optimizer_state"] == 0
    assert result.peak_by_category["gradients"] == weight
    # the peak is in backward, when mm makes the weight's gradient from the inputs and the output's
    # gradient; the output itself is gone by then, the loss and its gradient of 1.0 are not
    assert result.peak_allocated_bytes == weight + inputs + weight + output + 4 + 4
    assert result.peak_place.phase is Phase.BACKWARD
    assert result.peak_place.operator == "aten::mm"
    assert result.first_step_peak_bytes == result.peak_allocated_bytes
    assert result.peak_reserved_bytes is None


def test_the_whole_life_nets_to_zero():
    def run():
        model = nn.Linear(10, 10)
        model(torch.randn(4, 10)).sum().backward()

    trace = record(run, Meter(), CPU)
    assert trace.leftover_bytes == 0
    assert trace.nbytes.sum() == 0
    assert (trace.nbytes > 0).sum() == (trace.nbytes < 0).sum() > 0


def test_older_tensors_that_die_inside_do_not_count():
    older = [torch.ones(1000)]

    def run():
        older.clear()
        torch.ones(10)

    trace = record(run, Meter(), CPU)
    assert trace.nbytes.tolist() == [40, -40]


def test_leftovers_are_told():
    kept = []
    trace = record(lambda: kept.append(torch.ones(25)), Meter(), CPU)
    assert trace.leftover_bytes == 100


def test_two_profiles_in_one_process_agree():
    first, second = (measured(linear(), SGD).peak_allocated_bytes for _ in range(2))
    assert first == second


def test_events_name_phase_module_and_operator():
    meter = Meter()

    def run():
        model = nn.Sequential(nn.Linear(10, 20), nn.ReLU())
        with meter.modules(model):
            meter.mark(0, Phase.FORWARD, 0)
            out = model(torch.randn(4, 10))
            meter.mark(0, Phase.BACKWARD, 0)
            out.sum().backward()

    trace = record(run, meter, CPU)
    places = [trace.place(i) for i in range(len(trace.nbytes))]
    forward = next(p for p in places if p.operator == "aten::addmm")
    assert (forward.phase, forward.module) == (Phase.FORWARD, "0")
    backward = next(p for p in places if p.operator == "aten::mm")
    assert (backward.phase, backward.module) == (Phase.BACKWARD, "0")


def test_the_meter_keeps_no_failed_frame_alive():
    def run():
        class Fails(nn.Module):
            def forward(self, x):
                doubled = x * 2
                raise KeyError(str(doubled.shape))

        model = nn.Sequential(Fails())
        with meter.modules(model), pytest.raises(KeyError) as caught:
            model(torch.randn(1000))
        failed.append(meter.place_of(caught.value).module)
        assert meter.place_of(ValueError()).module == ""  # another error is not blamed on it

    meter, failed = Meter(), []
    trace = record(run, meter, CPU)
    assert failed == ["0"]
    assert trace.leftover_bytes == 0


def test_bf16_halves_weights_and_states():
    fp32 = measured(linear(), StepConfig()).peak_by_category
    bf16 = measured(linear(), StepConfig(precision="bf16")).peak_by_category
    for name in ("parameters", "gradients", "inputs"):
        assert 2 * bf16[name] == fp32[name], name


def test_tied_weights_count_once():
    def build():
        model = nn.Sequential(nn.Linear(50, 50, bias=False), nn.Linear(50, 50, bias=False))
        model[1].weight = model[0].weight
        return model

    workload = made_of(build, (50,), lambda model, x: model(x).mean())
    assert measured(workload, SGD).peak_by_category["parameters"] == 4 * 50 * 50


def test_inputs_are_the_whole_batch_on_a_cpu_whatever_the_accumulation():
    for steps in (1, 4):
        result = measured(linear(), dataclasses.replace(SGD, accumulation_steps=steps))
        assert result.peak_by_category["inputs"] == 4 * SGD.batch_size * IN


def test_the_peak_is_told_by_parameter_module_and_operator():
    result = measured(linear(), dataclasses.replace(SGD, optimizer="adamw"))
    weight = 4 * IN * OUT
    held = {(h.category, h.module): h for h in result.peak_holdings}
    assert sum(h.nbytes for h in result.peak_holdings) == result.peak_allocated_bytes
    assert held["parameters", "weight"].nbytes == weight
    assert held["gradients", "Linear"].operator == "aten::mm"
    state = [h for h in result.peak_holdings if h.category == "optimizer_state"]
    assert {h.module for h in state} == {"weight"}
    assert sum(h.nbytes for h in state) == 2 * weight + 4
    sizes = [h.nbytes for h in result.peak_holdings]
    assert sizes == sorted(sizes, reverse=True)


def test_tied_weights_are_told_by_their_first_path():
    model = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    meter = Meter()
    meter.know(model)
    assert list(meter.parameters.values()) == ["0.weight"]
    meter.know_states(model, states_of(model, optimizer))
    assert meter.states == {}  # before the first update there is none
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    meter.know_states(model, states_of(model, optimizer))
    assert list(meter.states.values()) == ["0.weight"] * 3  # two averages and the step count


def test_asking_for_addresses_allocates_nothing():
    model = nn.Linear(5, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    meter = Meter()

    def run():
        meter.know(model)
        meter.know_states(model, states_of(model, optimizer))

    assert len(record(run, meter, CPU).nbytes) == 0
    assert len(meter.states) == 6
