"""What the panel says of ranks, without its widgets: the line, its remedies, rows and questions."""

import dataclasses
import json

import pytest

from memlab import StepConfig
from memlab._panel import state, texts
from memlab._panel.choices import neighbours
from memlab._panel.panes import ranks_pane
from memlab._panel.runs import RunLog
from memlab._panel.table import told
from memlab._panel.texts import ranks_label, ranks_line
from memlab._util.collectives import Communication
from memlab.config import Sharding
from memlab.techniques.sharding.sharding import most_ranks
from memlab.techniques.technique import Refusal, Technique
from tests.figure_parts import MIB, make_timeline
from tests.forecast_parts import question
from tests.panel_parts import make_facts, make_result, settings, texts_of_row
from tests.verify_parts import alike


def line_of(now, *, is_here=True, device="cpu"):
    wrong = state.problems(now)
    asked = texts.setup_of(now, wrong, device)
    return ranks_line(now, wrong, asked, is_here=is_here)


def lines_of(now, facts=None):
    wrong = state.problems(now)
    return texts.lines(now, wrong, facts, device="cpu", name="t", effect=alike())


def of_ranks(*optimizer_mib):
    """Return a result of ranks that differ by their optimizer state."""
    timeline = make_timeline([MIB, 5 * MIB, 3 * MIB])
    made = [
        make_result(
            config=StepConfig(sharding="zero1", world_size=4, batch_size=4), timeline=timeline,
            peak_by_category={"parameters": 10 * MIB, "optimizer_state": size * MIB},
            rank_numbers=(number,),
        )
        for number, size in enumerate(optimizer_mib)
    ]  # fmt: skip
    return dataclasses.replace(made[0], ranks=tuple(made), rank_numbers=())


def ranks(**changes):
    return settings(**{"sharding": "zero3", "world_size": 4, **changes})


def test_the_line_says_how_many_samples_a_rank_computes():
    text = line_of(ranks(batch_size=8)).text
    assert text.startswith("each of 4 ranks computes 2 of 8 samples")
    assert "1/4 of the model" in text
    assert (
        "4 micro-batches of 2 in each rank"
        in lines_of(ranks(batch_size=32, accumulation_steps=4))["accumulation_steps"].text
    )


@pytest.mark.parametrize("sharding", list(Sharding))
def test_every_strategy_has_words(sharding):
    group = 2 if sharding is Sharding.HYBRID else None
    now = ranks(sharding=str(sharding), shard_group_size=group)
    assert state.problems(now) == {}
    assert line_of(now).text
    assert ranks_label(now) == (
        "Ranks (one device)" if sharding is Sharding.NONE else f"Ranks ({sharding} x 4)"
    )


def test_settings_of_ranks_do_nothing_on_one_device_and_one_rank_is_offered_a_second():
    assert line_of(ranks(world_size=1)).remedy == ("2 ranks", {"world_size": 2})
    now = settings(world_size=4, shard_group_size=2, tensor_parallel_size=2)
    assert state.to_config(now) == StepConfig()


@pytest.mark.parametrize(
    ("changes", "field", "remedy"),
    [
        ({"batch_size": 9}, "batch_size", {"batch_size": 8}),
        ({"batch_size": 2}, "batch_size", {"batch_size": 4}),
        (
            {"batch_size": 24, "accumulation_steps": 4}, "accumulation_steps",
            {"accumulation_steps": 2},
        ),
        ({"sharding": "hybrid"}, "world_size", {"shard_group_size": 4}),
        ({"sharding": "ddp", "tensor_parallel_size": 8}, "world_size", {"tensor_parallel_size": 1}),
        ({"world_size": 5000, "batch_size": 5000}, "world_size", {"world_size": 2}),
        ({"world_size": "many"}, "world_size", {"world_size": 2}),
    ],
)  # fmt: skip
def test_ranks_that_do_not_go_together_are_named_with_a_remedy(changes, field, remedy):
    now = ranks(**changes)
    wrong = state.problems(now)
    assert list(wrong) == [field]
    line = line_of(now) if field == "world_size" else lines_of(now)[field]
    assert line.kind == "bad"
    assert line.remedy[1] == remedy
    assert state.problems({**now, **remedy}) == {}
    assert all(said.text for said in lines_of(now).values())


