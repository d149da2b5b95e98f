"""What the tests of the panel share: a tiny workload, results, facts, and looking at widgets."""

import time
from contextlib import closing

import torch
from torch import nn

import memlab
from memlab import Outcome, StepConfig, Workload
from memlab._panel import app, state
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


def find(panel: app.Panel, css_class: str):
    def search(widget):
        if css_class in getattr(widget, "_dom_classes", ()):
            return widget
        return next(filter(None, map(search, getattr(widget, "children", ()))), None)

    found = search(panel._view._root)
    assert found is not None, css_class
    return found


def until(condition, seconds=PATIENCE_SECONDS):
    """Wait for a state; a busy machine takes its time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come true"
        time.sleep(0.01)
