"""`recommend` and `largest_batch` against predictions of every setting, one by one."""

import dataclasses
import importlib
import itertools
import random
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import memlab
from memlab import MemlabError, StepConfig, Workload, WorkloadChoices, largest_batch
from memlab._util.units import MIB
from memlab.api import predict_with_size_model
from memlab.errors import WorkloadError
from memlab.result import Outcome, Source, StepResult
from memlab.runtime import isolation
from memlab.search import largest_batch as largest
from memlab.search import recommend as confirming
from memlab.search import search
from memlab.search.alternatives import BUDGETS, alternatives_of, space_of
from memlab.search.search import SAME_TIME
from memlab.techniques.registry import EVERY
from memlab.techniques.technique import Equivalence
from tests.models import IN, blocks, linear
from tests.verify_parts import alike

recommend = partial(memlab.recommend, patience=3600)  # on a busy machine too

CARD = "t4"
BATCH = 4096  # 4 MiB for each activation of `wide`, whose weights take 2 MiB


def wide():
    return blocks(width=256)


def fits(workload, config, limit):
    result = memlab.predict(workload, config, CARD, memory_limit=limit)
    return result.fit == "fits"


@pytest.fixture(scope="module")
def plain():
    return memlab.predict(wide(), StepConfig(batch_size=BATCH), CARD)


@pytest.mark.slow
def test_what_is_recommended_fits_and_nothing_simpler_is_faster(plain):
    limit = int(plain.peak_reserved_bytes * 0.8)
    ranked = recommend(wide(), limit, BATCH, CARD, allow=["accumulation_steps", "memory_budget"])
    best = ranked[0]
    assert best.result.fit == "fits"
    assert best.config.batch_size == BATCH
    for steps in (1, 2, 4, 8):
        config = StepConfig(batch_size=BATCH, accumulation_steps=steps)
        other = memlab.predict(wide(), config, CARD, memory_limit=limit)
        if other.fit == "fits":
            assert best.result.step_seconds <= other.step_seconds * 1.001


@pytest.mark.slow
def test_with_room_enough_nothing_has_to_be_changed():
    ranked = recommend(linear(), "1GiB", 8, CARD, allow=["accumulation_steps", "memory_budget"])
    assert ranked[0].config == StepConfig(batch_size=8)
    assert ranked[0].reasons[0] == "nothing has to be changed"


def test_what_does_not_fit_is_said_with_what_it_takes_at_least():
    ranked = recommend(linear(), "64KiB", 8, CARD, allow=["accumulation_steps"])
    assert len(ranked) == 0
    assert "nothing that was tried fits 64.0 KiB" in ranked.message
    assert "takes at least" in ranked.message
    assert str(ranked).startswith(ranked.message)


def test_too_close_to_say_is_never_first(plain):
    limit = int(plain.needed_bytes * 1.001)
    ranked = recommend(wide(), limit, BATCH, CARD, allow=["accumulation_steps"])
    assert plain.against_limit(limit).fit == "too close"
    assert all(one.result.fit == "fits" for one in ranked)
    assert StepConfig(batch_size=BATCH) in [one.config for one in ranked.too_close]


@pytest.mark.slow
def test_headroom_stays_free(plain):
    limit = int(plain.peak_reserved_bytes * 1.5)
    ranked = recommend(wide(), limit, BATCH, CARD, allow=["accumulation_steps"], headroom=0.5)
    peak = ranked[0].result.counted_peak
    assert peak.upper_bytes <= limit // 2 or ranked[0].result.needed_bytes <= limit // 2
    assert "50 % were to stay free" in ranked[0].reasons[-1]


def test_progress_says_which_step_of_the_search_it_is():
    told = []
    recommend(linear(), "1GiB", 8, CARD, allow=["precision"], on_progress=told.append)
    texts = [progress.text for progress in told]
    assert any("step 1 of at most 40: " in text for text in texts)
    assert any("with precision=" in text for text in texts)
    assert all("; best so far: " in text for text in texts if ", step 2 " in text)
    fractions = [progress.fraction for progress in told if ", step " in progress.text]
    assert 0 <= min(fractions) <= max(fractions) < 1


