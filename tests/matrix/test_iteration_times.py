"""The benchmark of Megatron's GPT steps on real A100: its model, its rows, and what it records."""

import dataclasses

import pytest
import torch

from benchmarks import iteration_times, megatron_gpt
from benchmarks.iteration_times import PACES
from benchmarks.megatron_gpt import Case
from memlab.cost_model.overlap import HOST_SECONDS

SMALL = Case(hidden=256, heads=4, sequence=64, micro_batch=2, accumulation=2, tensor=1, data=2)


def test_the_model_has_the_parameters_of_megatron() -> None:
    with torch.device("meta"):
        model = megatron_gpt.Gpt(SMALL, num_layers=3)
    hidden, tokens = 256, 50_257
    of_layer = 12 * hidden**2 + 13 * hidden
    count = sum(weight.numel() for weight in model.parameters())
    assert count == (tokens + 64) * hidden + 3 * of_layer + 2 * hidden  # embedding and head tied


def test_dividing_attention_changes_no_number() -> None:
    plain = megatron_gpt.Attention(SMALL).eval()
    divided = megatron_gpt.Attention(dataclasses.replace(SMALL, tensor=2))
    weight, bias = (
        x.unflatten(0, (4, 3, -1)) for x in (plain.all_three.weight, plain.all_three.bias)
    )
    for number, name in enumerate(("query", "key", "value")):
        part = getattr(divided, name)
        part.weight.data = weight[:, number].flatten(0, 1)
        part.bias.data = bias[:, number].flatten()
    divided.project = plain.project
    x = torch.randn(8, 3, 256)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron_gpt, "DROPOUT", 0.0)
        torch.testing.assert_close(plain(x), divided(x))


def test_rows_without_stages_are_judged_and_the_others_counted() -> None:
    rows = iteration_times.read()
    judged = [row for row in rows if iteration_times.is_judged(row)]
    assert (len(rows), len(judged)) == (480, 232)
    assert [line["rows"] for line in iteration_times.not_judged(rows)] == [161, 87]
    for row in judged:
        case = iteration_times.case_of(row)
        assert case.tensor * case.data == int(row["# GPUs"])
        assert case.micro_batch * case.data * case.accumulation == int(row["global batch"])


@pytest.mark.parametrize(
    ("tensor", "data", "sharding"), [(1, 2, "ddp"), (2, 1, "tensor"), (2, 2, "zero2")]
)
def test_ranks_share_the_work_as_the_row_says(tensor, data, sharding) -> None:
    case = dataclasses.replace(SMALL, tensor=tensor, data=data)
    config = iteration_times.config_of(case)
    assert (config.sharding, config.world_size) == (sharding, tensor * data)
    assert config.batch_size == SMALL.micro_batch * data * SMALL.accumulation


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "data"), [(1, 2), (2, 1)])
def test_a_whole_recording_takes_what_a_few_layers_and_micro_batches_say(tensor, data) -> None:
    case = dataclasses.replace(SMALL, tensor=tensor, data=data, accumulation=8)
    whole = iteration_times.recorded(case, 12)
    # where kernels and the host take about as long, a step is not quite linear in its layers
    for pace, within in ((PACES[0], 0.03), (HOST_SECONDS, 0.005), (PACES[-1], 0.005)):
        seconds, half_width = iteration_times.predicted(case, 12, pace)
        # DDP's buckets do not end with layers
        assert seconds == pytest.approx(whole.step_seconds(8, pace), rel=within)
        assert half_width > 0.2


@pytest.mark.slow
def test_a_step_of_small_kernels_takes_as_long_as_the_host() -> None:
    found = iteration_times.recorded(SMALL, 2)
    seconds = {pace: found.step_seconds(2, pace) for pace in PACES}
    # the host is what takes the time: three times as slow, three times as long
    assert seconds[60e-6] / seconds[20e-6] == pytest.approx(3, rel=0.15)
    assert all(width < 0.5 for width in found.half_widths.values())


def test_a_shape_is_predicted_at_the_pace_of_the_others() -> None:
    def lines(pace: float, *errors: float) -> list[dict[str, float]]:
        sizes = (1024, 1024, 2048, 2048)
        return [
            {"hidden": size, "layers": 4, "host us": 1e6 * pace, "error %": error}
            for size, error in zip(sizes, errors, strict=True)
        ]

    by_pace = {1e-6: lines(1e-6, 1, 2, -30, 40), 2e-6: lines(2e-6, 50, 60, 3, -4)}
    found = iteration_times.of_left_out_shapes(by_pace)
    # rows of 2048 choose 2 us, with which those of 1024 are wrong, and the other way round
    assert [line["error %"] for line in found] == [50, 60, -30, 40]


def test_errors_are_relative_to_what_was_measured() -> None:
    line = {"tensor": 1, "micro-batch": 2, "layers": 5, "accumulation": 4, "measured ms": 200.0,
            "stated %": 30.0}  # fmt: skip
    lines = [line | {"predicted ms": p, "error %": p / 2 - 100} for p in (160.0, 190.0, 100.0)]
    (found,) = iteration_times.summary(lines, "tensor")
    assert (found["rows"], found["median %"], found["bias %"]) == (3, 20, -20)
    assert found["within stated %"] == pytest.approx(100 * 2 / 3)
    (both,) = iteration_times.by_both(lines)
    assert (both["measured ms a layer"], both["predicted ms a layer"]) == (10, 8)
