"""The benchmark of peft's table: its rows, its batches, the model and the prediction of one row."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from benchmarks import peft_table

ROWS = {row["experiment"]: row for row in peft_table.read()}
needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="needs memlab[finetune]"
)


def test_the_rows_are_different_runs_of_one_recipe():
    assert len(ROWS) == 55
    assert len({row["peft_config"] for row in ROWS.values()}) == 55
    assert {row["optimizer"] for row in ROWS.values()} == {"AdamW"}
    assert peft_table.LENGTHS_BY in ROWS
    assert all(row["source"].startswith("github:huggingface/peft@") for row in ROWS.values())


def test_a_batch_is_padded_to_its_first_sample():
    batch = peft_table.make_batch(40, 3)
    assert batch["attention_mask"].sum(1).tolist() == [40, 32, 24]
    assert (batch["labels"] == peft_table.IGNORED).sum(1).tolist() == [0, 8, 16]
    assert torch.equal(batch["labels"][0], batch["input_ids"][0])


@needs_peft
def test_a_row_of_another_peft_is_told_from_one_of_this():
    row = ROWS[peft_table.LENGTHS_BY]
    with torch.device("meta"):
        model = peft_table.build(row)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert trained == int(row["trained_parameters"]) == 28 * 32 * (3 * 3072 + 1024)
        with pytest.raises(ValueError, match="trains 9,175,040 parameters"):
            peft_table.build({**row, "trained_parameters": "9175041"})


def test_the_row_that_gives_the_lengths_is_left_out_of_the_summary():
    def line(name, error):
        return {"experiment": name, "max: error %": error, "99th: error %": -error}

    lines = [line(peft_table.LENGTHS_BY, 0.0), line("a", 1.0), line("b", -3.0)]
    found = peft_table.summary([*lines, {"experiment": "c", "why": "it fails"}])
    assert (found["rows"], found["without an answer"]) == (2, 1)
    assert (found["max: median %"], found["99th: most %"]) == (2.0, 3.0)


@pytest.mark.long
@needs_peft
def test_a_row_is_predicted():
    line = peft_table.line_of(ROWS["ln_tuning/llama-3.2-3B-default"])
    assert abs(line["max: error %"]) < 1
    assert abs(line["99th: error %"]) < 2


def test_the_length_is_that_of_the_nearest_prediction(monkeypatch):
    measured = int(ROWS[peft_table.LENGTHS_BY]["reserved_max_bytes"])

    def predicted(row, num_tokens):
        assert row["experiment"] == peft_table.LENGTHS_BY
        return SimpleNamespace(peak_reserved_bytes=measured + (num_tokens - 700) * 1000 + 400)

    monkeypatch.setattr(peft_table, "predicted", predicted)
    peft_table.length_of.cache_clear()
    assert peft_table.length_of("reserved_max_bytes") == 700
    peft_table.length_of.cache_clear()
