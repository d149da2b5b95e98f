"""Predictions against measurements, and what they refuse."""

import dataclasses
import weakref
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import memlab
from memlab import Outcome, StepConfig, Workload
from memlab._util.units import GIB, MIB
from memlab.cost_model import power
from memlab.devices import cards
from memlab.devices.here import available_memory_bytes
from memlab.errors import MemlabError, WorkloadError
from memlab.prediction.interpolation import interpolated
from memlab.prediction.predict import predict_in_process
from memlab.runtime.inspect import inspect_in_process
from memlab.runtime.per_sample import loss_in_process
from memlab.tracing import fake_workload
from tests.models import blocks, ignored_labels, linear, made_of
from tests.predictions import assert_predicted, error_of, predicted

CONFIGS = [
    StepConfig(batch_size=6),
    StepConfig(batch_size=7, accumulation_steps=3),
    StepConfig(batch_size=12, accumulation_steps=6, optimizer="sgd-momentum"),
    StepConfig(batch_size=4, precision="bf16-mixed"),
    StepConfig(batch_size=4, precision="bf16", optimizer="sgd"),
]


@pytest.mark.matrix
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(
    "workload", [linear(), blocks(norm=True, dropout=0.1), ignored_labels()], ids=lambda w: w.name
)
def test_small_models_are_predicted_to_the_byte(workload, config):
    assert abs(error_of(workload, config)) < 1e-3


@pytest.mark.parametrize("workload", [linear(), blocks()], ids=lambda w: w.name)
def test_a_single_sample_is_predicted_to_the_byte(workload):
    assert abs(error_of(workload, StepConfig(batch_size=1))) < 1e-3
    assert abs(error_of(workload, StepConfig(batch_size=5, accumulation_steps=4))) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-small", "resnet-digits", "vit-digits", "lstm-text"])
@pytest.mark.parametrize(
    "config",
    [
        StepConfig(batch_size=4),
        StepConfig(batch_size=6, accumulation_steps=2, precision="bf16-mixed"),
    ],
    ids=str,
)
def test_the_zoo_is_predicted(name, config):
    assert abs(error_of(memlab.workloads.get(name), config)) < 1e-3


def test_checkpointing_is_predicted():
    config = StepConfig(batch_size=64, checkpointing="blocks")
    assert abs(error_of(blocks(width=256), config)) < 2e-2


class NeverReal(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 3)

    def forward(self, x):
        for tensor in (x, *self.parameters()):
            if not isinstance(tensor, FakeTensor):
                raise AssertionError("the model ran for real")
        return self.layer(x)


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_the_model_never_runs_for_real(device):
    workload = dataclasses.replace(blocks(), build_model=NeverReal)
    assert memlab.predict(workload, StepConfig(), device).outcome == Outcome.OK


def test_a_model_beyond_any_memory_is_predicted_by_hand_count():
    width = 400_000  # a weight of 596 GiB
    workload = made_of(lambda: torch.nn.Linear(width, width, bias=False), (width,))
    config = StepConfig(batch_size=2, optimizer="sgd-momentum")
    result = memlab.predict(workload, config, "h200", memory_limit="141GiB")
    assert (result.outcome, result.fits) == (Outcome.OK, False), result.message
    weight = 4 * width**2
    # weight, gradient and momentum, and on CUDA what the fused update of all of them makes anew
    assert 3 * weight <= result.peak_allocated_bytes <= 4.01 * weight
    # a block keeps what is left of its segment if that is less than 1 MiB
    assert 0 <= result.peak_by_category["parameters"] - weight < MIB


