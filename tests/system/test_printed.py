"""What a model prints in the worker reaches the person who waits for the run."""

import dataclasses
import io
import json

import pytest
from torch import nn

import memlab
from memlab import StepConfig, StepResult
from memlab.runtime.guard import MOST_CHARACTERS, Printed
from tests.models import IN, OUT, linear
from tests.panel_parts import PATIENCE_SECONDS, until


class Talkative(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(IN, OUT)

    def forward(self, x):
        print("in forward:", tuple(x.shape))
        return self.layer(x)


def talkative():
    return dataclasses.replace(linear(), name="talkative", build_model=Talkative)


@pytest.mark.slow
def test_a_measured_and_a_predicted_result_hold_what_the_forward_printed():
    config = StepConfig(batch_size=3)
    for ask in (memlab.measure, memlab.predict):
        result = ask(talkative(), config, "cpu")
        assert f"in forward: (3, {IN})" in result.printed.splitlines(), ask
        again = StepResult.from_dict(json.loads(json.dumps(result.to_dict())))
        assert again.printed == result.printed


@pytest.mark.slow
def test_the_panel_shows_it_as_text():
    made = memlab.panel(talkative(), device="cpu", config=StepConfig(batch_size=3))
    try:
        until(lambda: f"in forward: (3, {IN})" in str(made._told.answer["printed"]))
        assert made._page.forecasts.wait(PATIENCE_SECONDS)
        assert f"(3, {IN})" in made.run().printed
    finally:
        made.close()


def test_only_the_beginning_is_kept_and_all_is_passed_on():
    stream = io.StringIO()
    printed = Printed(stream)
    for _ in range(100):
        print("x" * 99, file=printed)
    assert len(stream.getvalue()) == 10_000
    assert printed.text.endswith("(and 6,000 more characters)")
    assert len(printed.text) < MOST_CHARACTERS + 50
    assert printed.isatty() is False
