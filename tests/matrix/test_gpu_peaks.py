"""The benchmark of public peaks: its arithmetic, and one of its rows."""

from benchmarks import gpu_peaks
from benchmarks.public_runs import LANGUAGE_MODELS

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
