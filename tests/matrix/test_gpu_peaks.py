"""The benchmark of public peaks: its arithmetic, and one of its rows."""

from dataclasses import replace

import pytest
import torch

from benchmarks import gpu_peaks, kernel_peaks, titan_llama, torchtitan
from benchmarks.calibrate_memory import (
    Run,
    coverage,
    errors_left_out,
    table_of,
    weights_of,
)
from benchmarks.public_runs import LANGUAGE_MODELS
from benchmarks.titan_llama import Sizes
from memlab import StepConfig
from memlab.cost_model.cuda_kernels import Workspaces
from memlab.prediction.error_bounds import weights, width_of_needed
from memlab.prediction.evidence import PublicRun, width_of
from memlab.prediction.predict import predict_in_process

GIB_TEXT = {"trained": str(4 * 2**30), "oom": str(2 * 2**30)}


def row(trained: str = "", oom: str = "") -> dict[str, str]:
    return {
        "model": "m", "optimizer": "SGD", "batch_size": "2", "family": "cnn",
        "gpu": "NVIDIA GeForce RTX 3060", "total_gpu_memory": str(12 * 2**30),
        "ground_bytes": str(4 * 2**30), "min_cap_trained": trained, "max_cap_oom": oom,
        "xmem_bytes": str(5 * 2**30), "dnnmem_bytes": str(1 * 2**30),
        "schedtune_bytes": "", "llmem_bytes": "",
    }  # fmt: skip


def test_the_data_has_59_rows_of_known_language_models() -> None:
    rows = gpu_peaks.read(gpu_peaks.PEAKS, quick=False)
    language = [r for r in rows if r["family"] != "cnn"]
    assert len(language) == 59
    assert {r["model"] for r in language} == set(LANGUAGE_MODELS)


def test_a_prediction_fails_below_what_was_too_little_and_where_it_trained() -> None:
    given = row(GIB_TEXT["trained"], GIB_TEXT["oom"])
    caps: list[int] = []
    assert not gpu_peaks.fails(given, 3 * 2**30, lambda cap: caps.append(cap) is None)
    assert caps == [4 * 2**30]
    assert gpu_peaks.fails(given, 2**30, lambda _: True)
    assert gpu_peaks.fails(given, 3 * 2**30, lambda _: False)
    both = row(GIB_TEXT["oom"], GIB_TEXT["oom"])
    assert not gpu_peaks.fails(both, 2**30, lambda _: False)


def test_errors_and_their_summary() -> None:
    found = {"bytes": 4 * 2**30, "reserved_bytes": 5 * 2**30, "unseen_bytes": 2**30, "peaks": {},
             "needed_bytes": 3 * 2**30, "bare_bytes": 3 * 2**30, "fails": False, "seconds": 1.0,
             "assumed": []}  # fmt: skip
    line = gpu_peaks.table_row(row(oom=GIB_TEXT["oom"]), found)
    assert (line["error %"], line["bare %"], line["xMem %"], line["LLMem %"]) == (0, -25, 25, None)
    assert (line["reserved MiB"], line["not seen MiB"]) == (5 * 1024, 1024)
    by_tool = {r["tool"]: r for r in gpu_peaks.summary([line])}
    assert by_tool["memlab"]["goal"] == "met"
    assert by_tool["bare replay"]["p90 %"] == 25
    assert by_tool["DNNMem"]["fails %"] == 100  # 1 GiB, and 2 GiB were too little
    assert by_tool["xMem"]["fails %"] == 0
    assert "LLMem" not in by_tool


def test_a_language_model_is_predicted_within_two_per_cent() -> None:
    rows = gpu_peaks.read(gpu_peaks.PEAKS, quick=False)
    [small] = [r for r in rows if r["model"] == "distilbert/distilgpt2" and r["batch_size"] == "22"]
    found = gpu_peaks.predicted(small)
    measured = int(small["ground_bytes"])
    assert abs(found["bytes"] / measured - 1) < 0.02  # newer transformers hold a little else
    assert not found["fails"]


# single kernels


SWEEPS = kernel_peaks.read(kernel_peaks.PEAKS, quick=True)


def name(sweep: list[kernel_peaks.Row]) -> str:
    return " ".join(kernel_peaks.sweep_of(sweep[0])[:3])


def test_the_data_has_59_rows_in_sweeps_by_size() -> None:
    sweeps = kernel_peaks.read(kernel_peaks.PEAKS, quick=False)
    assert sum(map(len, sweeps)) == 59
    for sweep in sweeps:
        sizes = [int(row["x_value"]) for row in sweep]
        assert sizes == sorted(set(sizes))
        assert len(sizes) > 3 or sweep[0]["kernel"] == "rope"