def test_cuda_and_cpu_differ_where_they_do():
    """Dropout keeps a mask of bools on CUDA, of floats on a CPU; reserved is CUDA's alone."""
    workload = blocks(dropout=0.5, width=256)
    config = StepConfig(batch_size=256)
    cpu, cuda = (memlab.predict(workload, config, device) for device in ("cpu", "t4"))
    assert cpu.peak_reserved_bytes is None
    assert cuda.peak_reserved_bytes >= cuda.peak_allocated_bytes
    assert cuda.peak_reserved_bytes % 2**21 == 0
    assert cuda.peak_by_category["activations"] < cpu.peak_by_category["activations"]
    assert (cuda.device, cuda.source) == ("t4", "predicted")


def test_time_on_a_card_follows_its_speed():
    config = StepConfig(batch_size=512)
    seconds = {
        card: memlab.predict(blocks(width=1024), config, card).step_seconds
        for card in ("t4", "h200", "24GiB")
    }
    assert seconds["t4"] > seconds["h200"] > 0
    assert seconds["24GiB"] is None


def test_a_power_limit_slows_what_works_and_leaves_the_memory():
    """A wide layer works nearly all the time, but for the copy of its batch; a small one waits."""

    def of(width, device, **more):
        workload = made_of(lambda: torch.nn.Linear(width, width, bias=False), (width,))
        return memlab.predict(workload, StepConfig(batch_size=width), device, **more)

    plain, limited = of(8192, "h100"), of(8192, "h100, 350 W")
    same = of(8192, "h100", watts=350)
    assert limited.device == same.device == "h100, 350 W"
    assert limited.step_seconds == same.step_seconds
    assert 0.75 * 700 < plain.watts < power.COMPUTE * 700
    slower = power.slowdown(350 / 700, plain.watts / 700)
    assert 1.2 < limited.step_seconds / plain.step_seconds <= slower
    assert limited.watts == 350
    assert limited.peak_by_category == plain.peak_by_category
    assert limited.time_width > plain.time_width
    assert any("Under a power limit of 350 W of 700 W" in note for note in limited.notes)
    assert limited.run_cost(100).joules < plain.run_cost(100).joules
    doubted = of(8192, "h100", watts=plain.watts + 1)
    assert doubted.step_seconds == plain.step_seconds
    assert doubted.time_width > plain.time_width

    idle = of(8, "h100")
    assert idle.watts < 0.5 * 700
    assert of(8, "h100, 350 W").step_seconds == idle.step_seconds
    assert of(8, "24GiB").watts is None
    assert memlab.predict(linear(), StepConfig(), "cpu").watts is None
    with pytest.raises(MemlabError, match="allowed is 210 to 1400 W"):
        of(8, "h100", watts=100)
    with pytest.raises(MemlabError, match="watts=-1"):
        of(8, "h100", watts=-1)
    with pytest.raises(MemlabError, match="watts=400 limits a card; name it"):
        of(8, None, watts=400)


def test_limit():
    peak = memlab.predict(linear(), StepConfig(), "cpu").peak_allocated_bytes
    assert memlab.predict(linear(), StepConfig(), "cpu", memory_limit=peak).fits is True
    above = memlab.predict(linear(), StepConfig(), "cpu", memory_limit=peak - 1)
    assert (above.fits, above.outcome) == (False, Outcome.OK)
    assert memlab.predict(linear(), StepConfig(), "rtx-3060", memory_limit=GIB).fits is True


@pytest.mark.parametrize("device", ["cpu", "t4"])
@pytest.mark.parametrize("half_first", [True, False])
def test_layers_of_two_default_formats_keep_theirs(half_first, device):
    """The calls that make them differ by the default format alone."""

    def layer(dtype):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return nn.Linear(1024, 1024, bias=False)
        finally:
            torch.set_default_dtype(before)

    def build():
        formats = (torch.bfloat16, torch.float32) if half_first else (torch.float32, torch.bfloat16)
        made = {dtype: layer(dtype) for dtype in formats}
        model = nn.Sequential(made[torch.float32])
        model.register_buffer("other", made[torch.bfloat16].weight.detach())
        return model

    result = memlab.predict(made_of(build, (1024,)), StepConfig(batch_size=2), device)
    assert result.outcome == Outcome.OK, result.message
    assert result.peak_by_category["parameters"] == 4 * 1024**2
    if device == "cpu":  # on a card the workspace of cuBLAS is among them
        assert result.peak_by_category["buffers"] == 2 * 1024**2


