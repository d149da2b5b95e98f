"""The benchmark of litgpt's recipes: its rows and its loss; litgpt itself need not be installed."""

import importlib.util
import json
import sys
import types

import pytest
import torch
from torch.nn import functional

from benchmarks import litgpt_hub

ROWS = litgpt_hub.read()


def test_the_rows_are_pairs_of_recipes():
    assert len(ROWS) == 26
    assert sum(litgpt_hub.is_quantized(row) for row in ROWS) == 13
    assert [row["config"] for row in ROWS if row["peak_gb"] == "OOM"] == [
        "gemma-7b/lora.yaml", "gemma2-9b/lora.yaml",
    ]  # fmt: skip
    assert all("lora_r" in json.loads(row["lora"]) for row in ROWS)


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