def test_errors_of_peaks_and_of_differences() -> None:
    row = {**SWEEPS[0][0], "peak_allocated_mib": "10"}
    sweep = [row, {**row, "peak_allocated_mib": "30"}]
    found = [{"bytes": mib * 2**20, "operators": [], "seconds": 0.0} for mib in (12, 30)]
    first, second = kernel_peaks.table_of(sweep, found)
    assert (first["error %"], first["of difference %"]) == (pytest.approx(20), None)
    assert (second["off by MiB"], second["of difference %"]) == (0, pytest.approx(-10))
    [line] = kernel_peaks.summary([first, second])
    assert (line["rows"], line["off by MiB"], line["goal"]) == (2, 2, "MISSED")


@pytest.mark.parametrize("sweep", SWEEPS, ids=name)
def test_the_difference_of_two_sizes_is_exact(sweep: list[kernel_peaks.Row]) -> None:
    lines = kernel_peaks.table_of(sweep, [kernel_peaks.predicted(row) for row in sweep])
    assert abs(lines[1]["of difference %"]) <= 100 * kernel_peaks.GOAL


# Llama 3.1 on real H100


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


# the calibration of predicted memory


NUMBERS = ("peak_allocated_bytes", "peak_reserved_bytes")


def run(model: str, none: int, copies: int, measured: int = 100, **caps: int) -> Run:
    """Return a run of which two hypotheses say this, and all others what `NONE` says."""
    peaks = {**dict.fromkeys(Workspaces, none), Workspaces.COPIES: copies}
    given = {"needed": 90, "trained": 0, "failed": 0, **caps}
    return Run(model=model, measured=measured, peaks=peaks, **given)


def test_a_hypothesis_counts_by_its_error_and_a_model_not_by_its_runs() -> None:
    runs = [run("a", 110, 101), run("a", 110, 101), run("b", 110, 101)]
    found = weights_of(runs)
    assert found[Workspaces.COPIES] / found[Workspaces.NONE] == pytest.approx(100)
    assert sum(found.values()) == pytest.approx(1)
    mixed = [run("a", 110, 101)] * 9 + [run("b", 101, 110)]
    assert weights_of(mixed)[Workspaces.COPIES] == pytest.approx(1 / len(Workspaces))


def test_a_model_is_predicted_with_the_weights_of_the_others() -> None:
    # of each model alone, copies are right for a and wrong for b
    runs = [run("a", 150, 101), run("b", 101, 150)]
    assert errors_left_out(runs) == pytest.approx([0.5, 0.5])
    assert [each.error(weights_of(runs)) for each in runs] == pytest.approx([0.5, 0.01])


def test_what_is_left_out_is_held_against_the_width_of_the_others() -> None:
    def of(model: str, error: float) -> PublicRun:
        return PublicRun(
            number="peak_reserved_bytes", device="t4", model=model, kernels=(), precision="fp32",
            setting="", measured=1 + error, predicted=1, left_open="", source="",
        )  # fmt: skip

    said = coverage([of("a", 0.01), of("b", 0.2)], lambda each: each.model)
    assert said == pytest.approx({"covered %": 50, "width %": 10.5})
    said = coverage([of("a", 0.01), of("b", 0.2)], lambda each: each.device)
    assert said == {"covered %": None, "width %": None}, "nothing is left to state a width"


def test_only_known_runs_choose_the_weights_and_all_are_held_against_them() -> None:
    runs = [
        run("a", 150, 101),
        run("b", 101, 150),
        replace(run("b", 150, 101), left_open="its length"),
    ]
    assert errors_left_out(runs) == pytest.approx([0.5, 0.5, 0.01])


def test_what_a_bracket_excludes_is_an_error() -> None:
    assert run("a", 1, 1, needed=90, trained=100, failed=80).needed_error == 0
    assert run("a", 1, 1, needed=110, trained=100, failed=80).needed_error == pytest.approx(0.1)
    assert run("a", 1, 1, needed=80, trained=100, failed=88).needed_error == pytest.approx(0.1)
    assert run("a", 1, 1, needed=80, trained=100, failed=100).needed_error == 0


def test_the_table_has_what_predictions_read() -> None:
    with_convolutions = [run("a", 105, 105), run("b", 103, 103)]
    alone = [Run(model=m, measured=100, peaks={Workspaces.NONE: 101}, needed=90, trained=0,
                 failed=0) for m in "cd"]  # fmt: skip
    table = table_of({"convolutions": with_convolutions, "others": alone})
    assert {Workspaces(name) for name in table["weights"]} == set(Workspaces) == set(weights())
    assert table["needed"] == {"half_width": 0, "runs": 4, "models": 4}


@pytest.mark.parametrize("number", NUMBERS)
def test_the_shipped_table_says_how_sure_each_number_is(number: str) -> None:
    plain, convolutional = (width_of(number, kinds) for kinds in ((), ("convolutions",)))
    assert 0 < plain.half_width < convolutional.half_width < 0.1
    assert 0 < width_of_needed() < 0.1
    assert min(plain.runs, convolutional.runs) > 30