@pytest.mark.parametrize("card", ["p4", "p100"])
def test_cards_without_tensor_cores_gain_memory_and_no_arithmetic_from_fp16(card):
    config = StepConfig(batch_size=2048)
    workload = blocks(width=512)
    plain, half = (
        memlab.predict(workload, dataclasses.replace(config, precision=name), card)
        for name in ("fp32", "fp16-mixed")
    )
    assert (plain.outcome, half.outcome) == (Outcome.OK, Outcome.OK)
    assert half.peak_by_category["activations"] < plain.peak_by_category["activations"]
    # fewer bytes, the same arithmetic, and casts: neither twice as fast nor many times slower
    assert 0.7 < half.step_seconds / plain.step_seconds < 1.5
    assert "only as built with CUDA 12.6" in " ".join(plain.notes)
    refused = memlab.predict(workload, StepConfig(precision="bf16-mixed"), card)
    assert (refused.outcome, "no bfloat16" in refused.message) == (Outcome.UNSUPPORTED, True)
    assert "fp16-mixed" in refused.message


def test_only_cards_before_turing_have_a_note_on_builds_of_pytorch():
    found = {
        card: " ".join(memlab.predict(linear(), StepConfig(), card).notes)
        for card in ("v100-pcie-32", "t4", "rtx-4090-laptop", "24GiB")
    }
    assert [card for card, notes in found.items() if "CUDA 12.6" in notes] == ["v100-pcie-32"]


def test_a_branch_on_data_widens_the_uncertainty_and_says_what_was_assumed():
    class Branch(NeverReal):
        def forward(self, x):
            y = self.layer(x)
            return y if y.sum() > 0 else y * 2

    workload = dataclasses.replace(blocks(), build_model=Branch)
    result = memlab.predict(workload, StepConfig(), "cpu")
    plain = memlab.predict(blocks(), StepConfig(), "cpu")
    assert result.outcome == Outcome.OK
    assert any("assumed" in note for note in result.notes)
    assert result.uncertainty["peak_allocated_bytes"] > plain.uncertainty["peak_allocated_bytes"]


def with_model(model: type[torch.nn.Module], **changes) -> Workload:
    return dataclasses.replace(blocks(), build_model=model, **changes)


def of_squares(model, batch):
    return model(batch[0]).square().mean()


def test_a_module_with_real_weights():
    module = torch.nn.Sequential(
        torch.nn.Conv1d(1, 8, 3),
        torch.nn.BatchNorm1d(8),
        torch.nn.Flatten(),
        torch.nn.LazyLinear(3),
    )
    example = (torch.randn(6, 1, 20), torch.randint(3, (6,)))
    module(example[0])
    workload = Workload.from_module(module, example, torch.nn.functional.cross_entropy)
    assert abs(error_of(workload, StepConfig(batch_size=6))) < 1e-3


class BuiltOfNumbers(NeverReal):
    def __init__(self):
        super().__init__()
        self.scale = float(self.layer.weight.detach().numpy().std())


def test_a_model_that_cannot_be_built_of_fakes_is_built_for_real_and_says_so():
    result = memlab.predict(with_model(BuiltOfNumbers), StepConfig(), "cpu")
    assert result.outcome == Outcome.OK
    assert any("built for real" in note for note in result.notes)
    assert result.peak_by_category["parameters"] == 4 * (32 * 3 + 3)


LAZY = pytest.mark.parametrize("lazy", [
    lambda: torch.nn.Sequential(torch.nn.LazyLinear(3)),
    lambda: torch.nn.Sequential(torch.nn.Linear(32, 3), torch.nn.LazyBatchNorm1d(affine=False)),
], ids=["parameters", "buffers"])  # fmt: skip


