"""`recommend` with several ranks, against predictions of every strategy, one by one."""

import dataclasses
from functools import partial

import pytest
import torch

import memlab
from memlab import MemlabError, StepConfig
from memlab.search import search
from memlab.search.alternatives import space_of
from memlab.search.recommend import with_ranks
from memlab.techniques.sharding.sharding import most_ranks
from tests.models import blocks, linear
from tests.verify_parts import alike

recommend = partial(memlab.recommend, patience=3600)  # on a busy machine too

STRATEGIES = {"ddp", "zero1", "zero2", "zero3"}
BATCH = 2048
TWO = StepConfig(batch_size=BATCH, sharding="ddp", world_size=2)


def wide():
    return blocks(width=128, depth=1)


def on_two(limit, **options):
    # what one search has predicted the next one knows
    return recommend(wide(), limit, device="cpu", **{"confirm": 0, **options})


@pytest.fixture(scope="module")
def every():
    """Return the prediction of each strategy, by its name."""
    ranked = on_two("1GiB", batch_size=BATCH, world_size=2)
    return {str(one.config.sharding): one.result for one in ranked}


@pytest.fixture(scope="module")
def limit(every):
    """Return what all strategies but ddp fit."""
    peaks = sorted(1.02 * result.peak_allocated_bytes for result in every.values())
    assert every["ddp"].peak_allocated_bytes > peaks[-2]
    return int(peaks[-2])


def test_of_ranks_nothing_is_told_as_the_best_so_far_before_all_were_predicted():
    told = []
    ranked = recommend(
        linear(), "1GiB", 8, "cpu", config=StepConfig(batch_size=8, sharding="zero1", world_size=2),
        allow=["precision"], confirm=0, on_progress=told.append,
    )  # fmt: skip
    assert len(ranked)
    assert any("best so far" in progress.text for progress in told)
    assert not any(isinstance(progress, search.BestSoFar) for progress in told)


@pytest.mark.slow
def test_of_what_fits_the_strategy_that_sends_least_comes_first(every, limit):
    assert set(every) == STRATEGIES
    alone = memlab.predict(wide(), dataclasses.replace(TWO, sharding="zero3"), "cpu")
    assert alone.peak_allocated_bytes == every["zero3"].peak_allocated_bytes
    assert alone.communication == every["zero3"].communication

    ranked = on_two(limit, batch_size=BATCH, world_size=2)
    found = [str(one.config.sharding) for one in ranked]
    assert found == sorted(STRATEGIES - {"ddp"}, key=lambda name: every[name].sent_bytes)
    assert all(one.config.world_size == 2 for one in ranked)
    assert any("strategies are compared by that" in reason for reason in ranked[0].reasons)
    assert any("only if no strategy fits by itself" in note for note in ranked.notes)


@pytest.mark.slow
def test_ranks_of_this_machine_are_measured(limit):
    ranked = on_two(limit, batch_size=BATCH, world_size=2, confirm=1)
    assert ranked.num_measured == 1
    assert len(ranked[0].result.ranks) == 2
    assert ranked[0].result.step_seconds > 0


@pytest.mark.slow
def test_a_strategy_that_does_not_fit_by_itself_gets_smaller_micro_batches(every):
    config = dataclasses.replace(TWO, sharding="zero3")
    limit = int(every["zero3"].peak_allocated_bytes * 0.9)
    ranked = on_two(limit, config=config, allow=["accumulation_steps"])
    assert ranked[0].config == dataclasses.replace(config, accumulation_steps=2)
    assert ranked[0].result.fit == "fits"
    assert {one.config.sharding for one in ranked.tried} == {"zero3"}


@pytest.mark.slow
def test_a_chosen_strategy_stays(limit):
    config = dataclasses.replace(TWO, sharding="zero3")
    ranked = on_two(limit, config=config)
    assert [one.config for one in ranked.tried] == [config]
    assert "sharding='zero3' over 2 ranks" in ranked[0].reasons[0]


def test_ranks_are_those_of_the_config_the_argument_or_the_cluster():
    cluster, card = 8, 1
    plain = StepConfig(batch_size=BATCH)
    assert with_ranks(plain, None, card) == (plain, False)
    of_cluster, is_searched = with_ranks(plain, None, cluster)
    assert (of_cluster.sharding, of_cluster.world_size, is_searched) == ("ddp", 8, True)
    assert with_ranks(plain, 2, cluster)[0].world_size == 2
    assert with_ranks(plain, 1, cluster) == (plain, False)
    assert with_ranks(TWO, 4, card) == (dataclasses.replace(TWO, world_size=4), False)
    with pytest.raises(MemlabError, match="batch_size=2048 does not divide"):
        with_ranks(plain, 3, card)


def test_what_is_searched_of_ranks():
    def space(base=TWO, **options):
        options = {"exact": False, "any_strategy": True, **options}
        return space_of(base, options.pop("allow", None), alike, **options)

    def settings(found):
        return [one for group in (*found.faster, *found.savers) for one in group]

    timed, untimed = space(), space(has_times=False)
    assert {"precision": "bf16-mixed"} in settings(timed)
    assert {"precision": "bf16-mixed"} not in settings(untimed)
    assert {"sharding": "zero3"} in settings(untimed)
    divided = [one for one in settings(timed) if "accumulation_steps" in one]
    assert divided == [{"accumulation_steps": steps} for steps in (2, 4, 8, 16)]
    few = dataclasses.replace(TWO, batch_size=6)  # of which a rank has three samples
    assert {"accumulation_steps": 3} in settings(space(few))
    assert {"accumulation_steps": 2} not in settings(space(few))
    assert timed.accumulation_steps == (1,)
    assert timed.budgets == ()

    many = dataclasses.replace(TWO, world_size=16)
    hybrid = {"sharding": "hybrid", "shard_group_size": 8}
    assert hybrid in settings(space(many))
    assert hybrid not in settings(timed)
    alone = space(StepConfig(), any_strategy=False)
    assert not any("sharding" in one for one in settings(alone))
    assert not any("sharding" in one for one in settings(space(any_strategy=False)))
    assert not any("sharding" in one for one in settings(space(allow=["memory_budget"])))


