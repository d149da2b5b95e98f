"""Families of models that predict has to know by structure, each compared with `measure`."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from memlab import StepConfig, Workload, measure, predict
from memlab.errors import UnsupportedError
from memlab.tracing import fake_workload
from memlab.tracing.fakify import made_fake
from tests import predictions
from tests.models import made_of

CONFIG = StepConfig(batch_size=4)


def assert_predicted(workload: Workload, config: StepConfig = CONFIG, *, within: float = 1e-3):
    """Hold the prediction for this CPU against the meter, and ask for one for two cards."""
    predicted = predict(workload, config, "cpu")
    measured = measure(workload, config, "cpu", repeats=1, warmup=0)
    assert (predicted.outcome, measured.outcome) == ("ok", "ok"), predicted.message
    peak = measured.peak_allocated_bytes
    assert abs(predicted.peak_allocated_bytes - peak) <= within * peak
    for card in ("h200", "rtx-4060"):
        on_card = predict(workload, config, card)
        assert on_card.outcome == "ok", on_card.message
    return predicted


def on_features(name: str, build, width: int = 16) -> Workload:
    """Return a workload whose model makes its own loss of `width` features."""
    return made_of(build, (8, width), lambda model, x: model(x), name=name)


class GroupedExperts(nn.Module):
    """Tokens sorted by the expert that they go to, and one product over all groups of them."""

    def __init__(self, outer: int) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.up = nn.Parameter(torch.randn(4, outer, 16) / 4)  # each expert's, (outer, 16)
        self.down = nn.Parameter(torch.randn(4, 16, outer) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(0, 1)
        weight, chosen = self.router(x).softmax(-1).topk(2)
        order = chosen.flatten().argsort()
        counts = torch.histc(chosen.flatten().float(), 4, 0, 3)
        ends = counts.cumsum(0).to(torch.int32)
        inner = functional.grouped_mm(x[order // 2], self.up.transpose(1, 2), offs=ends).relu()
        out = functional.grouped_mm(inner, self.down.transpose(1, 2), offs=ends)
        return (out * weight.flatten()[order, None]).square().mean()


@pytest.mark.skipif(not hasattr(functional, "grouped_mm"), reason="this torch has no grouped_mm")
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_products_of_groups_are_predicted_in_any_format(precision):
    workload = on_features("grouped", lambda: GroupedExperts(24))
    assert_predicted(workload, StepConfig(batch_size=4, precision=precision))


class RoutedExperts(nn.Module):
    """A loop over the experts that any token goes to, each found by a name with its number."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleDict({f"expert_{i}": nn.Linear(16, 16) for i in range(4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(0, 1)
        weight, chosen = self.router(x).softmax(-1).topk(2)
        with torch.no_grad():
            hits = functional.one_hot(chosen, 4).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for index in (hits.sum(dim=(-1, -2)) > 0).nonzero().flatten():
            place, token = torch.where(hits[index])
            expert = self.experts[f"expert_{index}"]
            out = out.index_add(0, token, expert(x[token]) * weight[token, place, None])
        return out.square().mean()


def test_tokens_are_spread_evenly_over_experts_and_that_is_said():
    predicted = assert_predicted(on_features("routed", RoutedExperts), within=0.02)
    assert sum("spread evenly" in note for note in predicted.notes) == 1
    assert 0.1 < predicted.uncertainty["peak_allocated_bytes"] < 0.5