@pytest.mark.slow
def test_each_best_so_far_is_told_before_the_answer_and_is_what_predict_says(plain):
    told, limit = [], int(plain.peak_reserved_bytes * 0.6)
    steps = ["accumulation_steps", "memory_budget", "precision"]
    ranked = recommend(wide(), limit, BATCH, CARD, allow=steps, on_progress=told.append)
    found = [progress for progress in told if isinstance(progress, search.BestSoFar)]
    assert len(found) > 1, "the first is not the best"
    assert told.index(found[0]) < len(told) / 2, "it comes early"
    times = [one.result.step_seconds for one in found]
    assert times == sorted(times, reverse=True)
    assert found[-1].result.config == ranked[0].config
    for one in found:
        asked = memlab.predict(wide(), one.result.config, CARD, memory_limit=limit)
        assert asked.fit == one.result.fit == "fits"
        for field in ("peak_reserved_bytes", "peak_allocated_bytes", "step_seconds"):
            assert getattr(one.result, field) == getattr(asked, field)
        assert one.prediction.size_model.covers(one.result.config.micro_batch_sizes)


@pytest.mark.slow
def test_a_search_that_takes_too_long_gives_what_it_has_found(plain):
    limit = int(plain.peak_reserved_bytes * 0.4)
    steps = dict.fromkeys(["accumulation_steps", "memory_budget", "checkpointing"])
    with_policies = [*steps, "checkpoint_policy"]
    ranked = recommend(wide(), limit, BATCH, CARD, allow=with_policies, patience=1e-6)
    assert ranked.tried[0].config == StepConfig(batch_size=BATCH)  # always predicted
    assert len(ranked.tried) == 1
    assert any("ended by time, with patience=1e-06 seconds. Not tried: " in n for n in ranked.notes)
    whole = recommend(wide(), limit, BATCH, CARD, allow=with_policies)
    assert not any("ended by time" in note for note in whole.notes)


@pytest.mark.parametrize("field", ["accumulation_steps", "memory_budget"])
def test_an_end_by_time_is_no_reason_for_a_larger_card(plain, field):
    limit = plain.peak_reserved_bytes // 2
    ranked = recommend(wide(), limit, BATCH, CARD, allow=[field], patience=1e-6)
    assert "nothing that was tried before the time ended fits" in ranked.message
    assert "search longer" in ranked.message
    assert "other micro-batches and budgets of the step as it is" in str(ranked)


@pytest.mark.slow
def test_something_that_fits_is_found_before_all_else_is_tried(plain, monkeypatch):
    """The third step that is recorded fits; what may be faster is looked at later."""
    recorded = []

    def predicted(workload, config, *args, **options):
        found = predict_with_size_model(workload, config, *args, **options)
        recorded.append(found.result)
        return found

    monkeypatch.setattr(search, "predict_with_size_model", predicted)
    limit = int(plain.peak_reserved_bytes * 0.4)
    monkeypatch.setattr(search, "_known", search.OrderedDict())
    ranked = recommend(wide(), limit, BATCH, CARD)
    fitting = [result.against_limit(limit).fit == "fits" for result in recorded]
    assert any(fitting[:3])
    assert ranked[0].result.step_seconds <= recorded[fitting.index(True)].step_seconds


def test_the_plans_of_a_fine_tuned_model_are_made_once():
    """A workload with choices has a hash, so that what was planned for it is found again."""
    workload = memlab.workloads.get("gpt-small", num_layers=1)
    chosen = dataclasses.replace(
        workload,
        choices=memlab.WorkloadChoices(
            values={"width": 1}, offered={"width": (1,)}, make_workload=lambda width: workload
        ),
    )
    assert hash(chosen) == hash(workload)
    assert chosen != workload


@pytest.mark.slow
def test_a_setting_that_changes_nothing_is_not_recommended(plain):
    """One block fills a segment: expandable segments reserve what others do, within 0.5 %."""
    limit = int(plain.peak_reserved_bytes * 0.8)
    ranked = recommend(
        wide(), limit, BATCH, CARD, allow=["accumulation_steps", "expandable_segments"]
    )
    reasons = [reason for one in ranked for reason in one.reasons]
    assert not any("the same memory and the same time" in reason for reason in reasons)
    assert ranked[0].config.expandable_segments is False


