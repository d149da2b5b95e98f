"""The tracker against hand counts, and against the meter of the real allocator."""

import copy
from collections import Counter
from functools import partial
from pickle import dumps, loads

import pytest
import torch
from torch.nn import functional

from memlab import StepConfig, Workload
from memlab._util.torch_private.tensors import FakeTensor, FakeTensorMode, subclasses_left_out
from memlab.errors import UnsupportedError
from memlab.memory.lifetimes import step_memory
from memlab.memory.meter import Meter, record
from memlab.techniques.step import build_step
from memlab.trace import Phase
from memlab.tracing.assembly import sizes_of, trace_of
from memlab.tracing.fakify import as_own_format
from memlab.tracing.faking import replaced_parameters
from memlab.tracing.recording import OpTrace
from memlab.tracing.repeats import BY_SHAPE
from memlab.tracing.trace_step import trace_step
from memlab.tracing.tracker import Tracker, record_fake

CPU = torch.device("cpu")
aten = torch.ops.aten
N, D = 4, 8


def run_fake(run, *, takes_mode: bool = False) -> OpTrace:
    tracker = Tracker("cpu")

    def marked(mode):
        tracker.mark(0, Phase.FORWARD, 0)
        run(mode) if takes_mode else run()

    return record_fake(marked, tracker)


def live_bytes(recording: OpTrace) -> list[int]:
    live, seen = 0, []
    for event in recording.events:
        live += recording.blocks[event.block].nbytes * (1 if event.is_birth else -1)
        seen.append(live)
    return seen


def test_linear_by_hand():
    """Weight, bias, input and output: then all are freed."""

    def run():
        layer = torch.nn.Linear(D, 2)
        x = torch.empty(N, D)
        layer(x)

    live = live_bytes(run_fake(run))
    assert max(live) == 4 * (D * 2 + 2 + N * D + N * 2)
    assert live[-1] == 0


def test_a_conversion_without_autograd_is_seen():
    """Autograd takes `to` apart. In inference mode it comes whole, and it may allocate."""

    def run():
        with torch.inference_mode():
            torch.empty(N, D).to(torch.float64)

    recording = run_fake(run)
    assert [operator.name for operator in recording.operators][-1] == "aten::_to_copy"
    assert max(live_bytes(recording)) == N * D * (4 + 8)


def test_views_hold_no_memory_and_kernels_are_those_that_run():
    recording = run_fake(lambda: torch.empty(N, D).view(D, N).t().relu())
    assert [o.name for o in recording.operators if o.signature is None] == ["aten::view", "aten::t"]
    assert max(live_bytes(recording)) == 2 * 4 * N * D


VIEWS = {
    aten._unsafe_view.default: ([N * D],),
    aten.as_strided.default: ([2, 3], [D, 2], 5),
    aten.detach.default: (),
    aten.expand.default: ([3, N, D],),
    aten.permute.default: ([1, 0],),
    aten.select.int: (1, 3),
    aten.slice.Tensor: (1, 2, 7, 2),
    aten.split_with_sizes.default: ([1, 3], 0),
    aten.t.default: (),
    aten.transpose.int: (0, 1),
    aten.unsqueeze.default: (1,),
    aten.view.default: ([D, -1],),
}


@pytest.mark.parametrize("func", VIEWS, ids=str)
def test_a_view_is_that_of_pytorchs_own_fake_tensors(func):
    """A shortcut makes them; each shares memory, and writes, with what it is a view of."""
    assert set(VIEWS) == BY_SHAPE

    def views_of(base):
        made = func(base, *VIEWS[func])
        return list(made) if isinstance(made, tuple | list) else [made]

    def facts(made, base):
        assert made.untyped_storage()._cdata == base.untyped_storage()._cdata
        before = made._version
        base.add_(1)
        same = type(made), made.fake_mode is base.fake_mode, made.device, made.dtype
        return same, made.shape, made.stride(), made.storage_offset(), made._version - before

    found = []

    def run(mode):
        base = torch.empty(N, D)
        found.append([facts(each, base) for each in views_of(base)])

    run_fake(run, takes_mode=True)
    with FakeTensorMode():
        base = torch.empty(N, D)
        assert found == [[facts(each, base) for each in views_of(base)]]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: loads(dumps(x))])
def test_a_copy_of_a_fake_tensor_belongs_to_the_mode_of_its_original(copied):
    """A copied mode gives back references to storages that it never took: the process crashes."""
    modes = []

    def run(mode):
        for original in (torch.nn.Linear(D, D).weight, torch.empty(D), torch.tensor(3)):
            modes.append(copied(original).fake_mode is mode)

    run_fake(run, takes_mode=True)
    assert modes == [True] * 3


