"""Building on meta: the values are a plain build's, bit by bit, and no memory is held before."""

import copy
import functools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks import meta_init
from memlab import StepConfig, Workload, measure, predict, verify, workloads
from memlab.errors import UnsupportedError
from memlab.memory.meter import Meter, record
from memlab.techniques.deferred import noted_build
from memlab.techniques.meta_init import build
from memlab.techniques.step import build_step, set_seed
from tests.models import Awkward, linear
from tests.script_parts import assert_same

CPU = torch.device("cpu")
ON_META = StepConfig(batch_size=4, init_on_meta=True)


def everything(model):
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


def both(build_model):
    set_seed(3)
    plain = build_model()
    after = torch.get_rng_state()
    set_seed(3)
    made = build(build_model, CPU)
    assert torch.equal(torch.get_rng_state(), after)
    return plain, made


@pytest.mark.matrix
@pytest.mark.parametrize("name", workloads.names()[:6])
def test_the_zoo_comes_out_bit_by_bit(name):
    plain, made = (everything(model) for model in both(workloads.get(name).build_model))
    assert plain.keys() == made.keys()
    for key, tensor in plain.items():
        assert torch.equal(tensor, made[key]), key
        assert type(tensor) is type(made[key])
        assert tensor.stride() == made[key].stride()


def test_what_only_the_constructor_does_comes_out_too():
    plain, made = both(Awkward)
    for key, tensor in everything(plain).items():
        assert torch.equal(tensor, everything(made)[key]), key
    assert made.head.weight is made.embed.weight
    assert made.rates == [0.0, 0.5, 1.0]
    assert made.table.tolist() == [1.0, 2.0, 4.0]
    assert made.mixer._flat_weights[0] is made.mixer.weight_ih_l0
    x = torch.randn(3, 8)
    assert torch.equal(plain.mixer(x)[0], made.mixer(x)[0])


class Marked(nn.Parameter):
    """A class that code asks for, as optimizers and FSDP do."""

    def __new__(cls, data, rank=0):
        made = super().__new__(cls, data, requires_grad=False)
        made.rank = rank
        return made


def test_what_is_set_on_a_parameter_and_its_class_come_out_too():
    def build_model():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].weight.no_decay = True
        model[0].weight.scales = [torch.full((4,), 2.0), model[1].bias]
        model[1].weight = Marked(model[1].weight.data, rank=3)
        model.register_buffer("table", nn.Buffer(torch.ones(2), persistent=False))
        return model

    plain, made = both(build_model)
    for key, tensor in everything(plain).items():
        found = everything(made)[key]
        assert (type(found), vars(found).keys()) == (type(tensor), vars(tensor).keys())
    assert made[0].weight.no_decay
    assert made[0].weight.scales[0].tolist() == [2.0] * 4
    assert made[0].weight.scales[1] is made[1].bias
    assert made[1].weight.rank == 3
    assert not made[1].weight.requires_grad
    assert isinstance(made.table, nn.Buffer)


class Constructed(nn.Parameter):
    def __init__(self, data):
        self.rows = len(data)


class Own(torch.Tensor):
    pass


