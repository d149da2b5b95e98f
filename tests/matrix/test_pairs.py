"""The largest batch and many batches, by real predictions and by those that are made up."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import memlab
from memlab import MemlabError, Outcome, StepConfig
from memlab._util.units import MIB
from memlab.result import Source, StepResult
from memlab.search import largest_batch
from tests.models import blocks, linear, made_of

WIDE = {"depth": 6, "width": 64}


BUDGETS = {"plain": 1.0, "recomputed": 0.0}


@pytest.fixture(scope="module")
def largest():
    """Return the largest batch of each budget within 4 MiB."""
    found = {}
    for name, budget in BUDGETS.items():
        config = StepConfig(optimizer="sgd-momentum", memory_budget=budget)
        found[name] = memlab.largest_batch(blocks(**WIDE), config, "cpu", memory_limit="4MiB")
    return found


@pytest.mark.parametrize("name", BUDGETS)
def test_the_largest_batch_is_confirmed_and_a_sample_more_is_not_sure_to_fit(largest, name):
    told = largest[name].result
    measured = memlab.measure(blocks(**WIDE), told.config, "cpu", memory_limit="4MiB")
    assert measured.fits, measured.message
    assert measured.peak_allocated_bytes <= 4 * MIB
    assert measured.peak_allocated_bytes == pytest.approx(told.peak_allocated_bytes, rel=0.02)
    config = dataclasses.replace(told.config, batch_size=largest[name] + 1)
    more = memlab.predict(blocks(**WIDE), config, "cpu", memory_limit="4MiB")
    assert more.peak_allocated_bytes * 1.02 > 4 * MIB


def test_recompute_fits_more(largest):
    assert largest["recomputed"] / largest["plain"] > 1.5


def test_a_model_with_nothing_to_recompute_is_refused():
    flat = made_of(lambda: torch.nn.Linear(4, 4), (4,))
    config = StepConfig(memory_budget=0.0)
    with pytest.raises(MemlabError, match="accumulation_steps"):
        memlab.largest_batch(flat, config, "cpu", memory_limit="1MiB", batch_limit=4)


def test_batch_sizes_are_predicted_by_one_recording_where_that_tells_them(monkeypatch):
    asked = []

    def predicted(workload, config, *arguments, **options):
        asked.append(config.batch_size)
        return predict(workload, config, *arguments, **options)

    predict = largest_batch.predict_with_size_model
    monkeypatch.setattr(largest_batch, "predict_with_size_model", predicted)
    workload, config = blocks(**WIDE), StepConfig(batch_size=8, optimizer="sgd")
    found = memlab.predict_batches(workload, config, [1, 8, 32], "t4", memory_limit="18MiB")
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


def search(monkeypatch, peak_of, limit, batch_limit=4096, **facts):
    """Return the largest batch by predictions that are made up, and the batches that were tried."""
    tried = []

    def predicted(workload, config, device, **options):
        tried.append(config.batch_size)
        found = result_of(config.batch_size, peak_of(config.batch_size), **facts)
        return SimpleNamespace(result=found.against_limit(options["memory_limit"]), size_model=None)

    monkeypatch.setattr(largest_batch, "predict_with_size_model", predicted)
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


def test_a_forecast_needs_few_predictions(monkeypatch):
    asked = []
    predict = largest_batch.predict_with_size_model
    monkeypatch.setattr(
        largest_batch,
        "predict_with_size_model",
        lambda *args, **kw: asked.append(args) or predict(*args, **kw),
    )
    search = largest_batch.LargestSearch(blocks(**WIDE), 64 * MIB, "t4", 4096)
    search.largest(StepConfig(batch_size=1), 2)
    assert len(asked) <= 5