@LAZY
def test_what_looks_at_a_lazy_module_says_the_same(lazy):
    options = {"report": lambda progress: None}
    with pytest.raises(WorkloadError, match="call it once"):
        inspect_in_process(with_model(lazy), **options)
    known, why = loss_in_process(with_model(lazy), **options)
    assert (known, "call it once" in why) == ("unknown", True)


@LAZY
@pytest.mark.parametrize("run", [memlab.predict, memlab.measure])
def test_a_lazy_module_is_refused_with_a_remedy(run, lazy):
    result = run(with_model(lazy), StepConfig(), "cpu")
    assert result.outcome == Outcome.FAILED
    assert "call it once" in result.message


class HoldsPlainTensors(torch.nn.Module):
    """Built of values, it holds a table and an order that are neither parameters nor buffers."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 3)
        self.table = torch.full((64, 64), float(self.layer.weight.detach().numpy().std()))
        self.held = {"orders": [torch.tensor([2, 0, 1])], "part": self.layer.weight.detach()[:2]}

    def forward(self, x):
        order = self.held["orders"][0]
        last = order[0] if order[0] > order[1] else None  # a branch on what is known
        y = self.layer(x)[:, order.to(x.device)]
        return y + self.table[:3, :3].to(x.device)[last]


def test_plain_tensors_of_a_model_that_is_built_for_real_are_counted_and_known():
    workload = with_model(HoldsPlainTensors)
    assert error_of(workload, StepConfig()) == 0  # the table is 16 KiB, the rest less than 8
    on_card = memlab.predict(workload, StepConfig(), "rtx-4060")
    assert on_card.outcome == Outcome.OK, on_card.message
    assert sum("assumed" in note or "built for real" in note for note in on_card.notes) == 1


class HoldsOthers(torch.nn.Module):
    """Is built for real, and holds a leaf that takes a gradient, and tensors that no step uses."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 3)
        self.bound = float(self.layer.weight.detach().numpy().std())
        self.of_numpy, self.leaves = torch.arange(3.0), [torch.ones(3, 4000, requires_grad=True)]
        places = torch.arange(4).expand(2, 4)
        self.others = [torch.sparse_coo_tensor(places, torch.ones(4), (4, 4))]
        self.others += [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])]

    def forward(self, x):
        y = self.layer(x) * float(self.of_numpy.numpy().sum())
        return y + torch.relu(y @ self.leaves[0].to(x.device)).mean(1, keepdim=True)


def test_plain_tensors_that_are_read_through_numpy_or_take_a_gradient_are_followed():
    # the leaf and its gradient are 48 KB each; not counted are 116 bytes of sparse and nested ones
    assert abs(error_of(with_model(HoldsOthers), StepConfig())) < 1e-3
    assert memlab.predict(with_model(HoldsOthers), StepConfig(), "t4").outcome == Outcome.OK


class FailsLater(torch.nn.Module):
    """Is built for real, and fails in its forward."""

    built: ClassVar[weakref.WeakSet] = weakref.WeakSet()

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 3)
        self.bound = float(self.layer.weight.detach().numpy().std())
        self.built.add(self)

    def forward(self, x):
        raise ValueError("not today")


def test_a_prediction_that_fails_leaves_no_model_behind():
    found = predict_in_process(
        with_model(FailsLater), StepConfig(), cards.resolve("t4"), seed=0, memory_limit=None,
        report=lambda _: None,
    )  # fmt: skip
    assert "not today" in found.result.message
    assert not list(FailsLater.built)


