"""The lengths of an imported trainer's samples, against the data set and against real trainers."""

import dataclasses

import pytest
import torch

import memlab
from memlab import MemlabError, StepConfig
from memlab.integrations.transformers_workload import MOST_READ
from tests.import_parts import needs_trainer, texts, tiny, trainer_of, trl_trainer_of

CARD = "t4"
CONFIG = StepConfig(batch_size=4)


def llama():
    return tiny("llama", needs_trainer())


def said(imported):
    return next(each.why for each in imported.fields if each.name == "trainer.train_dataset")


def of_length(length, num=8):
    """Return samples of a language model that are all as long."""
    drawn = torch.randint(50, (num, length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row.clone()} for row in drawn]


@pytest.mark.slow
def test_lengths_and_sizes_of_an_sft_trainer(tmp_path):
    trainer = trl_trainer_of(tmp_path, llama(), "SFTTrainer")
    workload = memlab.from_trainer(trainer).workload
    own = [len(sample["input_ids"]) for sample in trainer.train_dataset]
    assert workload.lengths == tuple(own)
    assert (workload.sample_size.value, workload.sample_size.varies) == (max(own), True)
    assert workload.make_batch(4)["input_ids"].shape == (4, max(own[:4]))  # as the Trainer has it

    for length in (5, max(own), 20):
        sized = workload.resized(length)
        batch = sized.make_batch(3)
        assert batch["input_ids"].shape == batch["labels"].shape == (3, length)
        assert sized.name == f"{workload.name}, sequence length {length}"
    found = memlab.predict_lengths(workload, None, CONFIG, CARD)
    assert found.data.lengths.tolist() == sorted(own)


@pytest.mark.slow
def test_another_length_costs_what_a_trainer_over_such_samples_takes(tmp_path):
    def imported(samples):
        return memlab.from_trainer(trainer_of(tmp_path, llama(), samples)).workload

    workload, other = imported(texts()), imported(of_length(30))
    assert (workload.sample_size.value, workload.sample_size.varies) == (12, False)
    peaks = [
        memlab.predict(one, CONFIG, CARD).peak_allocated_bytes
        for one in (workload, workload.resized(30), other, other.resized(12))
    ]
    assert peaks[1] == peaks[2] > peaks[0] == peaks[3]
    with pytest.raises(MemlabError, match="max_position_embeddings=2048; allowed are 1 to 2048"):
        workload.resized(2049)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"packing": True, "max_length": 24}, "the data set is packed"),
        ({"padding_free": True, "max_length": None}, "a batch joins them"),
    ],
)
def test_joined_samples_have_no_other_length_which_is_said(tmp_path, settings, words):
    imported = memlab.from_trainer(trl_trainer_of(tmp_path, llama(), "SFTTrainer", **settings))
    assert imported.workload.sample_size is None
    assert words in said(imported)


def test_a_table_is_read_up_to_a_bound_which_is_said(tmp_path):
    datasets = pytest.importorskip("datasets")
    num = 2 * MOST_READ + 1
    table = datasets.Dataset.from_dict({
        "input_ids": [[1, 2, 3]] * num, "labels": [[1, 2, 3]] * num,
        "length": [3 + i % 2 for i in range(num)],
    })  # fmt: skip
    imported = memlab.from_trainer(trainer_of(tmp_path, llama(), table))
    assert len(imported.workload.lengths) == MOST_READ
    assert set(imported.workload.lengths) == {3, 4}
    assert f"{MOST_READ:,} samples of {num:,}, by column 'length'" in said(imported)


class Partial(torch.utils.data.Dataset):
    """Only the first 64 samples can be read."""

    def __len__(self):
        return 100

    def __getitem__(self, at):
        if at >= 64:
            raise OSError("the network is down")
        return of_length(12, 1)[0]


def fixed_width(samples):
    rows = torch.stack([torch.nn.functional.pad(s["input_ids"], (0, 32))[:32] for s in samples])
    return {"input_ids": rows, "labels": rows.clone()}


def picky(samples):
    if len(samples[0]["input_ids"]) != 12:
        raise ValueError("expected 12 tokens")
    return {name: torch.stack([s[name] for s in samples]) for name in ("input_ids", "labels")}


def test_what_cannot_be_read_or_collated_is_named(tmp_path):
    imported = memlab.from_trainer(trainer_of(tmp_path, llama(), Partial()))
    assert imported.workload.lengths == (12,) * 64
    assert "Partial cannot give the others: OSError: the network is down" in said(imported)

    for collator, words in (
        (fixed_width, "makes rows of 32 tokens of shorter samples too"),
        (picky, "cannot make a batch of samples of 6 tokens (ValueError: expected 12 tokens)"),
    ):
        trainer = trainer_of(tmp_path, llama(), texts(), data_collator=collator)
        imported = memlab.from_trainer(trainer)
        assert imported.workload.sample_size is None
        assert words in said(imported)


def test_a_workload_whose_samples_vary_may_have_batches_that_no_size_gives(tmp_path):
    trainer = trl_trainer_of(tmp_path, llama(), "SFTTrainer")
    workload = memlab.from_trainer(trainer).workload
    even = dataclasses.replace(workload.sample_size, varies=False)
    with pytest.raises(MemlabError, match="gives another make_batch"):
        dataclasses.replace(workload, sample_size=even).resized(5)
