"""Pairs on a small model with real numbers, and on predictions that are made up."""

import dataclasses
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import memlab
from memlab import MemlabError, Outcome, StepConfig, Workload, workloads
from memlab._util.units import MIB
from memlab.result import Source, StepResult
from memlab.search import compare_batches, largest_batch
from tests.models import blocks, linear

WIDE = {"depth": 6, "width": 64}


@pytest.fixture(scope="module")
def pair():
    return compare_batches.compare_recompute(blocks(**WIDE), "4MiB", "cpu")


def test_both_batches_are_confirmed_and_recompute_fits_more(pair):
    for fit in (pair.baseline, pair.optimized):
        assert fit.is_confirmed, fit.measured.message
        assert fit.measured.peak_allocated_bytes <= 4 * MIB
        assert fit.measured.peak_allocated_bytes == pytest.approx(
            fit.predicted.peak_allocated_bytes, rel=0.02
        )
    assert pair.ratio > 1.5
    assert pair.baseline.predicted.config == StepConfig(
        batch_size=pair.baseline.batch_size, optimizer="sgd-momentum"
    )


def test_a_sample_more_is_not_sure_to_fit(pair):
    for fit in (pair.baseline, pair.optimized):
        config = dataclasses.replace(fit.predicted.config, batch_size=fit.batch_size + 1)
        more = memlab.predict(blocks(**WIDE), config, "cpu", memory_limit="4MiB")
        assert more.peak_allocated_bytes * 1.02 > 4 * MIB


def test_the_table_says_what_each_number_is(pair):
    said = str(pair)
    for text in ("on cpu, 4.00 MiB allocated", "peak predicted", "peak measured", "a sample",
                 f"{pair.ratio:.1f}x", "the repository states none"):  # fmt: skip
        assert text in said
    lines = said.splitlines()
    assert len({len(line) for line in lines[1:4]}) == 1, "columns are aligned"


def test_batch_sizes_are_predicted_by_one_recording_where_that_tells_them(monkeypatch):
    asked = []

    def predicted(workload, config, *arguments, **options):
        asked.append(config.batch_size)
        return predict(workload, config, *arguments, **options)

    predict = compare_batches.predict_with_forecast
    monkeypatch.setattr(compare_batches, "predict_with_forecast", predicted)
    workload, config = blocks(**WIDE), StepConfig(batch_size=8, optimizer="sgd")
    found = compare_batches.predict_batches(
        workload, config, [1, 8, 32], "t4", memory_limit="18MiB"
    )
    assert asked == [8, 1], "a single sample runs other operators than many"
    exact = [memlab.predict(workload, r.config, "t4", memory_limit="18MiB") for r in found]
    assert [r.config.batch_size for r in found] == [1, 8, 32]
    for one, other in zip(found, exact, strict=True):
        assert one.peak_reserved_bytes == other.peak_reserved_bytes
        assert one.fits == other.fits
    assert [("interpolated" in r.message) for r in found] == [False, False, True]


def result_of(batch_size, peak_bytes, *, uncertainty=0.0, **fields):
    return StepResult(
        outcome=Outcome.OK, message="", source=Source.PREDICTED, device="cpu",
        config=StepConfig(batch_size=batch_size), workload_name="vnet-digits",
        peak_allocated_bytes=peak_bytes, step_seconds=1.0,
        uncertainty={"peak_allocated_bytes": uncertainty}, **fields,
    )  # fmt: skip


def search(monkeypatch, peak_of, limit, batch_limit=compare_batches.DEFAULT_BATCH_LIMIT, **facts):
    """Return the largest batch by predictions that are made up, and the batches that were tried."""
    tried = []

    def predicted(workload, config, device, **options):
        tried.append(config.batch_size)
        found = result_of(config.batch_size, peak_of(config.batch_size), **facts)
        return SimpleNamespace(result=found.against_limit(options["memory_limit"]), forecast=None)

    monkeypatch.setattr(largest_batch, "predict_with_forecast", predicted)
    found = largest_batch.LargestSearch(linear(), limit, "cpu", batch_limit).largest(
        StepConfig(batch_size=1), 2
    )
    return found.config.batch_size, tried


