"""Which step a job runs: the same for the same code and values, another as soon as one differs."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from memlab import Outcome, StepConfig, Workload, workloads
from memlab.cost_model.measured_runs import stamp_of
from memlab.devices.cards import Target, resolve
from memlab.devices.operators import KnownCosts
from memlab.runtime import same_step, sending
from memlab.runtime.same_step import recall, remember, step_of
from tests.panel_parts import make_result

CPU = torch.device("cpu")
AROUND = {"own_values": {}, "path": ["/a"], "environment": {"A": "1"}}
ARGUMENTS = {"config": StepConfig(batch_size=4), "seed": 0, "plan": None}


def measured(workload, *, arguments=None, **around):
    every = {**ARGUMENTS, "workload": workload, "device": CPU, "repeats": 3, **(arguments or {})}
    return step_of("measure", every, **{**AROUND, **around})


def predicted(workload, target=None, **arguments):
    every = {**ARGUMENTS, "workload": workload, "target": target or resolve("cpu"), **arguments}
    return step_of("predict", every, **AROUND)


def line(width=8, *, scale=1.0, data=None):
    def compute_loss(model, batch):
        return model(batch).square().mean() * scale

    return Workload(
        name="line",
        build_model=lambda: torch.nn.Linear(width, width),
        make_batch=lambda n: torch.ones(n, width) if data is None else data[:n],
        compute_loss=compute_loss,
    )


LINE = line()


@pytest.mark.parametrize(
    "workload",
    [LINE, workloads.get("gpt-small"),
     Workload.from_module(torch.nn.Linear(4, 4), torch.ones(2, 4), lambda model, x: model(x).sum()),
    ],
    ids=["functions", "zoo", "module"],
)  # fmt: skip
def test_a_measurement_and_a_prediction_of_one_step_are_told_alike(workload):
    assert measured(workload) == predicted(workload, memory_limit=3) is not None
    assert measured(workload, arguments={"repeats": 9}) == measured(workload)


def test_another_workload_of_the_same_name_is_another_step():
    other_code = Workload(
        name="line", build_model=LINE.build_model, make_batch=LINE.make_batch,
        compute_loss=lambda model, batch: model(batch).square().mean() + 0.0,
    )  # fmt: skip
    steps = [measured(each) for each in (LINE, line(9), line(scale=2.0), other_code)]
    assert len(set(steps)) == 4
    assert measured(line()) == measured(LINE), "the same code, defined once more"


def test_values_decide_where_they_are_small_and_shapes_where_they_are_large():
    small, other = torch.arange(4), torch.arange(4) + 1
    assert measured(line(data=small)) != measured(line(data=other))
    large = torch.ones(300, 300)
    assert measured(line(data=large)) == measured(line(data=large + 1))
    assert measured(line(data=large)) != measured(line(data=large.double()))
    assert measured(line(data=large)) != measured(line(data=large.T.contiguous().T))
    array = np.ones((300, 300))
    assert measured(line(data=array)) == measured(line(data=array + 1))
    assert measured(line(data=array)) != measured(line(data=array[:299]))


@pytest.mark.parametrize(
    "changed",
    [{"arguments": {"config": StepConfig(batch_size=5)}}, {"arguments": {"seed": 1}},
     {"arguments": {"plan": "another"}}, {"path": ["/b"]}, {"environment": {"A": "2"}},
     {"own_values": {"mine": {("WIDTH",): b"3"}}}],
    ids=lambda changed: str(*changed.values()),
)  # fmt: skip
def test_whatever_else_decides_a_step_makes_it_another(changed):
    assert measured(LINE, **changed) != measured(LINE)


def test_a_step_elsewhere_and_one_that_cannot_be_told_have_no_name(monkeypatch):
    recorded = Target(kind="cpu", card=None, name="x", costs=KnownCosts(operators={}, overheads={}))
    assert predicted(LINE, resolve("h200")) is predicted(LINE, recorded) is None
    assert measured(LINE, arguments={"device": torch.device("meta")}) is None
    assert step_of("plan", {**ARGUMENTS, "workload": LINE}, **AROUND) is None
    assert measured(line(data=threading.Lock())) is None
    monkeypatch.setattr(sending, "MOST_HASHED_BYTES", 100)
    assert measured(LINE) is None


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MEMLAB_CACHE", str(tmp_path / "cache"))


RESULT = make_result(step_seconds=0.2, step_seconds_all=(0.3, 0.1, 0.2), others_share=0.01)


def test_a_run_is_recalled_while_the_files_it_used_are_the_same(cache, tmp_path):
    model = tmp_path / "model.py"
    model.write_text("WIDTH = 3")
    files = {str(model): stamp_of(str(model)), same_step.OWN_FOLDER + "api.py": (0, 0, 0, 0)}
    remember("a", RESULT, files)
    run, note = recall("a")
    assert (run.least_seconds, run.median_seconds, run.num_repeats) == (0.1, 0.2, 3)
    assert (run.others_share, run.peak_bytes, note) == (0.01, RESULT.peak_allocated_bytes, None)
    assert list(run.files) == [str(model)], "memlab's own machinery is not part of a step"
    assert recall("b") == recall(None) == (None, None)
    model.write_text("WIDTH = 4")
    assert recall("a") == (None, None)


@pytest.mark.parametrize(
    ("result", "files"),
    [(make_result(Outcome.FAILED, step_seconds_all=(0.1,)), {}), (make_result(), {}),
     (make_result(peak=None, step_seconds_all=(0.1,)), {}), (RESULT, {"/changed.py": None}),
     ("a traceback", {}), (SimpleNamespace(outcome=Outcome.OK), {})],
    ids=["failed", "no times", "no peak", "a changed file", "text", "another type"],
)  # fmt: skip
def test_what_has_no_time_of_a_known_step_is_not_remembered(cache, result, files):
    remember("a", result, files)
    remember(None, RESULT, {})
    assert recall("a") == (None, None)