def test_a_copied_constant_has_a_value_of_its_own():
    values = []

    def run():
        original = torch.tensor(3)
        copies = [copy.deepcopy(original) for _ in range(2)]
        values.extend(int(each) for each in copies)
        copies[0].add_(1)
        values.extend([int(copies[1]), int(original)])

    recording = run_fake(run)
    assert values == [3, 3, 3, 3]
    assert recording.assumptions == []


def real_and_fake(workload: Workload, config: StepConfig):
    meter = Meter()

    def run():
        step = build_step(workload, config, CPU, mark=partial(meter.mark, -1))
        meter.know(step.model)
        with meter.modules(step.model):
            step(partial(meter.mark, 0))
            step(partial(meter.mark, 1))
        meter.mark(-1, Phase.TEARDOWN, 0)

    program = trace_step(workload, config, CPU, 0, Tracker("cpu"))
    own = sizes_of(program.recording, program.layout, [None] * len(program.recording.operators))
    return record(run, meter, CPU), program.trace(own, config.micro_batch_sizes)


class Branches(torch.nn.Module):
    """Gradients of `h` come from three branches, one of them shared with another tensor's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(D, 512), torch.nn.Linear(512, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).sin()
        return self.second(h * 2 + (h * h).exp()) + self.second(h + h.cos())


def branches() -> Workload:
    return Workload(
        name="branches",
        build_model=Branches,
        make_batch=lambda n: torch.randn(n, D),
        compute_loss=lambda model, x: model(x).square().mean(),
    )


@pytest.mark.parametrize("config", [StepConfig(), StepConfig(accumulation_steps=3, batch_size=7)])
def test_gradients_are_summed_in_place_as_autograd_does(config):
    real, fake = real_and_fake(branches(), config)
    count = real.operators.count("aten::add_")
    assert count > 0
    assert fake.operators.count("aten::add_") == count
    inside_kernels = step_memory(real, 1).peak_bytes - step_memory(fake, 1).peak_bytes
    assert 0 <= inside_kernels <= 16  # scalars that a kernel makes tensors of
    # parameters and state are known by path, and backward operators by the module of the forward
    assert set(fake.parameters.values()) == {
        "first.weight", "first.bias", "second.weight", "second.bias"
    }  # fmt: skip
    assert set(fake.states.values()) == set(fake.parameters.values())
    parameters = step_memory(fake, 1).timeline.peak_by_category["parameters"]
    assert parameters == 4 * (512 * D + 512 + 512 * D + D)
    backward = {
        fake.place(i).module
        for i in range(len(fake.nbytes))
        if fake.intervals[fake.interval[i]].phase is Phase.BACKWARD and fake.nbytes[i] > 0
    }
    assert {"first", "second"} <= backward


def test_values_of_constants_and_data_are_known_also_of_a_large_batch():
    def run():
        positions = torch.arange(6)
        assert (positions.diff() == 1).all().item() is True
        assert positions[positions > 2].shape == (3,)
        positions = torch.arange(8192).expand(16, -1)  # a model of transformers reads this of them
        changes = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        assert (changes[:, -1] == 0).all().item() is True
        torch.empty(2**38).exp_()  # nothing is computed: a terabyte fits

    recording = run_fake(run)
    assert not recording.assumptions
    assert max(live_bytes(recording)) >= 4 * 2**38


def test_what_depends_on_an_unknown_value_is_assumed_and_said():
    def run():
        x = torch.empty(5, 3)
        if (x > 0).any():
            pass
        assert x[x > 0].shape == (15,)
        known = torch.zeros(4)
        known[:2].copy_(torch.empty(2))  # through a view
        known.sum().item()

    said = run_fake(run).assumptions
    assert len(said) == 3
    assert "assumed False" in said[0]
    assert "mask is full" in said[1]


def test_an_operator_without_a_fake_kernel_is_named():
    with torch.library._scoped_library("memlab_test", "DEF") as library:
        library.define("opaque(Tensor x) -> Tensor")
        library.impl("opaque", lambda x: x.clone(), "CPU")
        with pytest.raises(UnsupportedError, match=r"memlab_test.opaque.*register_fake"):
            run_fake(lambda: torch.ops.memlab_test.opaque(torch.empty(2)))


def test_a_resized_storage_is_counted_at_its_new_size():
    def run():
        x = torch.empty(4)
        x.resize_(400)

    assert max(live_bytes(run_fake(run))) == 1600


def test_effects_overrule_fake_sizes():
    from memlab.tracing.assembly import KernelMemory

    recording = run_fake(lambda: torch.empty(D).relu())
    effects = [None, KernelMemory(output_bytes=(100,), workspace_bytes=7, kept_bytes=3)]
    trace = trace_of(recording, effects)
    assert sorted(trace.nbytes.tolist()) == [-100, -32, -7, 3, 7, 32, 100]


def test_repeated_operators_return_what_they_returned():
    """Foreach operators return lists, norms tuples; values stay known, writes stay seen."""

    def run():
        for _ in range(3):
            pair = [torch.randn(3), torch.randn(3)]
            doubled = torch._foreach_mul(pair, 2.0)
            assert isinstance(doubled, list | tuple)
            assert len(doubled) == 2
            out, mean, rstd = torch.native_layer_norm(torch.randn(2, 4), (4,), None, None, 1e-5)
            assert (out.shape, mean.shape, rstd.shape) == ((2, 4), (2, 1), (2, 1))
            assert torch.ones(3).mul(2).sum().item() == 6.0
            assert out.add_(1) is out
            assert out.t_().shape == (4, 2)

    recording = run_fake(run)
    assert not recording.assumptions
    third = len(recording.operators) // 3
    assert [o.name for o in recording.operators[:third]] * 3 == [
        o.name for o in recording.operators
    ]
    assert live_bytes(recording)[-1] == 0


ROWS = torch.tensor([0, 2, 2])
ODDS = torch.tensor([[0, 1], [1, 0]])
WRITTEN = "aten::mul", "aten::sub", "aten::mul_", "aten::sub_"  # no kernel calls another of these
BACKWARDS = {
    "index": lambda x: x[ROWS],
    "index_select": lambda x: x.index_select(0, ROWS),
    "gather": lambda x: x.gather(0, ODDS),
    "cummax": lambda x: x.cummax(0).values,
    "max": lambda x: x.max(1).values,
    "median": lambda x: x.median(1).values,
    "sort": lambda x: x.sort(1).values,
    "topk": lambda x: x.topk(2).values,
    "take": lambda x: x.take(ROWS),
    "trace": torch.trace,
    "atan2": lambda x: x.atan2(x),
    "quantile": lambda x: x.quantile(0.3, dim=1),
    "bce": lambda x: functional.binary_cross_entropy(torch.ones(D, D), x.sigmoid()),
    "bce with logits": lambda x: functional.binary_cross_entropy_with_logits(x, x.detach()),
    "bce with weights": lambda x: functional.binary_cross_entropy_with_logits(
        x, torch.ones(D, D), weight=torch.ones(D), pos_weight=torch.ones(D, D)
    ),
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_a_backward_writes_in_place_where_it_does_for_real(name):
    """The oracle is PyTorch's profiler, over a backward on real tensors."""

    def run():
        x = torch.ones(D, D, requires_grad=True)
        return BACKWARDS[name](x).sum()

    loss = run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss.backward()
    real = Counter(event.name for event in profile.events())
    recording = run_fake(lambda: run().backward())
    kernels = [operator for operator in recording.operators if operator.signature is not None]
    seen = Counter(kernel.name for kernel in kernels if kernel.forward >= 0)
    assert seen.keys() - {"aten::new_zeros"} <= real.keys()
    assert {name: seen[name] for name in WRITTEN} == {name: real[name] for name in WRITTEN}


