"""What the tests of the panel share: a tiny workload, results, facts, and the part of a page."""

import time
from contextlib import closing

import torch
from torch import nn

import memlab
from memlab import Outcome, StepConfig, Workload
from memlab._panel import state
from memlab.result import Source, StepResult
from memlab.runtime.inspect import WorkloadFacts

PATIENCE_SECONDS = 300  # ends a hang; far above what a state takes on a busy machine


def make_workload(name="tiny", seconds_per_loss=0.0):
    def compute_loss(model, batch):
        time.sleep(seconds_per_loss)
        return (model(batch[0]) - batch[1]).square().mean()

    return Workload(
        name=name,
        build_model=lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)),
        make_batch=lambda n: (torch.ones(n, 16), torch.ones(n, 1)),
        compute_loss=compute_loss,
    )


def make_result(outcome=Outcome.OK, peak=2**20, **changes):
    values = {
        "message": "a sentence",
        "source": Source.MEASURED,
        "device": "cpu",
        "config": StepConfig(),
        "workload_name": "tiny",
        "peak_allocated_bytes": peak,
        "step_seconds": 0.5,
    }
    return StepResult(outcome=outcome, **{**values, **changes})


def make_facts(**changes):
    facts = {
        "num_parameters": 1000,
        "num_trainable": 1000,
        "parameter_bytes": 4000,
        "fp32_parameter_bytes": 4000,
        "half_parameter_bytes": 2000,
        "parameter_formats": ("float32",),
        "sample_bytes": 64,
        "random_modules": (),
        "sample_mixing_modules": (),
        "recurrent_modules": (),
        "blocks": ("h.0", "h.1"),
    }
    return WorkloadFacts(**{**facts, **changes})


def opened(device="cpu", **arguments):
    """Return a panel of the tiny workload, which the end of a `with` closes."""
    return closing(memlab.panel(make_workload(), device=device, **arguments))


def settings(**changes):
    return {**state.from_config(StepConfig()), **changes}


def press(panel, kind, **content):
    """Send what a page sends."""
    panel._hear({"type": kind, "by": "a page", **content})


def move(panel, **fields):
    """Set controls as a hand on the page does."""
    press(panel, "set", move=panel._told.asked["move"] + 1, fields=fields)


def line(panel, name):
    """Return the line beside a control, or another line of the page."""
    answer = panel._told.answer
    return answer["lines"].get(name) or answer[name]


def use(panel, name):
    """Click the button of a line."""
    move(panel, **line(panel, name)["remedy"]["fields"])


def status(panel):
    return panel._told.answer["status"]["text"]


def badge(panel):
    return panel._told.answer["fit"]


def fields(panel):
    """Return what the page is told is set."""
    return panel._told.asked["fields"]


def texts_of_row(runs, at=-1):
    """Return the texts of a row of the table of runs, the newest one, by heading."""
    heads = [column["name"] for column in runs["columns"]]
    shown = [cell if isinstance(cell, str) else cell["text"] for cell in runs["rows"][at]["cells"]]
    return dict(zip(heads, shown, strict=True))


def row(panel, at=-1):
    return texts_of_row(panel._told.runs, at)


def rested(panel):
    """Wait until the settings on screen were looked up."""
    assert panel._page._look.wait(PATIENCE_SECONDS)


def is_idle(panel):
    return panel._page.job is None


def settled(panel):
    """Wait until what is on screen is predicted exactly."""
    until(lambda: panel._told.answer["exact"])
    rested(panel)


def until(condition, seconds=PATIENCE_SECONDS):
    """Wait for a state; a busy machine takes its time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come true"
        time.sleep(0.01)