ELSEWHERE = {}
LOST = {
    "namespace": (lambda t: SimpleNamespace(table=t), r"shape \(4, 4\) .*register_buffer"),
    "closure": (lambda t: lambda x: x + t, r"shape \(4, 4\) .*register_buffer"),
    "partial": (lambda t: functools.partial(torch.add, t), r"shape \(4, 4\) .*register_buffer"),
    "elsewhere": (lambda t: ELSEWHERE.update(table=t), r"shape \(4, 4\) .*register_buffer"),
    "numpy": (lambda t: t.detach().numpy(), r"numpy\(\) is not supported .*\.tolist\(\)"),
    "storage": (lambda t: t.storage().tolist(), r"reads values .*\.tolist\(\)"),
    "constructor": (Constructed, "makes a Constructed, which has an __init__"),
    "class": (lambda t: t.as_subclass(Own), "makes a Own, a tensor of its own class"),
    "lazy": (lambda _: nn.LazyLinear(4), "makes a UninitializedParameter, a tensor"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", LOST)
@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_what_a_replay_would_lose_is_refused(name):
    keep, why = LOST[name]

    def build_model():
        model = nn.Linear(4, 4)
        model.kept = keep(torch.ones(4, 4))
        return model

    build_model()  # without it the model is a model
    with pytest.raises(UnsupportedError, match=f"init_on_meta=True .*{why}"):
        build(build_model, CPU)
    ELSEWHERE.clear()
    assert type(build(lambda: nn.Linear(4, 4), CPU).weight) is nn.Parameter  # nothing is left over


def test_weights_that_were_there_before_are_kept():
    trained = nn.Linear(4, 4)
    plain, made = both(lambda: copy.deepcopy(trained))
    assert torch.equal(made.weight, trained.weight)
    assert made.weight is not trained.weight

    def loaded():
        model = nn.Linear(4, 4)
        model.load_state_dict(trained.state_dict())
        return model

    plain, made = both(loaded)
    assert torch.equal(made.weight, plain.weight)
    assert torch.equal(made.weight, trained.weight)


def test_noting_takes_no_memory_and_making_it_takes_the_models_own():
    kept = []
    build_model = lambda: nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))  # noqa: E731
    trace = record(lambda: kept.append(noted_build(build_model)), Meter(), CPU)
    assert trace.nbytes.sum() == 0
    assert trace.nbytes.cumsum().max(initial=0) < 16_384  # a generator's state
    kept.clear()
    trace = record(lambda: build(build_model, CPU) and None, Meter(), CPU)
    assert trace.nbytes.cumsum().max() - 4 * 256 * 256 * 4 in range(16_384)


def test_numbers_that_a_replay_would_not_give_are_refused():
    def reads():
        model = nn.Linear(4, 4)
        if model.weight.sum().item() > 0:
            model.weight.data.neg_()
        return model

    def seeds():
        torch.manual_seed(1)
        return nn.Linear(4, 4)

    def checks():
        return nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))

    for build_model, why in (
        (reads, "value of a random number"),
        (seeds, "seeds torch"),
        (checks, "allclose"),
    ):
        with pytest.raises(UnsupportedError, match=rf"init_on_meta=True.*{why}.*init_on_meta=Fal"):
            build(build_model, CPU)
    with pytest.raises(ZeroDivisionError):  # a person's own error stays what it is
        build(lambda: nn.Linear(1 // 0, 4), CPU)


@pytest.mark.slow
def test_measured_predicted_verified_and_written_as_a_script():
    workload = linear()
    found, guess = measure(workload, ON_META, "cpu", repeats=1), predict(workload, ON_META, "cpu")
    plain = measure(workload, StepConfig(batch_size=4), "cpu", repeats=1)
    assert found.outcome == guess.outcome == "ok", (found.message, guess.message)
    assert found.peak_allocated_bytes == guess.peak_allocated_bytes == plain.peak_allocated_bytes
    assert found.loss == plain.loss
    assert any("init_on_meta saves nothing" in note for note in found.notes)
    report = verify(workload, ON_META, "cpu")
    assert report.ok
    assert report.max_relative_error == 0
    assert_same(workload, ON_META)


@pytest.mark.slow
def test_an_unsupported_model_is_an_outcome():
    def build_model():
        torch.manual_seed(1)
        return nn.Linear(4, 4)

    workload = Workload(
        name="seeds",
        build_model=build_model,
        make_batch=lambda n: torch.ones(n, 4),
        compute_loss=lambda model, x: model(x).mean(),
    )
    found = measure(workload, ON_META, "cpu", repeats=1)
    assert found.outcome == "unsupported"
    assert "init_on_meta" in found.message
    with pytest.raises(UnsupportedError):
        build_step(workload, ON_META, "cpu")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_the_hosts_peak_falls_by_the_model():
    found = meta_init.rows(2)
    parameters = found[0]["parameters, bytes"]
    plain, noted, made = (row["host peak above before, bytes"] for row in found)
    assert plain > 0.9 * parameters
    assert noted < 0.2 * parameters
    assert made < 1.5 * plain