@pytest.mark.slow
def test_what_is_chosen_stays():
    config = StepConfig(precision="fp16-mixed", optimizer="sgd", batch_size=16)
    ranked = recommend(blocks(), "2GiB", None, CARD, config=config)
    assert {one.config.precision for one in ranked} == {"fp16-mixed"}
    assert {one.config.optimizer for one in ranked} == {"sgd"}
    assert {one.config.batch_size for one in ranked} == {16}


def normalised(n=8):
    def loss(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def model():
        return nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 8))

    def batch(samples):
        return torch.zeros(samples, 64), torch.zeros(samples, 8)

    return Workload(name="normalised", build_model=model, make_batch=batch, compute_loss=loss)


def test_a_batch_that_is_normalised_is_not_divided():
    ranked = recommend(normalised(), "64MiB", 32, CARD, allow=None, config=StepConfig())
    assert {one.config.accumulation_steps for one in ranked} == {1}
    assert any("normalises over the samples" in note for note in ranked.notes)


def test_exact_leaves_number_formats_alone():
    space = space_of(StepConfig(), None, alike, exact=True)
    fields = {name for group in (*space.faster, *space.savers) for one in group for name in one}
    kept = {name for t in EVERY if t.equivalence is Equivalence.BITWISE for name in t.fields}
    assert fields <= kept
    assert "precision" not in fields
    assert space.budgets == BUDGETS


def test_every_technique_that_saves_memory_is_searched_or_named_as_left_out():
    searched = {name for t in EVERY for one in t.searches for name in one}
    left_out = {t.fields[0] for t in EVERY if t.savings and not searched & set(t.fields)}
    # arithmetic has the first two; compiled steps have no prediction; a loss_kernel needs a
    # package, and loss_chunks is searched; the others save no memory of a running step, or change
    # the update
    assert left_out - {"batch_size", "accumulation_steps", "memory_budget"} <= {
        "attention", "budget_engine", "channels_last", "compile", "init_on_meta", "loss_kernel",
        "max_grad_norm",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"allow": ["batch_size"]}, "allow names 'batch_size'"),
        ({"headroom": 1.0}, "headroom=1.0"),
        ({"memory_limit": "much"}, "memory_limit"),
        ({"top": 0}, "top=0"),
    ],
)
def test_a_wrong_argument_is_an_error(options, said):
    with pytest.raises(MemlabError, match=said):
        recommend(linear(), **{"device": CARD, **options})


def test_a_limit_is_needed_where_the_device_has_no_known_memory(monkeypatch):
    monkeypatch.setattr("memlab.store.recorded.capacity", lambda device: None)
    with pytest.raises(MemlabError, match="memory_limit=None needs a device"):
        recommend(linear(), device="cpu")


def test_on_this_machine_the_best_are_measured():
    ranked = recommend(linear(), "64MiB", 8, "cpu", allow=["accumulation_steps"], confirm=2)
    assert 0 < ranked.num_measured <= 2
    assert ranked[0].result.source == "measured"
    assert ranked[0].predicted.source == "predicted"
    assert ranked[0].result.peak_allocated_bytes <= 64 * MIB


@pytest.mark.slow
def test_the_best_of_each_number_format_is_found_though_others_seem_faster(monkeypatch):
    measured = []

    def measure(*, workload, config, **options):
        measured.append(config.precision)
        return memlab.predict(workload, config, "cpu", memory_limit=options["memory_limit"])

    monkeypatch.setattr(confirming, "measure", measure)
    monkeypatch.setattr(confirming, "may_be_faster", lambda result, other: True)
    monkeypatch.setattr(search, "may_be_faster", lambda result, other: True)
    ranked = recommend(wide(), "1GiB", BATCH, "cpu", allow=["precision"], top=1, confirm=2)
    assert (len(ranked), ranked.num_measured) == (1, 2)
    assert len(set(measured)) == 2