class CountsChosen(torch.nn.Module):
    """Counts the tokens of each expert as transformers does: integers on a card, else floats."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 3)

    def forward(self, x):
        y = self.layer(x)
        chosen = y.topk(1).indices.flatten()
        numbers = chosen.float() if x.device.type == "cpu" else chosen.int()
        counts = torch.histc(numbers, bins=3, min=0, max=2)
        first, *others = y.split([int(count) for count in counts])
        return torch.cat([first * 2, *others])


def test_integers_that_only_a_card_counts_are_counted():
    config = StepConfig(batch_size=9)
    found = memlab.predict(with_model(CountsChosen), config, "rtx-4060")
    assert found.outcome == Outcome.OK, found.message


class OfFactors(torch.nn.Module):
    """Keeps a few rows of a factor, which LAPACK returns by columns, so that they are a copy."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 3)
        wide = torch.nn.functional.pad(self.layer.weight.detach(), (0, 32, 0, 61))
        self.register_buffer("rows", torch.linalg.svd(wide)[2][:2].contiguous())

    def forward(self, x):
        return self.layer(x) + self.rows[0, :3]


def test_fake_kernels_on_a_cpu_return_strides_of_a_cpu():
    assert error_of(with_model(OfFactors), StepConfig()) == 0


@pytest.mark.parametrize("way", ["read", "written"])
def test_rows_of_a_tensor_on_a_card_may_be_named_in_host_memory(way):
    """CUDA takes indices from a CPU; on the card, they and their copies are a few kB."""
    most = 8 * 2**10

    def predicted(on_the_card):
        def compute_loss(model, x):
            device = x.device if on_the_card else None
            rows = torch.arange(len(x), device=device)[:, None]
            columns = torch.arange(3, device=device).expand(len(x), 3)
            y = model(x)
            if way == "read":
                return y[rows, columns].square().mean()
            z = torch.zeros_like(y)
            z[rows, columns] = y[:, :3]
            return z.square().mean()

        workload = made_of(lambda: torch.nn.Linear(256, 256), (64, 256), compute_loss, name="rows")
        result = memlab.predict(workload, StepConfig(batch_size=32), "rtx-4060")
        assert result.outcome == Outcome.OK, result.message
        return result.peak_allocated_bytes

    assert abs(predicted(True) - predicted(False)) <= most


def test_a_mask_from_the_batch_is_known():
    def loss(model, batch):
        keep = batch[1] > 0
        return torch.nn.functional.cross_entropy(model(batch[0])[keep], batch[1][keep])

    workload = dataclasses.replace(blocks(), compute_loss=loss)
    result = memlab.predict(workload, StepConfig(batch_size=32), "cpu")
    assert result.outcome == Outcome.OK
    assert not any("assumed" in note for note in result.notes)


class Ragged(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 3)

    def forward(self, x):
        return self.layer(x[..., None]).mean(1)


def test_batches_of_chance_lengths_are_recorded_as_they_are():
    def make_batch(n):
        return torch.randn(n, int(torch.randint(50, 500, (n,)).max())), torch.randint(3, (n,))

    workload = with_model(Ragged, make_batch=make_batch)
    config = StepConfig(batch_size=7, accumulation_steps=3)
    assert abs(error_of(workload, config)) < 1e-3


class AsksForAny(torch.nn.Module):
    """Holds a copy of its weights once they are not all zero, as the optimizer Prodigy does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.first = torch.nn.Linear(32, 32), None

    def forward(self, x):
        if self.first is None and self.layer.weight.any():
            self.first = self.layer.weight.detach().clone()
        return self.layer(x)


class KeepsState(torch.nn.Module):
    """Goes on with the hidden state of the step before."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.state = torch.nn.LSTM(32, 32, batch_first=True), None

    def forward(self, x):
        out, state = self.rnn(x[:, None].expand(-1, 5, -1), self.state)
        self.state = tuple(each.detach() for each in state)
        return out[:, -1]


