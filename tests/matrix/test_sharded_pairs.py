"""Every strategy of sharding with every technique: equal updates in real ranks, or a refusal."""

import pytest

from benchmarks import sharded_combinations
from benchmarks.combinations import Kind
from benchmarks.ranks import Ranks
from benchmarks.sharded_combinations import PAGE, page, pairs, read, tried


@pytest.fixture(scope="module")
def ranks():
    """Ranks that all pairs of this file share."""
    found = Ranks()
    yield found
    found.end()


# two ranks, then four: starting either takes seconds
PAIRS = sorted(pairs(), key=lambda pair: sharded_combinations.STRATEGIES[pair[0]]["world_size"])


@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
def test_a_strategy_combines_with_a_technique_or_is_refused_by_name(pair, ranks):
    found = tried(*pair, ranks)
    assert found.kind is not Kind.WRONG, found.why
    written = PAGE.read_text(encoding="utf-8")
    row = next(line for line in written.splitlines() if line.startswith(f"| {pair[1]} |"))
    column = list(sharded_combinations.STRATEGIES).index(pair[0])
    cell = row.split("|")[2 + column].strip()
    is_there = f"- **{cell}** {found.why}" in written
    assert cell == str(found.kind) or (found.kind is Kind.REFUSED and is_there)


def test_rows_that_are_not_tried_again_stay_as_they_are_on_the_page():
    written = PAGE.read_text(encoding="utf-8")
    assert read(written).keys() == set(pairs())
    assert page(read(written)) == written
