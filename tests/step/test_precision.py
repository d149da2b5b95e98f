"""A model is trained in the formats that it was built in, unless a precision says otherwise."""

import copy
import dataclasses
import importlib.util

import pytest
import torch
from torch import nn

import memlab
from memlab import StepConfig, StepResult, measure
from memlab.config import Precision
from memlab.errors import UnsupportedError
from memlab.techniques import precision, registry
from memlab.techniques.optimizers.weight_formats import round_at_random
from memlab.techniques.precision import bytes_of, cast_model, number_formats
from memlab.techniques.script import script
from memlab.techniques.step import build_step, set_seed
from tests.models import linear, made_of
from tests.panel_parts import make_result
from tests.predictions import assert_predicted, predicted

FEATURES, RANK, BATCH = 512, 4, 8


class Lora(nn.Module):
    """A frozen bf16 matrix, and two trainable fp32 ones of a low rank beside it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(FEATURES, FEATURES, bias=False, dtype=torch.bfloat16)
        self.base.requires_grad_(False)
        self.down = nn.Linear(FEATURES, RANK, bias=False)
        self.up = nn.Linear(RANK, FEATURES, bias=False)

    def forward(self, x):
        return self.base(x.to(self.base.weight.dtype)).to(x.dtype) + self.up(self.down(x))


class Float64(nn.Linear):
    """All parameters in fp64, as scientific models have them."""

    def __init__(self):
        super().__init__(FEATURES, 1, dtype=torch.float64)


class NormInBf16(nn.Module):
    """fp32 but for one layer, and an fp64 buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.norm = nn.LayerNorm(FEATURES, dtype=torch.bfloat16)
        self.register_buffer("scale", torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x):
        return self.norm(self.first(x).to(torch.bfloat16)).to(x.dtype) * self.scale


def workload(kind, dtype=torch.float32):
    return made_of(kind, lambda n: torch.randn(n, FEATURES, dtype=dtype), name=kind.__name__)


def here(kind, config, dtype=torch.float32):
    return memlab.measure(workload(kind, dtype), config, "cpu", repeats=1, isolate=False)


def predict(workload, config, device):
    return predicted(config, device, workload)


EVERY = [(Lora, torch.float32), (Float64, torch.float64), (NormInBf16, torch.float32)]


@pytest.mark.parametrize(("kind", "dtype"), EVERY)
def test_by_default_nothing_is_cast(kind, dtype):
    assert StepConfig().precision == "as-built"
    expected = {name: t.dtype for name, t in kind().state_dict().items()}
    step = build_step(workload(kind, dtype), StepConfig(batch_size=2), "cpu")
    assert {name: t.dtype for name, t in step.model.state_dict().items()} == expected
    assert step.micro_batches[0].dtype == dtype
    step()


