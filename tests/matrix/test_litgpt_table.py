"""The benchmark of litgpt's table: its models, its layers, a few of its rows."""

import dataclasses
import importlib.util
import json
import sys
import types

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks import litgpt_hub, litgpt_model, litgpt_table
from benchmarks.litgpt_layers import FourBitLinear, LowRankQkv, RmsNorm, dequantized
from benchmarks.litgpt_model import Recipe, Sizes

ROWS = litgpt_table.read()
SMALL = Sizes(vocabulary=64, width=32, num_layers=3, num_heads=4, groups=4, inner=48, longest=300)
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs memlab[finetune]"
)


def of_row(**wanted):
    """Return the one row with these values."""
    names = {"size": "Size", "base": "Quantization", "trained": "Trainable parameters"}
    (row,) = (
        row
        for row in ROWS
        if row["Microbatch size"] == "1"
        and all(row[names[name]] == value for name, value in wanted.items())
    )
    return row


def test_the_rows_are_those_of_one_card():
    assert len(ROWS) == 35
    assert sum(row["Max GPU RAM"] == "OOM" for row in ROWS) == 6


@pytest.mark.parametrize("adapter", ["lora", "adapter", "adapter-v2"])
def test_each_row_trains_as_many_parameters_as_it_says(adapter):
    recipes = [(row, litgpt_table.recipe_of(row)) for row in ROWS]
    counts = {
        recipe.sizes: litgpt_table.num_trained(row)
        for row, recipe in recipes
        if recipe.adapter == adapter
    }
    assert counts
    for sizes, expected in counts.items():
        with torch.device("meta"):
            model = Recipe(sizes=sizes, adapter=adapter).build()
        trained = [p for p in model.parameters() if p.requires_grad]
        assert sum(p.numel() for p in trained) == expected
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("groups", [4, 2])
def test_lora_is_added_to_query_and_value_alone(groups):
    outputs = (32, 8 * groups)
    base = nn.Linear(32, 32 + 2 * outputs[1])
    layer = LowRankQkv(base, 32, outputs, rank=2).eval()
    nn.init.normal_(layer.low_rank_in)
    nn.init.normal_(layer.low_rank_out)
    x = torch.randn(3, 5, 32)
    query, value = (
        2 * x @ into.t() @ out.t()
        for into, out in zip(
            layer.low_rank_in.split(2), layer.low_rank_out.split(outputs), strict=True
        )
    )
    added = torch.cat((query, torch.zeros(3, 5, outputs[1]), value), dim=-1)
    torch.testing.assert_close(layer(x), base(x) + added)


@needs_bitsandbytes
def test_a_layer_in_four_bits_multiplies_with_its_dequantized_weight():
    layer = FourBitLinear(64, 128, bias=True, is_double=True)
    nn.init.normal_(layer.weight)
    layer = layer.to("cpu")
    assert layer.weight.dtype == torch.uint8
    x = torch.randn(3, 64, requires_grad=True)
    weight = dequantized(layer.weight, torch.float32)
    made = layer(x)
    torch.testing.assert_close(made, functional.linear(x, weight, layer.bias))
    made.sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, 64))


def test_a_norm_is_that_of_pytorch():
    x = torch.randn(3, 32)
    expected = functional.rms_norm(x, (32,), eps=1e-5)
    for in_fp32 in (True, False):
        torch.testing.assert_close(RmsNorm(32, in_fp32=in_fp32)(x), expected)


def test_a_later_token_changes_no_earlier_logits():
    model = Recipe(sizes=SMALL, adapter="lora").build().float().eval()
    tokens = torch.randint(64, (1, 300))
    other = tokens.clone()
    other[:, 200] = (other[:, 200] + 1) % 64
    before, after = (torch.cat(model(each), dim=1) for each in (tokens, other))
    torch.testing.assert_close(before[:, :200], after[:, :200])
    assert not torch.equal(before[:, 200:], after[:, 200:])


