"""Ranks in the panel without a browser: real runs, what code and history say, and errors."""

from contextlib import closing

import pytest

import memlab
from memlab import StepConfig
from memlab._panel import asked
from tests.panel_parts import (
    PATIENCE_SECONDS,
    is_idle,
    line,
    opened,
    press,
    row,
    status,
    until,
    use,
)
from tests.rank_parts import faulty, left_running


@pytest.fixture
def panel(nothing_ahead):
    with opened() as made:
        yield made


@pytest.mark.slow
def test_ranks_run_and_are_in_the_code_and_the_table(panel):
    panel.set(sharding="zero2", world_size=2, batch_size=4)
    result = panel.run()
    assert result.outcome == "ok", result.message
    assert len(result.ranks) == 2
    config = StepConfig(sharding="zero2", world_size=2, batch_size=4)
    assert panel.config == config
    assert "sharding='zero2', world_size=2" in panel.code()
    assert row(panel)["other"] == "zero2 x 2"
    assert eval(asked.config_source(config, {})) == config

    press(panel, "open", panes=["ranks"])
    until(lambda: "ranks" in panel._told.panes)
    pane = panel._told.panes["ranks"]
    assert pane["alone"] == ""
    assert sum(rank["bytes"] for rank in pane["ranks"]) >= result.peak_allocated_bytes
    assert pane["sent"]["rows"]


@pytest.mark.slow
def test_a_prediction_of_ranks_arrives_and_is_compared_with_the_run(panel):
    panel.set(sharding="ddp", world_size=2)
    until(lambda: panel.prediction is not None and panel.prediction.outcome == "ok")
    panel._page.forecasts.wait(PATIENCE_SECONDS)
    assert panel.prediction.config.world_size == 2
    panel.run()
    until(lambda: panel._log.runs[-1].prediction is not None)
    assert abs(panel._log.runs[-1].prediction_error) < 0.05


def test_a_cluster_is_a_device_and_has_room_for_its_ranks(panel):
    devices = [device["value"] for device in panel._told.catalog["devices"]]
    assert {"cpu", "h200", "8x-h100"} <= set(devices)
    panel.set(device="8x-h100", sharding="zero3", world_size=8, batch_size=16)
    assert panel._asked.wrong == {}
    panel.set(world_size=16)
    assert panel._asked.question is None
    assert "more than the 8 cards of 8x-h100" in line(panel, "ranks")["text"]
    use(panel, "ranks")
    assert panel.config.world_size == 8


@pytest.mark.slow
def test_an_error_of_one_rank_names_it():
    with closing(memlab.panel(faulty("error"), device="cpu")) as made:
        result = made.run(sharding="ddp", world_size=2)
        assert result.outcome == "failed"
        assert result.message.startswith("rank 1 of 2")
        assert "rank 1 of 2" in status(made)


@pytest.mark.slow
def test_stop_ends_all_ranks():
    with closing(memlab.panel(faulty("hang"), device="cpu")) as made:
        made.set(sharding="ddp", world_size=2, batch_size=4)
        press(made, "run")
        until(lambda: "measuring memory" in made._told.job["text"])
        press(made, "stop")
        until(lambda: is_idle(made))
        assert made.result.outcome == "cancelled"
        assert "stopped" in status(made)
    assert not left_running()