class KeepsOutputs(torch.nn.Module):
    """Holds what it computed last, and does nothing with it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 32)
        )
        self.last = None

    def forward(self, x):
        self.last = [x]
        for layer in self.layers:
            self.last.append(layer(self.last[-1]))
        out = self.last[-1]
        self.last = [each.detach() for each in self.last]
        return out


class KeepsQueue(torch.nn.Module):
    """A queue of past outputs in a buffer of its own size, as contrastive learning has them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 32)
        self.register_buffer("queue", torch.randn(64, 32))

    def forward(self, x):
        y = self.layer(x)
        scores = y @ self.queue.clone().T
        with torch.no_grad():
            self.queue = torch.cat([y, self.queue])[:64].clone()
        return torch.cat([y, scores], dim=1)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", [KeepsState, KeepsOutputs, KeepsQueue, AsksForAny])
@pytest.mark.parametrize("size", [6, 8])
def test_what_a_model_keeps_of_its_last_batch_is_as_large_as_the_batch(kind, size):
    workload = with_model(kind, compute_loss=of_squares)
    assert_predicted(workload, StepConfig(batch_size=size))


class KeepsMore(torch.nn.Module):
    """Keeps what it has seen, at most so many batches."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.layer, self.most, self.seen = torch.nn.Linear(32, 32), most, []

    def forward(self, x):
        self.seen = [*self.seen, self.layer(x).detach()][-self.most :]
        return self.layer(x) + sum(each.mean() for each in self.seen)


@pytest.mark.parametrize("most", [1, 4])
def test_what_grows_from_step_to_step_is_said(most):
    workload = with_model(lambda: KeepsMore(most), compute_loss=of_squares)
    for result in assert_predicted(workload, StepConfig(batch_size=6)):
        said = [note for note in result.notes if "the workload keeps tensors" in note]
        assert bool(said) == (most > 1)
        assert all("768 B more are held" in note for note in said)


# models that cannot be built of fake tensors: what is said, and none is built that cannot fit


WIDE, DEEP = 2**15, 64  # matrices of 4 GiB, and how many of them


def huge():
    return nn.Sequential(*[nn.Linear(WIDE, WIDE, bias=False) for _ in range(DEEP)])


def memory_of(layer):
    """Hand the memory of a layer to code that is not PyTorch's; fake tensors have none."""
    if "Fake" in type(layer.weight.data).__name__:
        raise TypeError("no memory to hand over")


def workload(build_model):
    return made_of(build_model, (8,), lambda model, batch: model(batch).mean(), name="built")


def test_an_error_that_has_nothing_to_do_with_tensors_is_said_and_not_met_again_for_real():
    built = []

    def build():
        built.append(huge())
        raise ValueError("no targets for this architecture")

    found = predicted(StepConfig(batch_size=2), "h200", workload(build))
    assert found.outcome == Outcome.FAILED
    assert "ValueError: no targets for this architecture" in found.message
    assert len(built) == 4, "two attempts, each over fake tensors and without memory"


@pytest.mark.parametrize("reads", [False, True])
def test_a_model_that_cannot_fit_is_never_built_for_real(reads):
    def build():
        model = huge()
        memory_of(model[0])
        if reads:
            assert model[0].weight.detach().sum().item() != 0
        return model

    found = predicted(StepConfig(batch_size=2), "h200", workload(build))
    assert found.outcome == Outcome.UNSUPPORTED
    assert "build_model raises" in found.message
    assert "it takes 256 GiB" in found.message
    assert available_memory_bytes() < DEEP * WIDE**2 * 4


def test_a_build_for_real_ends_before_it_takes_more_than_there_is(monkeypatch):
    monkeypatch.setattr(fake_workload, "available_memory_bytes", lambda: 2**20)

    def build():
        model = nn.ModuleList()
        memory_of(nn.Linear(8, 8))
        if torch.zeros(2**15).sum().item() == 0:  # not known without memory
            model.extend(nn.Linear(256, 256) for _ in range(2**10))
        return model

    found = predicted(StepConfig(batch_size=2), workload=workload(build))
    assert found.outcome == Outcome.UNSUPPORTED
    assert "it takes more than there is, and 1.00 MiB of memory are available" in found.message