# fake tensors that a library makes into tensors of its own class


class Own(torch.nn.Parameter):
    def __new__(cls, data):
        self = torch.Tensor._make_subclass(cls, data, False)
        self.scale = 2
        return self


def test_a_class_of_parameters_leaves_a_fake_tensor_one_that_a_module_takes():
    with FakeTensorMode():
        layer = torch.nn.Linear(3, 3)
        with subclasses_left_out(as_own_format):
            layer.weight = Own(layer.weight)
        assert issubclass(type(layer.weight), FakeTensor)
        assert isinstance(layer.weight, Own)
        assert (layer.weight.scale, layer.weight.requires_grad) == (2, False)
        assert "weight" in dict(layer.named_parameters())
    with subclasses_left_out(as_own_format):
        assert type(Own(torch.zeros(1))) is Own
    assert "_make_subclass" not in vars(torch.Tensor)


def test_a_parameter_stays_of_its_class_when_it_is_moved():
    """DoRA asks a weight for the name of its class, by which it knows that it is in 4 bits."""
    with FakeTensorMode() as mode, replaced_parameters(mode):
        layer = torch.nn.Linear(3, 3)
        with subclasses_left_out(as_own_format):
            layer.weight = Own(layer.weight)
        moved = layer.to(torch.float64)
        assert moved.weight.dtype is torch.float64
        assert moved.weight.__class__ is Own
        assert moved.bias.__class__ is not Own
        assert moved.weight.scale == 2
