"""Bad arguments of public functions are refused in the caller, by a sentence that names them."""

import random
import re
import threading

import numpy as np
import pytest
import torch

import memlab
from benchmarks import bad_calls
from memlab import LoadingConfig, MemlabError, StepConfig, StepResult, Workload, plots, workloads
from memlab._util import units
from memlab._util.checks import checked, count, number, of_type
from memlab._util.units import MAX_SHOWN
from memlab.errors import ConfigError, DeviceError, WorkloadError
from memlab.result import Source
from memlab.running import Progress
from memlab.runtime import isolation

WORKLOAD = workloads.get("vit-digits")
CONFIG = StepConfig(batch_size=2)
LONGEST_MESSAGE = 2000


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Calls are given "1" as the name of a file, too."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_every_public_function_has_arguments_that_work():
    with bad_calls.no_worker():
        for target in bad_calls.targets():
            if target.name not in ("panel", "forget_costs"):
                how, said = bad_calls.ended(target, {})
                assert how == "worked" or said.endswith("it passed every check"), target.name


@pytest.mark.parametrize("target", bad_calls.targets(), ids=lambda target: target.name)
def test_no_bad_value_of_any_argument_gives_a_raw_error(target):
    rng, values = random.Random(target.name), bad_calls.bad_values()
    with bad_calls.no_worker():
        for argument in target.arguments:
            for said in rng.sample(sorted(values), 2):
                how, error = bad_calls.ended(target, {argument: values[said]})
                assert how != "raw", f"{argument}: {said}: {error}"
                assert len(error) < LONGEST_MESSAGE


