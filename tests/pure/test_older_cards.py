"""Steps of cards before Ampere, as `benchmarks/older_cards.py` reads them and fits two factors."""

import json

import numpy as np
import pytest

from benchmarks import older_cards
from benchmarks.fit_times import OUT
from benchmarks.older_cards import FACTORS, Kernels
from memlab.cost_model import roofline
from memlab.cost_model.roofline import Ideal
from memlab.devices import cards

ROWS = older_cards.rows()


def test_rows_by_batch_are_what_further_samples_take():
    """921.516 ms of 12 texts and 569.39 ms of 6, the fewest that are at least half of them."""
    (bert,) = [row for row in ROWS if (row.card, row.model) == ("t4", "bert-base")]
    assert (bert.batch, bert.fewer) == (12, 6)
    assert bert.seconds == pytest.approx(0.921516 - 0.56939)
    assert {row.system for row in ROWS if row.fewer} == {*older_cards.OF_SIA}


def test_every_row_is_of_a_card_without_tf32_or_of_a_laptop():
    for row in ROWS:
        card = cards.resolve(row.card).card
        assert card.tf32_flops_per_second is None or "Laptop" in card.title
        assert 0 < row.seconds < 5


def test_the_time_of_kernels_is_that_of_each_kind_by_its_factor():
    """The first waits for its products, the second for memory: 2 x 0.5 x 3 and 4 x 7 seconds."""
    memory = roofline.table().groups["convolution"].memory
    ideal = Ideal(*np.array([(3.0, 1.0), (1.0, 7.0 / memory), (0.0, 0.0), (0.0, 0.0)]))
    groups = tuple(name.removesuffix(".compute") for name in FACTORS)
    kernels = Kernels(10.0, groups, np.array([2.0, 4.0]), ideal, 6, has_grouped=False)
    found = kernels.seconds(dict(zip(FACTORS, (0.5, 1.5), strict=True)))
    first = 2 * max(0.5 * 3, memory * 1.0)
    assert found == pytest.approx(10 + first + 4 * 7)


def test_what_is_written_names_its_cards_and_no_laptop():
    written = json.loads(OUT.read_text())
    of_rows = {row.card for row in ROWS if row.format == "fp32"}
    named = written["cards"]["convolutions"]
    assert {*named} <= of_rows
    assert not any(map(older_cards._is_laptop, named))
    for name in FACTORS:
        assert written["groups"][name.removesuffix(".compute")]["formats"] == ["float32"]
