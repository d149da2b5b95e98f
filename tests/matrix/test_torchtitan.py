"""The benchmark of Llama 3.1 on real H100: its model, its arithmetic, what other rows need."""

import pytest
import torch

from benchmarks import titan_llama, torchtitan
from benchmarks.titan_llama import Sizes
from memlab import StepConfig
from memlab.prediction.predict import predict_in_process

SMALL = Sizes(width=64, num_layers=2, num_heads=4, num_key_heads=2, hidden=96, vocabulary=100,
              sequence=32)  # fmt: skip


def test_the_model_has_as_many_parameters_as_llama_3_1_8b() -> None:
    with torch.device("meta"):
        model = titan_llama.Llama(Sizes())
    assert sum(weight.numel() for weight in model.parameters()) == 8_030_261_248


def test_a_block_keeps_every_other_product() -> None:
    config = StepConfig(
        batch_size=16, sharding="zero3", world_size=8, precision="bf16-mixed", max_grad_norm=1.0
    )
    made = predict_in_process(
        titan_llama.workload(SMALL), config, torchtitan.target(8), seed=0, memory_limit=None,
        report=lambda _: None,
    )  # fmt: skip
    assert made.result.outcome == "ok", made.result.message
    assert made.size_model is not None
    names = [name for _, name in made.size_model.ran(config.micro_batch_sizes)]
    # seven products in the forward of a block, three of them again, and two gradients of each
    of_blocks, of_output = 2 * (7 + 3 + 2 * 7), 1 + 2
    assert names.count("aten::mm") == of_blocks + of_output
    assert names.count("aten::_scaled_dot_product_flash_attention") == 2  # kept


def test_two_rows_are_predicted_and_the_others_say_what_they_need() -> None:
    rows = torchtitan.read(torchtitan.ROWS)
    assert [torchtitan.num_cards(row) for row in rows if torchtitan.is_plain(row)] == [8, 128]
    others = torchtitan.others(rows)
    assert len(others) == 24
    assert all(line["needs"] for line in others)
    by_run = {line["run"]: line["needs"] for line in others}
    assert by_run["FSDP + torch.compile"] == "torch.compile"
    assert by_run["FSDP + torch.compile + Float8"] == "torch.compile, float8"
    assert by_run["2D + AsyncTP"] == "torch.compile, float8, tensor parallelism"
    assert by_run["FSDP 8, CP 1"].endswith("context parallelism, pipeline parallelism")
    assert by_run["None (bfloat16)"] == "torch.compile, tensor parallelism"


def test_errors_are_relative_to_what_was_measured() -> None:
    row = next(filter(torchtitan.is_plain, torchtitan.read(torchtitan.ROWS)))
    found = {"reserved GiB": 82.4 * 1.05, "tokens/s": 5762 * 1.3, "stated %": 30.0, "seconds": 1.0}
    line = torchtitan.table_row(row, found)
    assert (line["error %"], line["of speed %"]) == (pytest.approx(5), pytest.approx(30))
    assert (line["memory"], line["speed"]) == ("met", "MISSED")