def test_a_small_model_that_needs_memory_is_built_for_real():
    def build():
        model = nn.Linear(8, 8)
        memory_of(model)
        return model

    found = predicted(StepConfig(batch_size=2), workload=workload(build))
    assert found.outcome == Outcome.OK, found.message
    assert any("built for real" in note for note in found.notes)


def test_experts_that_bitsandbytes_leaves_in_16_bits_are_counted_and_said(tmp_path):
    pytest.importorskip("bitsandbytes")
    transformers = pytest.importorskip("transformers")
    from memlab.workloads import finetune

    experts, width, inner, layers = 8, 64, 32, 2
    transformers.Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"], vocab_size=256, hidden_size=width,
        num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=inner,
        num_hidden_layers=layers, head_dim=16, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64,
    ).save_pretrained(tmp_path)  # fmt: skip
    made = finetune(str(tmp_path), base="nf4", targets=("q_proj", "v_proj"), tokens=16)
    found = predicted(StepConfig(batch_size=1), "h200", made)
    assert found.outcome == Outcome.OK, found.message
    nbytes = layers * experts * 3 * width * inner * 2
    (note,) = [note for note in found.notes if "experts of a mixture" in note]
    assert "stay in bfloat16" in note
    assert f"take {nbytes // 1024} KiB" in note
    assert found.peak_by_category["parameters"] > nbytes


def test_what_is_hidden_takes_no_power_from_a_step():
    """Ranks that send beside their kernels draw nearly as much as a card alone."""
    workload = blocks(width=2048)
    alone = memlab.predict(workload, StepConfig(batch_size=512), "h100")
    config = StepConfig(batch_size=8 * 512, sharding="ddp", world_size=8)
    together = memlab.predict(workload, config, "8x-h100")
    assert together.watts == pytest.approx(alone.watts, rel=0.25)
    limited = memlab.predict(workload, config, "8x-h100, 300 W")
    assert limited.watts == 300
    assert limited.step_seconds > together.step_seconds


def test_a_small_step_on_a_card_waits_for_its_host_and_a_large_one_does_not():
    small = memlab.predict(blocks(), StepConfig(batch_size=2), "h100")
    assert any(note.startswith("The card waits for its host") for note in small.notes)
    large = memlab.predict(blocks(width=4096), StepConfig(batch_size=8192), "h100")
    assert not any("its host" in note for note in large.notes)
    assert large.uncertainty["step_seconds"] < small.uncertainty["step_seconds"]


def test_other_batches_wait_for_the_host_as_those_that_are_recorded():
    """A batch takes no less than its host, and once that is hidden no less than its kernels."""

    def of(batch):
        return predict_in_process(
            blocks(width=1024), StepConfig(batch_size=batch), cards.resolve("h100"), seed=0,
            memory_limit=None, report=lambda _: None,
        )  # fmt: skip

    exact = {batch: of(batch) for batch in (16, 256, 2048, 16384)}
    waits = exact[256].result.step_seconds
    assert exact[16].result.step_seconds == pytest.approx(waits)  # for its host
    assert exact[16384].result.step_seconds > 5 * exact[2048].result.step_seconds  # the kernels'
    for base in (256, 2048, 16384):
        for batch, wanted in exact.items():
            found, exactly = interpolated(exact[base], StepConfig(batch_size=batch)), wanted.result
            assert found.step_seconds == pytest.approx(exactly.step_seconds, rel=0.05)
            assert found.uncertainty["step_seconds"] >= exactly.uncertainty["step_seconds"]


def test_another_batch_says_nothing_of_the_power_of_this_one():
    config = StepConfig(batch_size=64)
    first, other = memlab.predict_batches(blocks(width=512), config, [64, 128], "h100, 300 W")
    assert first.watts is not None
    assert other.watts is None
    assert not any("power limit" in note or "the host" in note for note in other.notes)
