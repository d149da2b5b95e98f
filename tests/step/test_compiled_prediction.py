"""A compiled step on a CPU: predicted from the graphs that torch.compile makes of fake tensors."""

import dataclasses

import pytest
import torch
from torch import nn

import memlab
from memlab import Outcome, StepConfig, Workload
from tests.models import blocks

ZOO = {
    "vit-digits": {"batch_size": 4},
    "resnet-digits": {"batch_size": 4},
    "lstm-text": {"batch_size": 4},
}
WITHIN = (
    1e-3  # of the peak: an LSTM, which is not compiled, is 0.03 % off, others are 100 bytes off
)


class Net(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.drop(self.second(nn.functional.gelu(self.first(x)))))


def net() -> Workload:
    return Workload(
        name="net",
        build_model=Net,
        make_batch=lambda n: torch.randn(n, 64),
        compute_loss=lambda model, batch: model(batch).square().mean(),
    )


def both(workload, config):
    predicted = memlab.predict(workload, config, "cpu")
    measured = memlab.measure(workload, config, "cpu", repeats=1)
    assert (predicted.outcome, measured.outcome) == (Outcome.OK, Outcome.OK), predicted.message
    return predicted, measured


@pytest.mark.parametrize(
    "fields",
    [
        {"compile": True},
        {"compile": True, "accumulation_steps": 3},  # of micro-batches of two sizes
        {"compile": True, "precision": "bf16-mixed", "optimizer": "sgd"},
        {"memory_budget": 0.5, "budget_engine": "compile"},
    ],
    ids=str,
)
def test_what_the_compiler_decides_is_predicted_to_the_byte(fields):
    predicted, measured = both(net(), StepConfig(batch_size=256, **fields))
    assert predicted.peak_allocated_bytes == measured.peak_allocated_bytes
    eager = memlab.predict(net(), StepConfig(batch_size=256), "cpu")
    assert predicted.peak_allocated_bytes != eager.peak_allocated_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_compiled_models_of_the_zoo(name):
    config = StepConfig(compile=True, **ZOO[name])
    predicted, measured = both(memlab.workloads.get(name), config)
    assert predicted.peak_allocated_bytes == pytest.approx(
        measured.peak_allocated_bytes, rel=WITHIN
    )


def test_the_time_of_a_compiled_step_is_not_known_and_other_batches_are():
    result = memlab.predict(net(), StepConfig(batch_size=256, compile=True), "cpu")
    assert result.step_seconds is None
    assert any("time of compiled code is not known" in note for note in result.notes)


def test_an_operator_of_the_compilers_own_is_refused_by_name():
    config = StepConfig(batch_size=4, compile=True, checkpointing="blocks")
    assert memlab.predict(blocks(norm=True), config, "cpu").outcome == Outcome.OK
    result = memlab.predict(blocks(dropout=0.1), config, "cpu")
    assert result.outcome == Outcome.UNSUPPORTED
    assert "run_and_save_rng_state" in result.message


def test_what_a_loss_compiles_itself_is_refused_beside_a_compiled_step():
    def loss(model, batch):
        inner = torch.compile(lambda y: (y * 2).sin().square().mean())
        return inner(model(batch))

    workload = dataclasses.replace(net(), compute_loss=loss)
    result = memlab.predict(workload, StepConfig(batch_size=64, compile=True), "cpu")
    assert result.outcome == Outcome.UNSUPPORTED
    assert "inductor" in result.message
    assert memlab.predict(workload, StepConfig(batch_size=64), "cpu").outcome == Outcome.OK


@pytest.mark.parametrize(
    "config", [StepConfig(compile=True), StepConfig(memory_budget=0.5, budget_engine="compile")]
)
def test_on_a_card_a_compiled_step_is_refused_in_a_sentence(config):
    result = memlab.predict(net(), config, "t4")
    assert result.outcome == Outcome.UNSUPPORTED
    assert result.peak_allocated_bytes is None
    assert "the kernels that torch.compile generates decide" in result.message
    assert "memlab.measure" in result.message