@pytest.mark.parametrize("is_llama", [True, False])
@pytest.mark.parametrize("groups", [4, 2])
def test_the_loss_in_chunks_is_the_mean_over_all_tokens(is_llama, groups):
    sizes = dataclasses.replace(SMALL, is_llama=is_llama, groups=groups)
    model = Recipe(sizes=sizes, adapter="adapter-v2").build().float()
    tokens = torch.randint(64, (2, 300))
    logits = model(tokens)
    assert [chunk.shape[1] for chunk in logits] == [128, 128, 44]
    whole = torch.cat(logits, dim=1)[:, :-1].flatten(0, 1)
    expected = functional.cross_entropy(whole, tokens[:, 1:].flatten())
    loss = litgpt_model.loss_of(model, tokens)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained - reached == {"blocks.2.attention.prompt"}  # kept from a validation


@pytest.mark.slow
def test_a_row_in_bf16_is_predicted():
    line = litgpt_table.line_of(of_row(size="1.3 B", base="None"))
    assert abs(line["error %"]) < 0.5
    assert line["fits"]


@pytest.mark.slow
@needs_bitsandbytes
@pytest.mark.parametrize(
    "wanted",
    [
        {"size": "1.3 B", "base": "bnb.nf4-dq"},
        {"base": "bnb.nf4", "trained": "2,125,248"},
    ],
)
def test_a_row_in_four_bits_is_predicted(wanted):
    line = litgpt_table.line_of(of_row(**wanted))
    assert abs(line["error %"]) < 0.5


def test_errors_and_rows_out_of_memory_are_summed_up_apart():
    def line(error, fits, other=None):
        return {"error %": error, "bf16 norms: error %": other, "fits": fits}

    found = litgpt_table.summary(
        [line(1.0, True), line(-2.0, True, -6.0), line(3.0, True), line(None, False)]
    )
    assert (found["rows"], found["median %"], found["max %"]) == (3, 2.0, 3.0)
    assert found["median % with bf16 norms"] == 3.0
    assert (found["out of memory"], found["foreseen"], found["fits, and did"]) == (1, 1, 3)


# recipes of litgpt, which itself need not be installed


HUB_ROWS = litgpt_hub.read()


def test_the_rows_are_pairs_of_recipes():
    assert len(HUB_ROWS) == 26
    assert sum(litgpt_hub.is_quantized(row) for row in HUB_ROWS) == 13
    assert [row["config"] for row in HUB_ROWS if row["peak_gb"] == "OOM"] == [
        "gemma-7b/lora.yaml", "gemma2-9b/lora.yaml",
    ]  # fmt: skip
    assert all("lora_r" in json.loads(row["lora"]) for row in HUB_ROWS)


@pytest.mark.skipif(importlib.util.find_spec("litgpt") is not None, reason="litgpt is installed")
def test_without_litgpt_the_rows_say_how_to_get_it():
    with pytest.raises(SystemExit, match="pip install --no-deps litgpt"):
        next(litgpt_hub.lines(quick=True))


@pytest.mark.parametrize("holds_last", [True, False])
def test_a_loss_holds_the_one_before_only_if_it_should(holds_last, monkeypatch):
    def chunked_cross_entropy(logits, wanted):
        return functional.cross_entropy(torch.cat(logits, 1).flatten(0, 1), wanted.flatten())

    utils = types.SimpleNamespace(chunked_cross_entropy=chunked_cross_entropy)
    monkeypatch.setitem(sys.modules, "litgpt", types.ModuleType("litgpt"))
    monkeypatch.setitem(sys.modules, "litgpt.utils", utils)
    table = torch.randn(16, 16, requires_grad=True)

    def model(tokens, lm_head_chunk_size):
        return list(table[tokens].split(lm_head_chunk_size, 1))

    loss = litgpt_hub.Loss(holds_last=holds_last)
    tokens = torch.randint(16, (2, 300))
    made = loss(model, tokens)
    expected = functional.cross_entropy(
        table[tokens][:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    )
    torch.testing.assert_close(made, expected)
    assert [chunk.shape[1] for chunk in made.held] == [128, 128, 43]
    assert (loss._last is made) is holds_last
