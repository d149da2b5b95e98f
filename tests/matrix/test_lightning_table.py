"""The benchmark of the table in Lightning's guide to FSDP: its model, and its rows."""

import torch

from benchmarks import lightning_table
from benchmarks.lightning_table import INNER, LAYERS, NUM_CARDS, TABLE, WIDTH, WORDS, Translator


def test_the_model_has_as_many_parameters_as_that_of_the_guide():
    attention = 4 * WIDTH**2 + 4 * WIDTH
    inner = 2 * WIDTH * INNER + INNER + WIDTH
    norm = 2 * WIDTH
    encoder = attention + inner + 2 * norm
    decoder = 2 * attention + inner + 3 * norm
    ends = 2 * norm + WORDS * WIDTH + (WORDS + 1) * WIDTH + (WORDS - WIDTH)
    with torch.device("meta"):
        model = Translator(LAYERS)
    found = sum(weight.numel() for weight in model.parameters())
    assert found == LAYERS * (encoder + decoder) + ends
    assert 1.0e9 < found < 1.1e9


def test_a_row_has_a_prediction_or_none():
    row = lightning_table.compared("DDP", 1)
    # weights and their gradients, two numbers of Adam, and the buckets of the gradients
    weights = sum(p.nbytes for p in Translator(1).parameters()) / 2**20
    assert 5 * weights < row["predicted MiB"] < 7 * weights
    assert row["predicted"] > 0
    assert NUM_CARDS == 2
    left = [name for name in TABLE if TABLE[name][0] is None]
    assert [lightning_table.compared(name, 1)["predicted MiB"] for name in left] == [None, None]