def test_drawn_calls_repeat_with_their_seed_and_none_is_raw():
    one, other = (bad_calls.calls(30, seed=3) for _ in range(2))
    drawn = [(each["function"], each["passed"], each["ended"]) for each in one]
    assert drawn == [(each["function"], each["passed"], each["ended"]) for each in other]
    assert {ended for _, _, ended in drawn} <= {"refused", "worked"}


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: memlab.to_frame(None), ConfigError, "results=None is not a list"),
        (lambda: memlab.to_frame([3]), ConfigError, "results[0]=3 is not a StepResult"),
        (lambda: memlab.measure(None, CONFIG), WorkloadError, "workload=None is not a Workload"),
        (lambda: memlab.measure(WORKLOAD, {}), ConfigError, "config={} is not a StepConfig"),
        (lambda: memlab.measure(WORKLOAD, CONFIG, on_progress=3), ConfigError,
         "on_progress=3 cannot be called"),
        (lambda: memlab.measure(WORKLOAD, CONFIG, isolate="no"), ConfigError,
         "isolate='no' is not a bool"),
        (lambda: memlab.measure(WORKLOAD, CONFIG, 2**63), DeviceError,
         "device=9223372036854775808"),
        (lambda: memlab.measure(WORKLOAD, CONFIG, timeout_seconds=10**400), ConfigError,
         "timeout_seconds=(2**1328 or more); allowed is a number above 0"),
        (lambda: memlab.measure(WORKLOAD, CONFIG, seed=True), ConfigError,
         "seed=True is not a whole number; allowed is an int of at least 0"),
        (lambda: memlab.measure(WORKLOAD, CONFIG, repeats=0), ConfigError,
         "repeats=0 is below 1; allowed is an int of at least 1"),
        (lambda: memlab.measure(WORKLOAD, CONFIG, warmup=-1), ConfigError, "warmup=-1"),
        (lambda: memlab.measure(WORKLOAD, CONFIG, seed="x"), ConfigError, "seed='x'"),
        (lambda: memlab.measure(WORKLOAD, CONFIG, seed=2**70), ConfigError, "seed="),
        (lambda: memlab.measure(WORKLOAD, CONFIG, timeout_seconds=0), ConfigError,
         "timeout_seconds=0"),
        (lambda: memlab.measure(WORKLOAD, CONFIG, 1.5), DeviceError, "device=1.5"),
        (lambda: memlab.measure(WORKLOAD, CONFIG, memory_limit="2 apples"), ConfigError,
         "memory_limit='2 apples'"),
        (lambda: memlab.measure(WORKLOAD, CONFIG, memory_limit="9" * 400), ConfigError,
         "memory_limit="),
        (lambda: memlab.predict(WORKLOAD, CONFIG, cancel=3), ConfigError,
         "cancel=3 is not an Event"),
        (lambda: memlab.predict(WORKLOAD, CONFIG, memory_limit="-1GiB"), ConfigError,
         "memory_limit='-1GiB' is not a size"),
        (lambda: memlab.predict(WORKLOAD, CONFIG, memory_limit=10**400), ConfigError,
         "is more than any memory"),
        (lambda: memlab.predict(WORKLOAD, CONFIG, memory_limit=float("nan")), ConfigError,
         "memory_limit=nan is not a size"),
        (lambda: workloads.get("gpt-small", num_layers="2"), WorkloadError, "num_layers='2'"),
        (lambda: workloads.get("gpt-small", num_layers=True), WorkloadError, "num_layers=True"),
        (lambda: workloads.get("resnet-digits", depths=3), WorkloadError, "depths=3 is not a list"),
        (lambda: workloads.get(["gpt-small"]), WorkloadError, "workload ['gpt-small'] is unknown"),
        (lambda: StepConfig(batch_size=True), ConfigError, "batch_size=True"),
        (lambda: StepConfig(batch_size=10**400), ConfigError, "batch_size=(2**1328 or more)"),
        (lambda: StepConfig(memory_budget=10**400), ConfigError, "memory_budget="),
        (lambda: StepConfig(optimizer=[]), ConfigError, "optimizer=[] is unknown; allowed is one"),
        (lambda: StepConfig(compile="no"), ConfigError, "compile='no' is not a bool"),
        (lambda: LoadingConfig(num_workers=10**9), ConfigError, "at most 1024"),
        (lambda: Workload.from_module(torch.nn.Linear(1, 1), torch.zeros(1), 3), WorkloadError,
         "loss_fn=3 cannot be called"),
        (lambda: plots.step_times([], labels=["x"]), ConfigError, "labels holds 1 texts for 0"),
        (lambda: plots.placeholder("x", size=(0, 1)), ConfigError, "size[0]=0"),
        (lambda: plots.heat_map([], rows="colour"), ConfigError, "rows='colour' is unknown"),
        (lambda: StepResult.from_dict({}), MemlabError, "was not written by StepResult.to_dict"),
        (lambda: memlab.ladder(WORKLOAD, torch.tensor(3)), ConfigError,
         "rungs=tensor(3) cannot be read: TypeError; allowed is a list of dicts"),
        (lambda: memlab.ladder(WORKLOAD, bad_calls.Awkward()), ConfigError,
         "cannot be read: RuntimeError; allowed is a list of dicts"),
        (lambda: memlab.ladder(WORKLOAD, [3]), ConfigError, "rungs hold 3; allowed is a list"),
        (lambda: memlab.measure(WORKLOAD, CONFIG, memory_limit=bad_calls.NoClass()), ConfigError,
         "is not a size"),
        (lambda: workloads.get(bad_calls.NoClass()), WorkloadError, "is unknown; allowed is one"),
        (lambda: Workload.from_module(bad_calls.NoClass(), torch.zeros(1), torch.relu),
         WorkloadError, "is not a torch.nn.Module"),
        (lambda: memlab.measure_loading(WORKLOAD, CONFIG, bad_calls.NoClass()), WorkloadError,
         "is not map-style"),
        (lambda: isolation.teller(lambda: 3)(Progress(text="", fraction=0.0)), ConfigError,
         "cannot be called with a Progress"),
        (lambda: isolation.teller(int)(Progress(text="", fraction=0.0)), ConfigError,
         "on_progress=<class 'int'> cannot be called with a Progress"),
        (lambda: units.format_bytes("much"), ConfigError, "num_bytes='much' is not a number"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_argument_the_value_and_what_is_allowed(call, error, said):
    with bad_calls.no_worker(), pytest.raises(error, match=re.escape(said)):
        call()


def test_a_loss_function_that_raises_when_it_is_looked_at_is_no_error_of_memlab():
    pair = (torch.zeros(2, 1), torch.zeros(2, 1))
    made = Workload.from_module(torch.nn.Linear(1, 1), pair, bad_calls.Awkward())
    with pytest.raises(RuntimeError, match="awkward"):  # only where it is called
        made.compute_loss(made.build_model(), made.make_batch(2))


def test_bad_calls_counts_what_on_progress_raises_as_the_callers_and_nothing_else():
    def caught(on_progress):
        with pytest.raises(Exception) as found:
            isolation.teller(on_progress)(Progress(text="", fraction=0.0))
        return found.value

    def stumble(progress):
        raise KeyError("mine")

    assert bad_calls.is_callers(caught(stumble))
    assert bad_calls.is_callers(caught(torch.nn.Linear(1, 1)))
    assert not bad_calls.is_callers(caught(lambda: 3))
    assert not bad_calls.is_callers(KeyError("not from there"))


def test_a_value_is_shown_short_however_long_it_is():
    with pytest.raises(ConfigError) as caught:
        StepConfig(optimizer="x" * 10**6)
    assert len(str(caught.value)) < 4 * MAX_SHOWN


def test_an_argument_that_is_added_is_checked_by_its_annotation():
    @checked(share=number(0.0, 1.0), repeats=count(1))
    def run(
        share: float, repeats: int = 1, *, new: bool = False, event: threading.Event | None = None
    ):
        return share, repeats, new, event

    event = threading.Event()
    assert run(np.float64(0.5), np.int32(2), event=event) == (0.5, 2, False, event)
    for bad in ({"new": "no"}, {"new": 1}, {"event": True}, {"repeats": 0}, {"share": 1.5}):
        with pytest.raises(MemlabError, match=next(iter(bad))):
            run(**{"share": 0.5, **bad})
    with pytest.raises(TypeError, match="no argument unknown"):
        run(0.5, unknown=3)


def test_a_field_that_is_added_to_the_config_is_checked_by_its_type():
    for field in StepConfig.__dataclass_fields__:
        with pytest.raises(MemlabError, match=field):
            StepConfig(**{field: object()})


def test_values_become_what_their_annotation_says():
    class Text(str):
        pass

    assert type(of_type("x", Text("a"), str)) is str
    assert type(of_type("x", np.int8(3), int)) is int
    assert of_type("x", (i for i in (1, 2)), list[int]) == (1, 2)
    assert of_type("x", [1, 2.5], tuple[float, float]) == (1.0, 2.5)
    assert of_type("x", None, int | str | None) is None


@pytest.mark.parametrize("change", [{"loss": "x"}, {"peak_allocated_bytes": True}, {"notes": (3,)},
                                    {"config": {}}, {"outcome": "fine"}])  # fmt: skip
def test_a_result_holds_what_its_fields_say(change):
    fields = {"outcome": memlab.Outcome.OK, "message": "", "device": "cpu", "config": CONFIG,
              "workload_name": "x", "source": Source.MEASURED}  # fmt: skip
    assert np.isnan(StepResult(**fields, loss=float("nan")).loss)
    with pytest.raises(ConfigError, match=next(iter(change))):
        StepResult(**(fields | change))