def test_a_refused_strategy_is_said_beside_the_ranks_and_nowhere_else():
    now = ranks(sharding="zero3", channels_last=True)
    assert line_of(now).remedy[1] == {"channels_last": False}
    assert lines_of(now)["more"].kind != "warn"


def test_a_refusal_without_a_setting_that_lifts_it_has_no_button():
    missing = Refusal(why="it is not installed", otherwise="pip install it")
    technique = Technique(fields=(), equivalence="x", refusals=lambda _: (missing,))
    line = texts.refusal_line((technique,), texts.setup_of(ranks(), {}, "cpu"))
    assert (line.text, line.remedy) == ("it is not installed; pip install it", None)


def test_more_ranks_than_run_here_are_predicted_only():
    most = most_ranks(texts.setup_of(ranks(), {}, "cpu").device)
    now = ranks(world_size=2 * most, batch_size=2 * most)
    assert f"at most {most} ranks" in line_of(now).text
    assert line_of(now, is_here=False).kind == "open"


def test_a_cluster_offers_all_of_its_cards():
    now = settings()
    alone = ranks_line(now, {}, texts.setup_of(now, {}, "8x-h100"), is_here=False, num_cards=8)
    assert alone.remedy == ("zero3 x 8", {"sharding": "zero3", "world_size": 8})
    wrong = {"world_size": "world_size=16 is more than the 8 cards of 8x-h100"}
    now = ranks(world_size=16, batch_size=16)
    asked = texts.setup_of(now, wrong, "8x-h100")
    line = ranks_line(now, wrong, asked, is_here=False, num_cards=8)
    assert (line.kind, line.remedy) == ("bad", ("8 ranks", {"world_size": 8}))


def test_the_gradient_differs_where_ranks_normalise_apart():
    facts = make_facts(sample_mixing_modules=("layer1.bn1",))
    line = lines_of(ranks(batch_size=8), facts)["accumulation_steps"]
    assert "BatchNorm in layer1.bn1 sees 2 samples, not 8" in line.verdict.text
    assert "unchanged" in lines_of(ranks(), make_facts())["accumulation_steps"].verdict.text


def test_a_row_names_the_strategy_and_its_ranks():
    log = RunLog()
    config = StepConfig(sharding="zero3", world_size=2, sync_each_micro_batch=False)
    log.add(make_result(config=config))
    assert texts_of_row(told(log))["other"] == "zero3 x 2, averaged once an update"


def test_neighbours_of_ranks_divide_the_batch():
    asked = question(8)
    config = StepConfig(batch_size=8, sharding="zero3", world_size=4)
    found = neighbours(dataclasses.replace(asked, config=config), ())
    sizes = {one.config.world_size for one in found}
    assert {1, 2, 8} <= sizes
    assert dataclasses.replace(asked, config=config).family.config.batch_size == 4


def test_the_pane_holds_the_ranks_at_their_peak_and_what_a_rank_sends():
    sent = Communication(
        collective="all-gather", num_ranks=4, num_calls=3, payload_bytes=8 * MIB, sent_bytes=6 * MIB
    )
    pane = ranks_pane(dataclasses.replace(of_ranks(8, 8, 4), communication=(sent,)), 64 * MIB)
    assert [rank["label"] for rank in pane["ranks"]] == ["ranks 0-1", "rank 2"]
    alike, last = pane["ranks"]
    assert (alike["bytes"], alike["byCategory"]["optimizer_state"]) == (18 * MIB, 8 * MIB)
    assert (last["bytes"], last["limitBytes"], pane["alone"]) == (14 * MIB, 64 * MIB, "")
    assert "A rank sends 6.00 MiB a step, measured" in pane["sent"]["caption"]
    assert pane["sent"]["rows"] == [["all-gather", "4", "3", "6.00 MiB"]]
    json.dumps(pane, allow_nan=False)


@pytest.mark.parametrize("result", [None, make_result()])
def test_the_pane_says_that_one_device_is_alone(result):
    pane = ranks_pane(result, None)
    assert "One device" in pane["alone"]
    assert (pane["ranks"], pane["sent"]) == ([], None)