class Checked(nn.Module):
    """Raises for numbers that no step that goes well has, and draws from distributions."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, spread = self.encode(x).chunk(2, dim=-1)
        assert torch.isfinite(x).all()
        if (mean > 1e6).any():
            raise ValueError("too large")
        shares = mean.softmax(-1)
        if not ((shares >= 0) & (shares <= 1)).sum() == shares.numel():
            raise ValueError("no shares")
        num_bad = int((shares > 2).sum())
        if num_bad > 0:
            raise ValueError(f"{num_bad} shares are too large, the first {shares.max():.3f}")

        found = torch.distributions.Normal(mean, functional.softplus(spread) + 0.01)
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        loss = (self.decode(found.rsample()) - x).square().mean()
        loss = loss + torch.distributions.kl_divergence(found, prior).mean()
        rate = torch.distributions.Gamma(functional.softplus(spread) + 1, 1 + shares).rsample()
        return loss * 0 if torch.isnan(loss) else loss + rate.mean()


def test_a_check_is_assumed_to_pass_and_nothing_is_said_of_it():
    predicted = assert_predicted(on_features("checked", Checked))
    assert not [note for note in predicted.notes if "assumed" in note]


def test_a_check_that_no_value_passes_fails_as_it_does_for_real():
    class Failing(nn.Linear):
        def forward(self, x):
            raise ValueError(f"always: {bool((x > 0).all())}")

    workload = on_features("failing", lambda: Failing(16, 1))
    predicted = predict(workload, CONFIG, "cpu")
    assert (predicted.outcome, "ValueError: always" in predicted.message) == ("failed", True)


class Packed(nn.Module):
    """A recurrent layer over sequences of different lengths, and a text aligned to each."""

    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer, self.out = layer(16, 24, batch_first=True), nn.Linear(24, 11)

    def forward(self, batch) -> torch.Tensor:
        x, lengths, text, letters = batch
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        padded, lengths = nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        scores = self.out(padded).log_softmax(-1).transpose(0, 1)
        from_tensors = functional.ctc_loss(scores, text, lengths.cpu(), letters)
        return from_tensors + functional.ctc_loss(scores, text, lengths.tolist(), letters.tolist())


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_lengths_that_come_with_the_batch_are_known(layer):
    def make_batch(n):
        number = torch.arange(n)
        return torch.randn(n, 20, 16), 20 - number % 4, torch.randint(1, 10, (n, 5)), 5 - number % 3

    workload = made_of(lambda: Packed(layer), make_batch, lambda model, batch: model(batch))
    assert not any("assum" in note for note in assert_predicted(workload).notes)
    on_card = predict(workload, CONFIG, "rtx-4060")  # a card takes lengths that lie in the host
    assert on_card.outcome == "ok", on_card.message
    assert not any("assum" in note for note in on_card.notes)


class Lengths(nn.Module):
    """A recurrent layer over sequences whose lengths the model itself knows, as a list."""

    def __init__(self, layer: type[nn.RNNBase], is_sorted: bool) -> None:
        super().__init__()
        self.layer, self.is_sorted = layer(16, 24, batch_first=True), is_sorted

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = [20 - number % 4 for number in range(len(x))]
        packed = nn.utils.rnn.pack_padded_sequence(
            x,
            sorted(lengths, reverse=True) if self.is_sorted else lengths,
            batch_first=True,
            enforce_sorted=self.is_sorted,
        )
        return self.layer(packed)[0].data.square().mean()


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_lengths_that_a_model_makes_of_a_list_are_known(layer, is_sorted):
    """Nothing else of such a step has known values: the batch has numbers alone."""
    workload = made_of(lambda: Lengths(layer, is_sorted), (20, 16), lambda model, x: model(x))
    assert not any("assum" in note for note in assert_predicted(workload, within=0.002).notes)


class Penalized(nn.Module):
    """The penalty on gradients with respect to the batch, which then keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        score = self.inner(x.requires_grad_())
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.mean() + (slope.norm(dim=-1) - 1).square().mean()


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_a_batch_keeps_the_gradients_that_a_penalty_leaves(num_micro_batches):
    config = StepConfig(batch_size=4, accumulation_steps=num_micro_batches)
    predicted = assert_predicted(on_features("penalized", Penalized), config)
    assert predicted.peak_by_category["buffers"] >= 4 * 4 * 8 * 16  # fp32, four samples of 8 x 16


def slope(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    score = model(x)
    (found,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return found.square().mean() + score.mean()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"accumulation_steps": 2},
        {"precision": "bf16"},
        {"precision": "bf16", "accumulation_steps": 2},
        {"sharding": "ddp", "world_size": 2},
    ],
)
@pytest.mark.parametrize("most", [fake_workload.BATCH_BYTES, 16])
def test_points_of_which_a_loss_takes_the_slope_keep_their_gradients(most, fields, monkeypatch):
    """As of a physics-informed network; of a batch above `most` bytes two samples are made."""
    monkeypatch.setattr(fake_workload, "BATCH_BYTES", most)
    workload = made_of(
        lambda: nn.Sequential(nn.Linear(64, 16), nn.Softplus(), nn.Linear(16, 1)),
        lambda n: torch.randn(n, 64, requires_grad=True),
        slope,
    )
    config = StepConfig(batch_size=32, optimizer="sgd", **fields)
    found = predictions.predicted(config, workload=workload)
    measured = measure(workload, config, "cpu", repeats=2, warmup=0)
    assert (found.outcome, measured.outcome) == ("ok", "ok"), found.message
    # ranks free their scalars sooner or later; a gradient of the points has 2 KiB and more
    allowed = 256 if "sharding" in fields else 0
    assert abs(found.peak_allocated_bytes - measured.peak_allocated_bytes) <= allowed


def test_torchscript_is_predicted_with_doubt_or_refused_by_name():
    def build():
        inner = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        return nn.Sequential(torch.jit.script(inner), nn.Flatten(0))

    workload = on_features("script", build)
    workload = replace(workload, compute_loss=lambda model, x: model(x).mean())
    found = predict(workload, CONFIG, "cpu")
    assert (found.outcome, found.uncertainty["peak_allocated_bytes"] > 0.1) == ("ok", True)
    with pytest.raises(UnsupportedError, match="TorchScript"):
        made_fake(build(), FakeTensorMode(), lambda fake, real: None)


