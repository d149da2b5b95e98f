"""Ranks in the panel without a browser: real runs, what code and history say, and errors."""

import re
from contextlib import closing

import pytest
from memlab._panel.pictures import OVER_STEP

import memlab
from memlab import StepConfig
from memlab._panel import asked
from tests.panel_parts import PATIENCE_SECONDS, opened, until
from tests.rank_parts import faulty, left_running


@pytest.fixture
def panel(nothing_ahead):
    with opened() as made:
        yield made


def test_ranks_run_and_are_in_the_code_and_the_table(panel):
    panel.set(sharding="zero2", world_size=2, batch_size=4)
    result = panel.run()
    assert result.outcome == "ok", result.message
    assert len(result.ranks) == 2
    config = StepConfig(sharding="zero2", world_size=2, batch_size=4)
    assert panel.config == config
    assert "sharding='zero2', world_size=2" in panel.code()
    assert "zero2 x 2" in panel._view.table._table.value
    assert eval(asked.config_source(config, {})) == config

    pane = panel._view.pictures.ranks
    pane.box.layout.display = ""
    pane.choice.value = OVER_STEP
    until(lambda: "memory through one step in each rank" in pane._picture.value)
    assert re.search("rank(s 0-1| 0) up to", pane._picture.value)


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
    assert "8x-h100" in dict(panel._view.device.options).values()
    panel.set(device="8x-h100", sharding="zero3", world_size=8, batch_size=16)
    assert panel._asked.wrong == {}
    panel.set(world_size=16)
    assert panel._asked.question is None
    line = panel._view.controls.sliders["world_size"].explanation
    assert "more than the 8 cards of 8x-h100" in line.text.value
    line.button.click()
    assert panel.config.world_size == 8


def test_an_error_of_one_rank_names_it():
    with closing(memlab.panel(faulty("error"), device="cpu")) as made:
        result = made.run(sharding="ddp", world_size=2)
        assert result.outcome == "failed"
        assert result.message.startswith("rank 1 of 2")
        assert "rank 1 of 2" in made._view._status.value


def test_stop_ends_all_ranks():
    with closing(memlab.panel(faulty("hang"), device="cpu")) as made:
        made.set(sharding="ddp", world_size=2, batch_size=4)
        made._run_pressed(typed=False)
        until(lambda: "measuring memory" in made._view._status.value)
        made._stop_clicked()
        until(lambda: made._page.job is None)
        assert made.result.outcome == "cancelled"
        assert "stopped" in made._view._status.value
    assert not left_running()
