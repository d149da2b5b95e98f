"""Lengths of samples: what is read, and the batches they make, against all batches there are."""

import itertools
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import memlab
from memlab.errors import ConfigError
from memlab.search.length_curve import Distribution, batchings, packed_rows, truncation
from tests.models import linear

LENGTHS = [5, 3, 3, 9, 1, 5, 12]


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_the_longest_of_a_batch_is_that_of_all_batches_that_can_be_drawn(size):
    data = Distribution.of(LENGTHS)
    longest = [max(batch) for batch in itertools.combinations(LENGTHS, size)]
    assert data.expected_longest(size) == pytest.approx(statistics.mean(longest))
    assert data.median_longest(size) == statistics.median_low(longest)
    for length in range(14):
        share = sum(each > length for each in longest) / len(longest)
        assert data.chance_above(length, size) == pytest.approx(share, abs=1e-12)


def test_padding_is_that_of_each_micro_batch():
    padded, grouped, packed = batchings(Distribution.of([2, 2, 4, 4]), (1, 1), 3)
    # of a single sample nothing is padding; the mean sample has 3 tokens
    assert (padded.tokens_per_batch, padded.padding_fraction) == (6.0, 0.0)
    # a batch is one of 6 pairs, of which only the pair of 2 and 2 fits 3
    assert padded.chance_above == pytest.approx(5 / 6)
    assert padded.typical_longest == 4
    assert (grouped.num_batches, grouped.chance_above) == (2, 0.5)
    # three rows of 4: 4, 4 and 2 + 2
    assert (packed.num_batches, packed.tokens_per_batch, packed.padding_fraction) == (2, 6.0, 0.0)
    assert packed.chance_above == 1.0


def test_padding_of_pairs_by_hand():
    padded, grouped, packed = batchings(Distribution.of([2, 2, 4, 4]), (2,), None)
    # the longest of the 6 pairs are 2, 4, 4, 4, 4, 4: on average 22 / 6
    assert padded.tokens_per_batch == pytest.approx(44 / 6)
    assert padded.padding_fraction == pytest.approx(1 - 6 / (44 / 6))
    assert (grouped.tokens_per_batch, grouped.padding_fraction) == (6.0, 0.0)
    assert (grouped.typical_longest, packed.typical_longest) == (2, 4)
    assert [each.chance_above for each in (padded, grouped, packed)] == [None, None, None]
    # a last batch of fewer samples is grouped too: 1 and 2 as 2, 3 alone; then 4 and 5 as 5
    grouped = batchings(Distribution.of([1, 2, 3, 4, 5]), (2, 1), None)[1]
    assert grouped.num_batches == 2
    assert grouped.tokens_per_batch == (2 * 2 + 3 + 2 * 5) / 2
    assert grouped.padding_fraction == pytest.approx(1 - 15 / 17)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60))
def test_samples_of_one_length_are_packed_as_one_by_one(lengths):
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else max(lengths)) - length)
    assert packed_rows(Distribution.of(lengths)) == len(rooms)


def test_truncation_counts_what_is_lost():
    cut = truncation(Distribution.of([2, 4, 10]), 4)
    assert (cut.num_samples_cut, cut.samples_cut_fraction) == (1, pytest.approx(1 / 3))
    assert cut.tokens_cut_fraction == pytest.approx(6 / 16)


@pytest.mark.parametrize(
    "given",
    [
        (3, 1), [3, 1], np.array([3, 1]), torch.tensor([3, 1]), iter([3, np.int32(1)]),
        [torch.tensor(3), np.array(1)],
    ],
)  # fmt: skip
def test_a_workload_gives_its_lengths_in_any_list(given):
    assert linear(lengths=given).lengths == (3, 1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "lengths is empty; pass one int for each sample"),
        ([3, 0], "lengths[1]=0 is below 1"),
        ([3, 1.5], "lengths[1]=1.5 is not a whole number"),
        ([True], "lengths[0]=True is not a whole number"),
        ([torch.tensor(True)], "lengths[0]=True is not a whole number"),
        ([torch.tensor(2.0)], "lengths[0]=2.0 is not a whole number"),
        (np.array([[1, 2]]), "lengths[0]=[1, 2] is not a whole number"),
        ("12", "lengths='12' is no list of lengths"),
        (7, "lengths=7 is no list of lengths"),
    ],
)
def test_what_is_no_length_is_named(given, said):
    with pytest.raises(memlab.MemlabError, match="lengths") as raised:
        linear(lengths=given)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("texts", "tokenizer", "said"),
    [
        (["a", ""], str.split, "texts[1]='' has no tokens; leave it out"),
        (["a"], len, "gives no tokens for texts[0] (TypeError"),
        (["a"], lambda text: {"ids": [1]}, "gives no tokens for texts[0]"),
        ("a text", str.split, "texts='a text' is not a list"),
    ],
)
def test_tokens_are_counted_and_texts_without_any_are_named(texts, tokenizer, said):
    assert memlab.workloads.lengths_of(["to be", "or not"], str.split) == (2, 2)
    assert memlab.workloads.lengths_of(
        ["abc"], lambda text: {"input_ids": [*text], "mask": []}
    ) == (3,)
    with pytest.raises(ConfigError) as raised:
        memlab.workloads.lengths_of(texts, tokenizer)
    assert said in str(raised.value)