def test_as_built_is_what_a_person_would_write_bit_by_bit():
    step = build_step(workload(Lora), StepConfig(batch_size=BATCH, optimizer="sgd"), "cpu")
    torch.manual_seed(0)
    model = Lora()
    torch.manual_seed(0)
    batch = torch.randn(BATCH, FEATURES)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(3):
        loss = model(batch).square().mean()
        assert step() == loss.item()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(step.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_bytes_of_a_bf16_base_and_fp32_adapters_are_those_of_their_formats():
    adapters = 4 * 2 * FEATURES * RANK
    found = here(Lora, StepConfig(batch_size=BATCH)).peak_by_category
    assert found["parameters"] == 2 * FEATURES**2 + adapters
    assert found["optimizer_state"] == 2 * adapters + 2 * 4  # and a count of steps for each
    cast = here(Lora, StepConfig(batch_size=BATCH, precision="bf16")).peak_by_category
    assert cast["parameters"] == 2 * FEATURES**2 + adapters // 2


@pytest.mark.parametrize(("kind", "dtype"), EVERY)
def test_a_prediction_is_as_measured(kind, dtype):
    config = StepConfig(batch_size=BATCH, accumulation_steps=2)
    predicted, measured = assert_predicted(workload(kind, dtype), config)
    assert predicted.peak_by_category == measured.peak_by_category
    assert predicted.parameter_formats == measured.parameter_formats


@pytest.mark.slow
def test_a_card_holds_weights_in_their_formats():
    result = predict(workload(Lora), StepConfig(batch_size=BATCH), "t4")
    adapters = 4 * 2 * FEATURES * RANK
    assert result.peak_by_category["parameters"] == 2 * FEATURES**2 + adapters
    assert any("Tesla T4 has no bfloat16" in note for note in result.notes)
    cast = predict(workload(Lora), StepConfig(batch_size=BATCH, precision="fp32"), "t4")
    assert cast.peak_by_category["parameters"] == 4 * FEATURES**2 + adapters
    assert not any("bfloat16 arithmetic" in note for note in cast.notes)


@pytest.mark.parametrize(
    ("kind", "dtype", "precision", "note"),
    [
        (Lora, torch.float32, "fp32", "cast 1 parameter of bfloat16 (512 KiB) to float32"),
        (Lora, torch.float32, "bf16-mixed", "cast 1 parameter of bfloat16"),
        (Float64, torch.float64, "bf16", "cast 2 parameters of float64 (4.01 KiB) to bfloat16"),
        (Float64, torch.float64, "fp32", "cast 1 tensor of float64 (32.0 KiB) of the batch"),
        (NormInBf16, torch.float32, "fp32", "(2.00 KiB) and 1 buffer of float64 (8 B) to float32"),
    ],
)
def test_what_is_cast_is_said(kind, dtype, precision, note):
    config = StepConfig(batch_size=BATCH, precision=precision)
    notes = build_step(workload(kind, dtype), config, "cpu").notes
    assert sum(note in said for said in notes) == 1, notes


def test_measured_and_predicted_results_say_what_was_cast():
    config = StepConfig(batch_size=BATCH, precision="fp32")
    for result in (here(Lora, config), predict(workload(Lora), config, "cpu")):
        assert result.outcome == "ok", result.message
        assert sum("cast 1 parameter of bfloat16" in said for said in result.notes) == 1


@pytest.mark.parametrize("precision", ["as-built", "fp32", "bf16-mixed", "bf16"])
def test_nothing_is_said_of_an_fp32_model(precision):
    plain = dataclasses.replace(workload(Lora), build_model=lambda: nn.Linear(FEATURES, 1))
    assert build_step(plain, StepConfig(batch_size=2, precision=precision), "cpu").notes == ()


def test_results_say_what_was_built():
    adapted, plain = here(Lora, StepConfig(batch_size=2)), make_result()
    assert adapted.number_format == "as built: bfloat16 and float32"
    assert "batch_size=2, as built: bfloat16 and float32" in str(adapted)
    assert "as built: bfloat16 and float32" in adapted._repr_html_()
    assert "as built: bfloat16 and float32" in str(memlab.explain(adapted))
    assert StepResult.from_dict(adapted.to_dict()).parameter_formats == adapted.parameter_formats
    fp32 = dataclasses.replace(plain, parameter_formats=("float32",))
    assert fp32.number_format == "fp32"
    assert "built" not in str(fp32)
    frame = memlab.to_frame([adapted, fp32])
    assert list(frame["number_format"]) == ["as built: bfloat16 and float32", "fp32"]
    assert list(frame["precision"]) == ["as-built", "as-built"]


def test_no_remedy_halves_what_is_narrow_already():
    bf16 = dataclasses.replace(
        workload(Lora, torch.bfloat16),
        build_model=lambda: nn.Linear(FEATURES, FEATURES, dtype=torch.bfloat16),
    )
    for result in (here(Lora, StepConfig(batch_size=999)), predict(bf16, StepConfig(), "h200")):
        names = {remedy.name for remedy in memlab.explain(result).remedies}
        assert names
        assert not any("precision" in name for name in names)


def test_a_step_that_ran_out_of_memory_says_its_formats():
    config = StepConfig(batch_size=BATCH)
    result = memlab.measure(
        workload(Lora), config, "cpu", repeats=1, isolate=False, memory_limit=600_000
    )
    assert result.outcome == "out_of_memory"
    assert result.parameter_formats == ("bfloat16", "float32")


def test_quantised_weights_are_never_cast():
    class Packed(nn.Parameter):
        """Two numbers of 4 bits in each byte of a float, as bitsandbytes may store them."""

    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            bits = torch.arange(FEATURES, dtype=torch.int16).view(torch.bfloat16)
            self.packed = Packed(bits, requires_grad=False)
            self.whole = nn.Parameter(torch.arange(4, dtype=torch.uint8), requires_grad=False)
            self.narrow = nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False)
            self.register_buffer("phase", torch.ones(2, dtype=torch.complex128))
            self.head = nn.Linear(FEATURES, 1)

        def forward(self, x):
            return self.head(x)

    for name in ("as-built", "fp32", "bf16"):
        config = StepConfig(batch_size=2, precision=name)
        model = build_step(workload(Quantised), config, "cpu").model
        assert type(model.packed) is Packed
        assert torch.equal(model.packed.view(torch.int16), torch.arange(FEATURES).short())
        kept = (model.whole.dtype, model.narrow.dtype, model.phase.dtype)
        assert kept == (torch.uint8, torch.float8_e4m3fn, torch.complex128)