class Gated(nn.Module):
    """Where TorchScript's own backward keeps other tensors than autograd's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        return self.down(torch.relu(y) * torch.sigmoid(y) + y)


def test_a_step_that_torchscript_runs_as_all_later_ones_is_predicted():
    workload = on_features("script", lambda: torch.jit.script(Gated()))
    workload = replace(workload, compute_loss=lambda model, x: model(x).square().mean())
    assert_predicted(workload, CONFIG)


def test_scripted_functions_inside_a_model_are_noticed():
    def gated(x: torch.Tensor) -> torch.Tensor:
        return x * x.sigmoid()

    class Scripted(nn.Linear):
        def __init__(self, width: int) -> None:
            super().__init__(width, width)
            self.gate = torch.jit.script(gated)

        def forward(self, x):
            return self.gate(super().forward(x)).mean()

    found = predict(on_features("function", lambda: Scripted(16)), CONFIG, "cpu")
    assert found.outcome == "ok", found.message
    assert ["TorchScript" in note for note in found.notes if "Script" in note] == [True]


class GatedMixer(nn.Module):
    """Gated mixing along the length and the width: no layer of any library."""

    def __init__(self) -> None:
        super().__init__()
        self.along = nn.Parameter(torch.randn(8, 8) / 8)
        self.gate, self.out = nn.Linear(16, 32), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = self.gate(torch.einsum("lm,nmw->nlw", self.along, x)).chunk(2, dim=-1)
        return self.out((value * gate.sigmoid() + x).amax(dim=1)).square().mean()


class Pyramid(nn.Module):
    """Convolutions whose outputs are kept, scaled and summed, with a shared normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList(nn.Conv2d(c, 8, 3, 2, 1) for c in (1, 8, 8))
        self.norm, self.out = nn.BatchNorm2d(8), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept, x = [], x.repeat(1, 4, 2)[:, None]
        for level in self.levels:
            x = self.norm(level(x)).relu()
            kept.append(functional.adaptive_avg_pool2d(x, 4))
        return self.out(torch.stack(kept).sum(dim=0).mean(dim=(2, 3))).square().mean()


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16"])
@pytest.mark.parametrize("kind", [GatedMixer, Pyramid])
def test_models_that_memlab_has_never_seen_are_predicted(kind, precision):
    config = StepConfig(batch_size=7, accumulation_steps=3, precision=precision)
    assert_predicted(on_features("foreign", kind), config, within=0.005)


def normed_in_the_middle() -> nn.Module:
    """Return a module whose norm sees a transposed input, and then a reshape of what it returns."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = nn.BatchNorm1d(16), nn.Linear(8 * 16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm((x * 2).transpose(1, 2)).transpose(1, 2)
            return self.out(x.reshape(len(x), -1)).square().mean()

    return Normed()


def test_copies_that_the_strides_of_real_kernels_ask_for_are_predicted():
    workload = on_features("normed", normed_in_the_middle)
    predicted = predict(workload, CONFIG, "cpu")
    measured = measure(workload, CONFIG, "cpu", repeats=1, warmup=0)
    assert predicted.peak_allocated_bytes == measured.peak_allocated_bytes


class Jagged(nn.Module):
    """Samples of different lengths in one nested tensor, as `torch.nested` makes it of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [sample[: 3 + index % 3] for index, sample in enumerate(x)]
        nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
        means = [part.mean(0) for part in self.up(nested).unbind()]
        return self.head(torch.stack(means)).mean()


@pytest.mark.parametrize("device", ["cpu", "t4"])
def test_nested_tensors_of_jagged_layout_are_refused_by_name(device):
    found = predictions.predicted(CONFIG, device, on_features("jagged", Jagged))
    assert found.outcome == "unsupported"
    assert "nested tensor of jagged layout" in found.message
    assert "memlab.measure" in found.message


TABLES: dict[int, torch.Tensor] = {}


class FromTable(nn.Module):
    """Takes a table from a cache of its module, and fills it in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if 64 not in TABLES:
            TABLES[64] = torch.ones(64, 64) * 0.1
        return self.linear(x @ TABLES[64])


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_a_cache_outside_of_the_model_is_counted(accumulation_steps):
    workload = made_of(
        FromTable, lambda n: torch.ones(n, 64), lambda model, x: model(x).mean(), name="table"
    )
    config = StepConfig(batch_size=4, accumulation_steps=accumulation_steps)
    TABLES.clear()
    measured = measure(workload, config, "cpu", repeats=1, warmup=0, isolate=False)
    TABLES.clear()
    found = predictions.predicted(config, workload=workload)
    TABLES.clear()
    assert found.peak_allocated_bytes == measured.peak_allocated_bytes