def test_what_was_too_close_to_say_is_recommended_once_a_run_fits(monkeypatch):
    workload, config = linear(), StepConfig(batch_size=8)
    peak = memlab.predict(workload, config, "cpu").peak_allocated_bytes
    ranked = recommend(workload, int(peak * 1.001), 8, "cpu", allow=[])
    assert [(str(one.config), one.predicted.fit, one.result.fits) for one in ranked] == [
        (str(config), "too close", True)
    ]
    assert not ranked.too_close

    def out_of_memory(*, config, **options):
        result = memlab.predict(workload, config, "cpu")
        return dataclasses.replace(result, outcome="out_of_memory", message="it was too much")

    monkeypatch.setattr(confirming, "measure", out_of_memory)
    ranked = recommend(workload, int(peak * 1.001), 8, "cpu", allow=[])
    assert len(ranked) == len(ranked.too_close) == 0
    assert "what was too close to say did not fit when it was measured" in ranked.message
    assert any("was too close to say, and did not fit" in note for note in ranked.notes)


def test_what_does_not_fit_when_it_is_measured_is_dropped(monkeypatch):
    def too_large(**kwargs):
        result = memlab.predict(kwargs["workload"], kwargs["config"], "cpu")
        return dataclasses.replace(result, outcome="out_of_memory", message="it was too much")

    monkeypatch.setattr(confirming, "measure", too_large)
    ranked = recommend(linear(), "64MiB", 8, "cpu", allow=["accumulation_steps"], confirm=9)
    assert len(ranked) == 0
    assert ranked.dropped
    assert "failed when it was measured" in ranked.message
    assert any("did not fit when it was measured: it was too much" in n for n in ranked.notes)


def test_the_largest_batch_fits_and_the_next_one_does_not():
    limit = 64 * MIB
    found = largest_batch(wide(), StepConfig(), CARD, memory_limit=limit)
    assert found == found.result.config.batch_size
    assert not found.is_capped
    assert fits(wide(), StepConfig(batch_size=int(found)), limit)
    assert not fits(wide(), StepConfig(batch_size=int(found) + 1), limit)


@pytest.mark.slow
def test_the_largest_batch_of_several_micro_batches():
    limit = 64 * MIB
    config = StepConfig(accumulation_steps=4, batch_size=4)
    one = largest_batch(wide(), StepConfig(), CARD, memory_limit=limit)
    four = largest_batch(wide(), config, CARD, memory_limit=limit)
    assert four.result.config.accumulation_steps == 4
    assert four > one  # of four, one is held at a time
    assert fits(wide(), dataclasses.replace(config, batch_size=int(four)), limit)


def test_a_data_set_may_have_no_more_samples(monkeypatch):
    predict = largest.predict_with_size_model

    def predicted(workload, config, *args, **options):
        if config.batch_size <= 100:
            return predict(workload, config, *args, **options)
        failed = dataclasses.replace(
            memlab.predict(workload, StepConfig(batch_size=8), CARD),
            outcome="failed",
            message="make_batch returned 100 samples",
        )
        return SimpleNamespace(result=failed, size_model=None)

    monkeypatch.setattr(largest, "predict_with_size_model", predicted)
    assert largest_batch(linear(), device=CARD, batch_limit=4096) == 100


@pytest.mark.slow
def test_the_largest_batch_of_ranks_divides_and_the_next_one_does_not_fit():
    config = StepConfig(batch_size=12, accumulation_steps=3, sharding="zero3", world_size=2)
    limit = 4 * MIB
    found = largest_batch(blocks(width=128), config, "cpu", memory_limit=limit)
    assert found % 6 == 0
    assert not found.is_capped
    assert found.result.peak_allocated_bytes * 1.01 <= limit
    more = dataclasses.replace(config, batch_size=int(found) + 6)
    assert memlab.predict(blocks(width=128), more, "cpu", memory_limit=limit).fit != "fits"