@pytest.mark.parametrize("wanted", [1, 2, 3, 7, 100, 4095, 4096])
def test_the_search_finds_the_edge(monkeypatch, wanted):
    found, tried = search(monkeypatch, lambda n: 10 + 3 * n, 10 + 3 * wanted + 2)
    assert found == wanted
    assert len(tried) == len(set(tried)) <= 16


def test_no_batch_above_the_batch_limit_is_tried(monkeypatch):
    found, tried = search(monkeypatch, lambda n: n, 10**9, batch_limit=20)
    assert (found, max(tried)) == (20, 20)


def test_what_fits_by_luck_alone_is_not_taken(monkeypatch):
    assert search(monkeypatch, lambda n: n, 100, uncertainty=0.1)[0] == 90


def test_a_limit_below_one_sample_says_so(monkeypatch):
    with pytest.raises(MemlabError, match="not enough for one sample of"):
        search(monkeypatch, lambda n: 1000 + n, 1000)


def test_a_forecast_needs_few_predictions(monkeypatch):
    asked = []
    predict = largest_batch.predict_with_forecast
    monkeypatch.setattr(
        largest_batch,
        "predict_with_forecast",
        lambda *args, **kw: asked.append(args) or predict(*args, **kw),
    )
    search = largest_batch.LargestSearch(blocks(**WIDE), 64 * MIB, "t4", 4096)
    search.largest(StepConfig(batch_size=1), 2)
    assert len(asked) <= 5


def test_a_card_that_is_not_here_is_predicted_alone():
    found = compare_batches.compare_recompute(blocks(**WIDE), "64MiB", "t4", batch_limit=64)
    assert found.baseline.measured is None
    assert found.baseline.is_confirmed is None
    assert found.baseline.predicted.peak_reserved_bytes <= 64 * MIB
    assert found.optimized.is_capped
    assert "64.0 MiB reserved" in str(found)
    assert "not here" in str(found)


def test_ratios_are_beside_those_of_the_repository():
    fit = compare_batches.Fit(predicted=result_of(5, MIB), measured=None, is_capped=False)
    other = compare_batches.Fit(predicted=result_of(10, MIB), measured=None, is_capped=True)
    pair = compare_batches.Pair(limit_bytes=2 * MIB, baseline=fit, optimized=other)
    assert "ratio of the batches: 2.0x or more; the repository's is 1.8x" in str(pair)


def test_a_model_with_nothing_to_recompute_is_refused():
    flat = Workload(
        name="flat",
        build_model=lambda: torch.nn.Linear(4, 4),
        make_batch=lambda n: torch.randn(n, 4),
        compute_loss=lambda model, x: model(x).square().mean(),
    )
    with pytest.raises(MemlabError, match="accumulation_steps"):
        compare_batches.compare_recompute(flat, "1MiB", "cpu", batch_limit=4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["vnett"], "did you mean 'vnet'"),
        (["vnet", "--limit", "2G"], "memory_limit='2G'"),
        (["vnet", "--device", "nowhere"], "nowhere"),
        (["vnet", "--batch-limit", "0"], "batch_limit=0"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_exit_code_2(arguments, said, capsys):
    assert compare_batches.main(arguments) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.out == ""


def test_the_command_line_prints_the_table(monkeypatch, capsys, pair):
    asked = []
    monkeypatch.setattr(
        compare_batches, "compare_recompute", lambda *args, **kw: asked.append((args, kw)) or pair
    )
    assert compare_batches.main(["gpt-small", "--limit", "1GiB", "--batch-limit", "9"]) == 0
    (workload, *rest), options = asked[0]
    assert (workload.name, rest, options) == ("gpt-small", ["1GiB", None], {"batch_limit": 9})
    assert capsys.readouterr().out == f"{pair}\n"


def test_it_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "memlab.search.compare_batches", "--help"],
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "--batch-limit" in done.stdout


@pytest.mark.parametrize("family", compare_batches.REPOSITORY_RATIOS)
def test_a_family_of_the_repository_is_in_the_zoo(family):
    assert any(name.startswith(f"{family}-") or name == family for name in workloads.names())