def test_a_weight_that_wraps_others_counts_in_their_formats_and_is_not_cast():
    ao = pytest.importorskip("torchao.quantization")
    model = nn.Linear(FEATURES, BATCH, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    ao.quantize_(model, ao.Int8WeightOnlyConfig(set_inductor_config=False))
    by_hand = (
        FEATURES * BATCH + 4 * BATCH + BATCH
    )  # int8, and for each row a scale and a zero point
    for built in (Precision.AS_BUILT, Precision.FP32):
        assert bytes_of(model, built) == by_hand
    assert number_formats(model) == ("int8", "float32")
    assert cast_model(model, Precision.FP32) == []
    assert model.weight.qdata.dtype is torch.int8
    assert model.weight.dtype is torch.bfloat16


@pytest.mark.parametrize("optimizer", ["sgd", "sgd-momentum"])
def test_the_fused_sgd_is_refused_for_half_weights_as_built(optimizer):
    fused = StepConfig(batch_size=2, optimizer=optimizer, optimizer_implementation="fused")
    with pytest.raises(UnsupportedError, match="weights of bfloat16 on a CPU"):
        build_step(workload(NormInBf16), fused, "cpu")
    build_step(workload(Lora), fused, "cpu")  # whose bf16 weights are frozen


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "fp32"},
        {"optimizer_implementation": "foreach"},
        {"optimizer_implementation": "fused"},
        {"optimizer": "adafactor", "optimizer_in_backward": True},
        {"checkpointing": "blocks", "checkpoint_modules": "Linear"},
        {"precision": "bf16-master"},
        {"precision": "bf16-stochastic"},
    ],
    ids=str,
)
def test_mixed_formats_train_as_their_script_does(fields):
    config = StepConfig(batch_size=4, **fields)
    step = build_step(workload(NormInBf16), config, "cpu")
    set_seed(0)
    losses = [step() for _ in range(3)]
    names = {"__name__": "exported"}
    exec(script(config, "cpu"), names)
    set_seed(0)
    model = NormInBf16()
    set_seed(0)
    batch = workload(NormInBf16).make_batch(4)
    set_seed(0)
    model, theirs = names["train"](lambda: model, [batch] * 3, workload(Lora).compute_loss, "cpu")
    assert losses == theirs
    for (name, ours), other in zip(step.model.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(step.value_of(ours), other), name
        assert ours.dtype == other.dtype


# number formats: what they refuse, what they switch and put back, and what small updates do


def test_tf32_is_refused_on_a_cpu_and_on_cards_before_ampere():
    with pytest.raises(UnsupportedError, match=r"precision='tf32' on a CPU.*use precision='fp32'"):
        build_step(linear(), StepConfig(precision="tf32"), "cpu")
    turing = predicted(StepConfig(precision="tf32"), "t4")
    assert turing.outcome == "unsupported"
    assert "Ampere" in turing.message


def test_tf32_changes_the_time_on_a_card_and_no_byte():
    def build():
        return nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4)))

    workload = made_of(build, (4096,))
    found = {
        name: predicted(StepConfig(batch_size=4096, precision=name), "h200", workload)
        for name in ("fp32", "tf32")
    }
    assert found["tf32"].peak_allocated_bytes == found["fp32"].peak_allocated_bytes
    assert found["tf32"].step_seconds < 0.5 * found["fp32"].step_seconds