@pytest.mark.parametrize("wanted", [1, 2, 3, 7, 100, 4095, 100_000])
@pytest.mark.parametrize("bend", [0, 5, 90])
def test_a_largest_batch_of_ranks_needs_few_predictions(monkeypatch, wanted, bend):
    """By made-up peaks of ranks: flat, then rising, then rising faster, in steps of 2 MiB."""
    ranks, tried = 4, []
    config = StepConfig(batch_size=ranks, sharding="zero3", world_size=ranks)

    def peak_of(samples):
        peak = max(40, 3 * samples, 7 * samples - 4 * bend, 9 * samples - 9 * bend) * MIB
        return -(-peak // (2 * MIB)) * 2 * MIB

    def predicted(workload, asked, device, *, memory_limit, **options):
        tried.append(asked.batch_size)
        result = StepResult(
            outcome=Outcome.OK, message="", source=Source.PREDICTED, device=device, config=asked,
            workload_name="linear", uncertainty={"peak_reserved_bytes": 0.1},
            peak_reserved_bytes=peak_of(asked.batch_size // ranks),
        )  # fmt: skip
        return SimpleNamespace(result=result.against_limit(memory_limit), size_model=None)

    monkeypatch.setattr(largest, "predict_with_size_model", predicted)
    limit = int(peak_of(wanted) * 1.1) + 1
    found = largest_batch(linear(), config, CARD, memory_limit=limit)
    assert peak_of(found // ranks + 1) > peak_of(wanted) >= peak_of(found // ranks)
    assert len(tried) <= 12


def test_a_largest_batch_below_one_sample_for_each_rank_is_an_error():
    config = StepConfig(batch_size=12, accumulation_steps=3, sharding="ddp", world_size=4)
    with pytest.raises(MemlabError, match="11 is less than the 12 samples that accumulation_steps"):
        largest_batch(linear(), config, "cpu", batch_limit=11)
    capped = largest_batch(linear(), config, "cpu", batch_limit=23)
    assert (int(capped), capped.is_capped) == (12, True)


def test_micro_batches_of_a_model_with_dropout_are_said():
    ranked = recommend(blocks(dropout=0.1), "1GiB", 8, CARD, allow=["accumulation_steps"])
    assert any("micro-batches draw others" in note for note in ranked.notes)
    config = StepConfig(accumulation_steps=2)
    split = recommend(blocks(dropout=0.1), "1GiB", 8, CARD, config=config, allow=[])[0].reasons
    assert "micro-batches draw others" in split[-2]
    assert split[-1].startswith("fits with")  # the last reason: a run replaces it


def test_not_even_one_sample_is_an_error():
    with pytest.raises(MemlabError, match="is not enough for one sample of linear; allowed"):
        largest_batch(linear(), device=CARD, memory_limit="64KiB")


def test_too_low_a_limit_names_the_settings_but_no_batch_that_was_not_tried():
    config = StepConfig(batch_size=8, sharding="zero3", world_size=2)
    said = "is not enough for 2 samples of linear, sharding=zero3, world_size=2; allowed"
    with pytest.raises(MemlabError, match=said):
        largest_batch(linear(), config, "cpu", memory_limit="1KiB")


def test_a_choice_of_settings_is_yielded_once():
    space = space_of(StepConfig(), None, alike, exact=False)
    seen, level = set(), [()]
    for _ in range(2):
        level = list(
            itertools.chain.from_iterable(space.with_one_more(one, savers=True) for one in level)
        )
        keys = [frozenset(tuple(sorted(s.items())) for s in one) for one in level]
        assert len(keys) == len(set(keys))
        assert not seen & set(keys)
        seen |= set(keys)


@pytest.fixture
def predictions(monkeypatch):
    """Return the workload and config of each prediction of a search; nothing is known before."""
    asked = []
    predict = search.predict_with_size_model

    def predicted(workload, config, *args, **options):
        asked.append((workload.name, config))
        return predict(workload, config, *args, **options)

    monkeypatch.setattr(search, "predict_with_size_model", predicted)
    search._known.clear()
    return asked


def test_another_limit_records_no_step_again(plain, predictions):
    workload, allow = wide(), ["accumulation_steps", "memory_budget"]
    first = recommend(workload, plain.peak_reserved_bytes * 2, BATCH, CARD, allow=allow)
    assert predictions
    asked = len(predictions)
    again = recommend(workload, plain.peak_reserved_bytes * 3, BATCH, CARD, allow=allow)
    assert len(predictions) == asked
    assert again[0].config == first[0].config


@pytest.mark.slow
def test_the_same_question_predicts_nothing_again(plain, predictions):
    limit, allow = plain.peak_reserved_bytes // 2, ["accumulation_steps", "precision", "optimizer"]
    first = recommend(wide(), limit, 96, CARD, allow=allow)
    limit = int(first[0].predicted.peak_reserved_bytes * 0.8)
    found = recommend(wide(), limit, 96, CARD, allow=allow)
    asked = len(predictions)
    again = recommend(wide(), limit, 96, CARD, allow=allow)
    assert len(predictions) == asked
    assert [one.config for one in again] == [one.config for one in found]


@pytest.mark.slow
def test_single_samples_are_tried():
    options = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "sequence_length": 256}
    workload = memlab.workloads.get("gpt-small", **options)
    pairs, single = (
        memlab.predict(workload, StepConfig(batch_size=8, accumulation_steps=steps), "cpu")
        for steps in (4, 8)
    )
    limit = (pairs.peak_allocated_bytes + single.peak_allocated_bytes) // 2
    ranked = recommend(workload, limit, 8, "cpu", allow=["accumulation_steps"], confirm=0)
    assert ranked[0].config.accumulation_steps == 8
    assert ranked[0].result.peak_allocated_bytes == single.peak_allocated_bytes


def test_only_what_is_told_by_pairs_counts_as_told_for_single_samples():
    workload = linear()
    for config in (StepConfig(batch_size=1), StepConfig(batch_size=8)):
        predicted = predict_with_size_model(workload, config, "cpu")
        space = space_of(config, ["accumulation_steps"], alike, exact=False)
        for one in alternatives_of(predicted, (), space, None, "cpu"):
            is_single = config.batch_size == 8 and one.result.config.accumulation_steps == 8
            assert one.is_single == is_single


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-small", "resnet-digits", "lstm-text", "vit-digits"])
@pytest.mark.parametrize("device", ["cpu", CARD])
def test_an_estimate_of_single_samples_holds(name, device):
    workload = memlab.workloads.get(name)
    predicted = predict_with_size_model(workload, StepConfig(batch_size=8), device)
    config = StepConfig(batch_size=8, accumulation_steps=8)
    space = space_of(StepConfig(batch_size=8), ["accumulation_steps"], alike, exact=False)
    estimates = {
        one.result.config: one.result
        for one in alternatives_of(predicted, (), space, None, "cpu" if device == "cpu" else "cuda")
    }
    told = estimates[config].counted_peak
    peak = memlab.predict(workload, config, device).counted_peak.nbytes
    assert told.nbytes * (1 - told.uncertainty) <= peak <= told.upper_bytes


@pytest.mark.slow
def test_what_is_known_is_that_of_the_same_workload(predictions):
    recommend(wide(), "1GiB", BATCH, CARD, allow=["accumulation_steps"])
    asked = len(predictions)
    recommend(blocks(width=128), "1GiB", BATCH, CARD, allow=["accumulation_steps"])
    recommend(wide(), "1GiB", BATCH, "rtx-4060", allow=["accumulation_steps"])
    recommend(wide(), "1GiB", BATCH, CARD, allow=["accumulation_steps"], seed=1)
    assert len(predictions) >= 4 * asked


@pytest.mark.slow
def test_a_file_that_was_edited_is_predicted_again(predictions, tmp_path, monkeypatch):
    file = tmp_path / "edited_model.py"
    file.write_text("WIDTH = 8\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("edited_model")
    workload = linear()
    recommend(workload, "1GiB", 8, CARD, allow=["accumulation_steps"])
    asked = len(predictions)
    recommend(workload, "1GiB", 8, CARD, allow=["accumulation_steps"])
    assert len(predictions) == asked
    file.write_text("WIDTH = 16\n")
    recommend(workload, "1GiB", 8, CARD, allow=["accumulation_steps"])
    assert len(predictions) == 2 * asked
    sys.modules.pop("edited_model")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["build_model", "compute_loss"])
def test_an_edit_of_a_file_that_only_a_worker_imports_is_seen(
    place, predictions, tmp_path, monkeypatch
):
    file = tmp_path / f"imported_by_{place}.py"
    file.write_text("WIDTH = 8\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def build_model():
        return nn.Linear(IN, importlib.import_module("imported_by_build_model").WIDTH, bias=False)

    def compute_loss(model, x):
        return model(x).sum() * importlib.import_module("imported_by_compute_loss").WIDTH

    workload = dataclasses.replace(linear(), **{place: locals()[place]})
    for _ in range(2):
        recommend(workload, "1GiB", 8, CARD, allow=["accumulation_steps"])
        assert len(predictions) == 1
    for lane in (isolation.measuring, isolation.predicting):
        lane.replace()  # the new worker has not seen the file
    file.write_text("WIDTH = 160\n")
    found = recommend(workload, "1GiB", 8, CARD, allow=["accumulation_steps"])[0].result
    assert len(predictions) == 2
    if place == "build_model":
        assert found.peak_by_category["parameters"] == 4 * IN * 160


@pytest.mark.slow
def test_more_memory_is_never_slower_at_random_limits(plain, predictions):
    workload = wide()
    peak = plain.peak_reserved_bytes
    draw = random.Random(0)
    seconds = {}
    for _ in range(12):
        limit = int(peak * draw.uniform(0.3, 1.2))
        ranked = recommend(
            workload, limit, BATCH, CARD, allow=["accumulation_steps", "memory_budget"]
        )
        if len(ranked):
            seconds[limit] = ranked[0].result.step_seconds
    assert len(seconds) > 6
    least = float("inf")
    for limit in sorted(seconds):
        assert seconds[limit] <= SAME_TIME * least
        least = min(least, seconds[limit])


# with choices, against a prediction of each combination


FEW = 1024
ALL = {"frozen": [False, True], "half": [False, True]}


def net(*, frozen: bool = False, width: int = 64, half: bool = False) -> Workload:
    """Return a workload whose first layer may be frozen, and in 16 bits only if it is."""
    if not isinstance(width, int):
        raise WorkloadError(f"width={width!r} is no int")
    if half and not frozen:
        raise WorkloadError("half=True needs frozen=True")

    def build():
        first = nn.Linear(512, width, dtype=torch.bfloat16 if half else None)
        return nn.Sequential(first.requires_grad_(not frozen), nn.ReLU(), nn.Linear(width, 512))

    def loss(model, x):
        first, relu, last = model
        return last(relu(first(x.to(first.weight.dtype))).float()).square().mean()

    return Workload(
        name=f"net, frozen {frozen}, width {width}, half {half}",
        build_model=build,
        make_batch=lambda n: torch.ones(n, 512),
        compute_loss=loss,
        choices=WorkloadChoices(
            values={"frozen": frozen, "width": width, "half": half},
            offered={"frozen": (False, True), "width": (64, 256), "half": (False, True)},
            make_workload=net,
        ),
    )


def test_the_fastest_combination_that_fits_comes_first(predictions):
    ranked = recommend(net(), "1GiB", FEW, CARD, choices=ALL, allow=[], top=8)
    possible = [
        net(frozen=frozen, half=half)
        for frozen, half in itertools.product(*ALL.values())
        if frozen or not half
    ]
    config = StepConfig(batch_size=FEW)
    costs = {one.name: memlab.predict(one, config, CARD).step_seconds for one in possible}
    assert [one.workload.name for one in ranked] == sorted(costs, key=costs.get)
    assert all(one.result.workload_name == one.workload.name for one in ranked)
    assert len(predictions) == len(possible)  # one for each, as there are no other settings

    refused = [note for note in ranked.notes if "half=True needs frozen=True" in note]
    assert len(refused) == 1
    assert "1 of 4 combinations is left out:" in ranked.notes
    assert any("What is trained differs" in note for note in ranked.notes)
    page = ranked._repr_html_()
    assert "chosen" in page
    assert "frozen=True, half=True" in page

    recommend(net(), "512MiB", FEW, CARD, choices=ALL, allow=[], top=8)
    assert len(predictions) == len(possible)  # another limit is arithmetic


def test_a_reason_says_the_bytes_and_the_time_of_each_choice():
    ranked = recommend(
        net(), "1GiB", FEW, CARD, choices={"frozen": [False, True], "width": [64, 256]}, allow=[]
    )
    config = StepConfig(batch_size=FEW)
    peaks = {
        (frozen, width): memlab.predict(net(frozen=frozen, width=width), config, CARD)
        .peak_reserved_bytes
        for frozen in (False, True)
        for width in (64, 256)
    }  # fmt: skip
    both = next(one for one in ranked if one.chosen == {"frozen": True, "width": 256})
    said = {
        "frozen=True instead of False": peaks[True, 64] - peaks[False, 64],
        "width=256 instead of 64": peaks[True, 256] - peaks[True, 64],
    }
    for what, more in said.items():
        (reason,) = [reason for reason in both.reasons if reason.startswith(what)]
        assert f"({memlab._util.units.signed_bytes(more)} reserved)" in reason
        assert "what is trained differs" in reason
    plain = next(one for one in ranked if one.chosen == {"frozen": False, "width": 64})
    assert "the others are compared with this" in plain.reasons[0]


@pytest.mark.slow
def test_one_limit_chooses_among_workloads_and_settings(predictions):
    config = StepConfig(batch_size=FEW)
    small, large = (memlab.predict(net(width=w), config, CARD) for w in (64, 256))
    limit = (small.needed_bytes + large.needed_bytes) // 2
    allow = ["accumulation_steps"]
    ranked = recommend(net(width=256), limit, FEW, CARD, choices={"width": [64, 256]},
                       allow=allow, top=1)  # fmt: skip
    best = ranked[0]
    assert best.workload.name == net(width=64).name
    assert memlab.predict(best.workload, best.config, CARD, memory_limit=limit).fit == "fits"
    # it is slower anyway; a second one is what fits of it, where nothing else had been found yet
    assert [name for name, _ in predictions].count(net(width=256).name) <= 2
    assert any("width=256 is not recommended" in note for note in ranked.notes)
    script = memlab.export_script(best.workload, best.config)
    assert "width = 64" in script
    assert "256" not in script


def test_without_choices_the_workload_is_the_given_one():
    workload = net()
    ranked = recommend(workload, "1GiB", FEW, CARD, allow=[])
    assert ranked[0].workload is workload
    assert ranked.workloads == (workload,)
    assert "chosen" not in ranked._repr_html_()


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"depth": [1, 2]}, r"names 'depth'; the choices of net, .* are \['frozen', 'width', 'h"),
        ({"width": 64}, r"choices\['width'\]=64; allowed is a list"),
        ({"width": []}, r"choices\['width'\]=\[\]; allowed is a list"),
        ({}, "names nothing; pass None"),
        (torch.zeros(3), "is of type Tensor; allowed is a dict"),
        (
            ["width"],
            r"is of type list; allowed is a dict of lists, such as choices=\{'frozen'",
        ),
        ("width", r"choices='width' is of type str; allowed is a dict of lists"),
        ({"width": ["wide"]}, r"choices\['width'\] has 'wide': .* offers 64, 256"),
        ({"half": [True], "frozen": [False]}, "leaves nothing to choose: half=True, frozen=False"),
        ({"width": list(range(1, 70))}, "has 69 combinations; allowed are at most 64"),
    ],
)
def test_what_the_workload_does_not_have_is_an_error(choices, said):
    with pytest.raises(MemlabError, match=said):
        recommend(net(), "1GiB", FEW, CARD, choices=choices)


@pytest.mark.slow
def test_what_cannot_be_built_is_left_out_with_its_reason():
    def other(width: int = 64) -> Workload:
        def build():
            if width == 256:
                raise RuntimeError("a library is missing")
            return nn.Linear(512, width)

        return Workload(
            name=f"other {width}",
            build_model=build,
            make_batch=lambda n: torch.ones(n, 512),
            compute_loss=lambda model, x: model(x).square().mean(),
            choices=WorkloadChoices(
                values={"width": width}, offered={"width": (64, 256)}, make_workload=other
            ),
        )

    ranked = recommend(other(), "1GiB", 8, CARD, choices={"width": [64, 256]}, allow=[])
    assert [one.chosen for one in ranked] == [{"width": 64}]
    assert "1 of 2 combinations is left out:" in ranked.notes
    assert any("width=256" in note and "a library is missing" in note for note in ranked.notes)