def test_more_ranks_than_devices_are_not_measured():
    ranks, limit = 2 * most_ranks(torch.device("cpu")), "1GiB"
    config = StepConfig(batch_size=ranks, sharding="zero3", world_size=ranks)
    ranked = recommend(linear(), limit, device="cpu", config=config, confirm=1)
    assert ranked[0].config == config
    assert ranked.num_measured == 0


def test_nothing_fits_one_card_and_the_message_says_how_many_are_enough():
    config = StepConfig(batch_size=64, optimizer_implementation="fused")
    workload = blocks(width=2048, depth=1)
    ranked = recommend(
        workload, "125MiB", device="rtx-4090", config=config, allow=["optimizer_implementation"]
    )
    assert len(ranked) == 0
    found = ranked.on_more_cards
    assert found.fit == "fits"
    assert found.device == f"{found.config.world_size}x-rtx-4090"
    assert f"(device={found.device!r}) it fits" in ranked.message
    assert f"sharding={str(found.config.sharding)!r}" in ranked.message


@pytest.mark.slow
def test_on_a_cluster_strategies_are_compared_by_their_time():
    ranked = recommend(wide(), "1GiB", BATCH, "2x-rtx-4090", allow=["sharding"])
    assert {str(one.config.sharding) for one in ranked} == STRATEGIES
    assert all(one.config.world_size == 2 for one in ranked)
    seconds = [one.result.step_seconds for one in ranked]
    assert seconds == sorted(seconds)
    assert any(reason.endswith("compared by time") for reason in ranked[0].reasons)


@pytest.mark.slow
def test_what_is_returned_has_every_rank(every):
    def peaks(result):
        return {one.rank_numbers: one.peak_by_category for one in result.ranks}

    for name, result in every.items():
        alone = memlab.predict(wide(), dataclasses.replace(TWO, sharding=name), "cpu")
        assert peaks(result) == peaks(alone)
    assert len(every["zero1"].ranks) == 2  # with ZeRO-1 they hold different states


@pytest.mark.slow
def test_a_search_records_one_rank_of_what_it_does_not_return():
    search._known.clear()
    ranked = on_two("1GiB", batch_size=BATCH, world_size=2, top=1)
    held = {str(one.config.sharding): one.ranks for one in ranked.tried}
    assert str(ranked[0].config.sharding) != "zero1"
    assert len(held["zero1"]) == 1


@pytest.mark.slow
def test_what_cannot_be_as_fast_is_not_recorded_and_nothing_is_lost(monkeypatch):
    def found():
        search._known.clear()
        workload = blocks(width=8192, depth=1)
        allow = ["sharding", "precision"]
        ranked = recommend(workload, None, 2**18, "2x-h100", allow=allow, top=2)
        answers = [(one.config, one.result.step_seconds, one.result.needed_bytes) for one in ranked]
        return answers, {one.config for one in ranked.tried}

    answers, tried = found()
    monkeypatch.setattr(search, "OTHER_PRODUCTS", "sharding")  # so that no strategy is left out
    of_all, all_tried = found()
    assert answers == of_all
    assert tried < all_tried


OFFLOADED = {"offload_parameters": True, "offload_optimizer": True}


@pytest.mark.slow
def test_what_only_fits_with_offloaded_shards_is_found_if_it_is_allowed():
    workload = blocks(width=2048, depth=2)
    zero3 = StepConfig(batch_size=64, sharding="zero3", world_size=2)
    offloaded = dataclasses.replace(zero3, **OFFLOADED)
    least = memlab.predict(workload, offloaded, "2x-rtx-4090")
    limit = int(least.needed_bytes * 1.1)

    ranked = recommend(workload, limit, 64, "2x-rtx-4090", allow=["sharding", *OFFLOADED])
    assert offloaded in [one.config for one in ranked]
    assert all(one.config.offloads_shards for one in ranked)
    assert ranked[0].result.step_seconds is None
    assert any("so this comes after what has a time" in said for said in ranked[0].reasons)
    assert "time not known" in str(ranked)

    unasked = recommend(workload, limit, 64, "2x-rtx-4090", allow=["sharding"])
    assert len(unasked) == 0


@pytest.mark.slow
def test_what_has_no_time_comes_after_what_has_one():
    workload = blocks(width=2048, depth=2)
    config = StepConfig(batch_size=64, sharding="zero3", world_size=2)
    ranked = recommend(workload, "200MiB", config=config, device="2x-rtx-4090", allow=[*OFFLOADED])
    by_itself, together = ranked
    assert by_itself.config == dataclasses.replace(config, offload_optimizer=True)
    assert by_itself.result.step_seconds > 0
    assert together.config == dataclasses.replace(config, **OFFLOADED)
    assert together.result.step_seconds is None


def test_two_techniques_together_are_searched_in_ranks_only():
    def settings(base):
        space = space_of(base, None, alike, exact=False)
        return [one for group in space.savers for one in group]

    assert OFFLOADED in settings(TWO)
    assert OFFLOADED not in settings(StepConfig())
    assert settings(TWO)[0] == {"offload_parameters": True}  # before micro-batches
