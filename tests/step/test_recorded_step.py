"""A step recorded with its kernels: all that begin with one report a failing model alike."""

import functools

import pytest
import torch
from torch import nn

from memlab import StepConfig, Workload
from memlab.devices.cards import resolve
from memlab.running import Progress
from memlab.runtime import isolation

RUN = functools.partial(isolation.run, timeout_seconds=120)
ASKED = ["predict", "plan", "operators"]


class IsJagged(nn.Linear):
    def forward(self, x):
        rows = torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged)
        return super().forward(rows.to_padded_tensor(0.0))


class HasNoMemory(nn.Linear):
    def forward(self, x):
        raise MemoryError("none left")


def failure(model, function, **more):
    """Return the outcome and the message of what a worker was asked for."""
    workload = Workload(
        name="fails",
        build_model=lambda: model(4, 4),
        make_batch=lambda n: torch.ones(n, 4),
        compute_loss=lambda model, batch: model(batch).mean(),
    )
    limit = {"memory_limit": None} if function == "predict" else {}
    asked = {"workload": workload, "config": StepConfig(), "target": resolve("cpu"), "seed": 0}
    found = RUN(function, asked | limit, **more)
    found = getattr(found, "result", found)
    return found.outcome, found.message.removeprefix("the memory budget cannot be planned: ")


@pytest.mark.parametrize("function", ASKED)
def test_an_error_that_only_a_fake_tensor_raises_gets_a_clear_message(function):
    outcome, message = failure(IsJagged, function)
    assert outcome == "unsupported"
    assert "the model makes a nested tensor of jagged layout" in message
    assert "pad the samples to one length" in message


@pytest.mark.parametrize("function", ASKED)
def test_running_out_of_memory_while_recording_says_nothing_of_the_step(function):
    outcome, message = failure(HasNoMemory, function)
    assert outcome == "unsupported"
    assert message.startswith("the prediction itself needs more memory than there is")


@pytest.mark.parametrize("function", ASKED)
def test_the_progress_names_what_is_recorded(function):
    said: list[Progress] = []
    failure(HasNoMemory, function, on_progress=said.append)
    assert said[-1].text.startswith("recording fails")