def test_tf32_is_on_inside_of_the_step_alone():
    before = torch.get_float32_matmul_precision()
    with precision.matrix_products(Precision.TF32):
        assert torch.get_float32_matmul_precision() == "high"
    with pytest.raises(KeyError), precision.matrix_products(Precision.TF32):
        raise KeyError
    assert torch.get_float32_matmul_precision() == before
    with precision.matrix_products(Precision.FP32):
        assert torch.get_float32_matmul_precision() == before


def test_fp16_tells_its_risk_and_a_nan_is_told():
    result = measure(
        linear(), StepConfig(batch_size=4, precision="fp16"), "cpu", repeats=3, isolate=False
    )
    assert result.outcome == "ok"
    assert any("becomes NaN" in note for note in result.notes)
    dead = dataclasses.replace(
        linear(), compute_loss=lambda model, x: (model(x)[:, :1] * 1.0).square().mean()
    )  # all other rows of the weight have no gradient: 0 / (0 + eps), and eps is 0 in fp16
    result = measure(dead, StepConfig(batch_size=4, precision="fp16"), "cpu", isolate=False)
    assert result.outcome == "ok"
    step = build_step(dead, StepConfig(batch_size=4, precision="fp16"), "cpu")
    step()
    assert step.model.weight.isnan().any()


def one_weight():
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return self.weight * x

    return made_of(One, lambda n: torch.ones(n, 4), lambda model, x: model(x).mean(), name="one")


@pytest.mark.parametrize("in_backward", [False, True])
def test_master_weights_keep_updates_that_bf16_loses(in_backward):
    """SGD takes 1e-3 * 0.25 off a weight of 1: less than half of bf16's step of 2**-8 below 1."""
    ends = {}
    for name in ("fp32", "bf16", "bf16-master", "bf16-stochastic"):
        config = StepConfig(
            batch_size=2, optimizer="sgd", precision=name, optimizer_in_backward=in_backward
        )
        step = build_step(one_weight(), config, "cpu")
        for _ in range(40):
            step()
        ends[name] = step.model.weight[0].item()
    assert ends["bf16"] == 1.0
    assert ends["fp32"] == pytest.approx(0.99, abs=1e-4)
    assert ends["bf16-master"] == pytest.approx(0.99, abs=2**-9)
    assert ends["bf16-stochastic"] < 1.0


def test_rounding_at_random_is_right_in_the_mean_and_to_a_neighbour_each_time():
    set_seed(0)
    exact = torch.linspace(-2.0, 2.0, 1001)
    out = torch.zeros(4000, 1001, dtype=torch.bfloat16)
    round_at_random(exact.repeat(4000, 1), out)
    step = torch.finfo(torch.bfloat16).eps * 2
    assert ((out.float() - exact).abs() < step).all()
    assert (out.double().mean(0) - exact).abs().max() < 5 * step / 2 / 4000**0.5
    as_bf16 = exact.bfloat16()
    round_at_random(as_bf16.float(), out[0])
    assert torch.equal(out[0], as_bf16)


def test_fp8_is_refused_where_there_is_none(monkeypatch):
    config = StepConfig(precision="fp8-mixed")
    with pytest.raises(UnsupportedError, match=r"'fp8-mixed' on a CPU.*use precision='bf16-mixed'"):
        build_step(linear(), config, "cpu")
    found = predicted(config, "h200")
    assert (found.outcome, "cannot be predicted" in found.message) == ("unsupported", True)
    monkeypatch.setattr(precision, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"needs torchao.*memlab\[fp8\]"):
        registry.check(config, torch.device("cuda"))


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs memlab[fp8]")
def test_fp8_replaces_the_linear_layers_that_it_can_and_keeps_the_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 3))
    plain, x = copy.deepcopy(model), torch.randn(32, 64)
    weights = list(map(id, model.parameters()))
    precision.multiply_in_fp8(model, emulate=True)
    assert [type(m).__name__ for m in model] == ["Float8Linear", "GELU", "Float8Linear", "Linear"]
    assert list(map(id, model.parameters())) == weights
    for each in (model, plain):
        each(x).square().mean().backward()
    found, expected = (
        torch.cat([p.grad.flatten() for p in each.parameters()]) for each in (model, plain)
    )
    assert 1e-3 < (found - expected).norm() / expected.norm() < 0.25
    with pytest.raises(UnsupportedError, match="multiples of 16"):
        precision.multiply_in_fp8(nn.Linear(64, 3))
