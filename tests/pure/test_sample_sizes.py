"""A workload in another size: its name, what it trains, which sizes are offered and refused."""

import dataclasses
import pickle
from functools import partial

import cloudpickle
import pytest
import torch

from memlab import MemlabError, SampleSize, StepConfig, Workload, workloads
from memlab._panel import texts
from memlab.workloads import SPECS

SIZED = [
    name
    for name in workloads.names()
    if {"sequence_length", "image_size"} & {field.name for field in dataclasses.fields(SPECS[name])}
]
FIELDS = {
    "name": "length", "unit": "numbers", "value": 8, "offered": (8, 16),
    "make_workload": lambda size: own(size),
}  # fmt: skip


def own(length=8, **changes):
    return Workload(
        name="mean",
        build_model=lambda: torch.nn.Linear(length, 1),
        make_batch=lambda n: torch.ones(n, length),
        compute_loss=lambda model, batch: model(batch).mean(),
        sample_size=SampleSize(**{**FIELDS, "value": length, **changes}),
    )


def test_a_resized_workload_says_its_size_in_its_name_and_trains_samples_of_it():
    workload = own().resized(32)
    assert (workload.name, workload.base_name) == ("mean, length 32", "mean")
    assert workload.make_batch(3).shape == (3, 32)
    assert workload.compute_loss(workload.build_model(), workload.make_batch(3)).ndim == 0
    assert workload.sample_size == dataclasses.replace(own().sample_size, value=32)
    again = workload.resized(16)
    assert (again.name, again.make_batch(1).shape) == ("mean, length 16", (1, 16))
    named = dataclasses.replace(own(), name="mean, length 4")  # which no size was added to
    assert named.base_name == "mean, length 4"
    assert dataclasses.replace(named, sample_size=None).base_name == "mean, length 4"


def other_loss(model, batch):
    return model(batch).square().sum()


@pytest.mark.parametrize(
    ("workload", "changes", "field"),
    [
        (workloads.get("gpt-small"), {"compute_loss": other_loss}, "compute_loss"),
        (workloads.get("gpt-small"), {"count_samples": len}, "count_samples"),
        (
            workloads.get("gpt-small"),
            {"build_model": workloads.get("gpt-small", num_layers=2).build_model},
            "build_model",
        ),
        (own(), {"build_model": lambda: torch.nn.Linear(8, 2)}, "build_model"),
        (own(), {"build_model": torch.nn.Identity}, "build_model"),
        (own(), {"make_batch": partial(torch.ones, 3)}, "make_batch"),
    ],
)
def test_a_workload_with_another_function_is_not_resized_to_the_one_without(
    workload, changes, field
):
    changed = dataclasses.replace(workload, name="mine", **changes)
    with pytest.raises(MemlabError, match=f"mine cannot be made in other .* another {field}; pass"):
        changed.resized(16)

    assert dataclasses.replace(workload, name="mine").resized(16).sample_size.value == 16


class Line:
    """Makes the functions of a workload as its methods, without an __eq__."""

    def __init__(self, length):
        self.length = length

    def build(self, num_outputs):
        return torch.nn.Linear(self.length, num_outputs)

    def make_batch(self, n):
        return torch.ones(n, self.length)

    @classmethod
    def workload(cls, length):
        line = cls(length)
        made = dataclasses.replace(own(length, make_workload=cls.workload), name="line")
        return dataclasses.replace(
            made,
            build_model=partial(line.build, num_outputs=1),
            make_batch=line.make_batch,
            compute_loss=Mean(),
        )


class Mean:
    """A loss that is an object."""

    def __call__(self, model, batch):
        return model(batch).mean()


def test_functions_that_each_call_of_the_maker_makes_anew_are_the_same():
    assert Line.workload(8).resized(16).make_batch(1).shape == (1, 16)


def failing(size):
    raise KeyError(f"no table of {size}")


@pytest.mark.parametrize(
    ("workload", "size", "said"),
    [
        (own(), 0, "length=0 is below 1; allowed is an int of at least 1"),
        (own(), "long", "length='long' is not a whole number"),
        (own(), True, "length=True is not a whole number"),
        (own(make_workload=failing), 3, "mean cannot be made with length 3: KeyError: 'no table"),
        (own(make_workload=lambda size: size), 3, r"make_workload\(length 3\) returned 3, which"),
        (dataclasses.replace(own(), sample_size=None), 3, "mean has samples of one size only"),
    ],
)
def test_a_size_that_cannot_be_is_an_error_that_says_why(workload, size, said):
    with pytest.raises(MemlabError, match=said):
        workload.resized(size)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("name", 3, "name=3 is not text"),
        ("name", "", "name='' is empty"),
        ("unit", "", "unit='' is empty"),
        ("value", 0, "value=0 is below 1"),
        ("value", 1.5, "value=1.5 is not a whole number"),
        ("offered", (16, 8), r"offered=\(16, 8\); allowed are at least two sizes"),
        ("offered", (8,), r"offered=\(8,\); allowed are at least two sizes"),
        ("offered", (0, 8), r"offered=\(0, 8\); allowed are at least two sizes of at least 1"),
        ("offered", "8, 16", "offered='8, 16' is not a list"),
        ("make_workload", None, "make_workload=None cannot be called"),
        ("dimensions", 4, "dimensions=4 is above 3"),
    ],
)
def test_every_field_is_checked(field, value, said):
    with pytest.raises(MemlabError, match=said):
        SampleSize(**{**FIELDS, field: value})
    with pytest.raises(MemlabError, match="sample_size=128 is not a SampleSize"):
        dataclasses.replace(own(), sample_size=128)


# the zoo


@pytest.mark.parametrize("name", SIZED)
def test_every_spec_with_a_length_or_an_image_size_offers_sizes_that_it_can_have(name):
    workload = workloads.get(name)
    size = workload.sample_size
    assert size.value in size.offered
    assert len(size.offered) >= 5
    sent = pickle.loads(cloudpickle.dumps(workload))
    for value in size.offered:
        other = sent.resized(value)
        assert other.make_batch(1)[0].shape[-size.dimensions :] == (value,) * size.dimensions


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt-small", {"num_layers": 1}),
        ("vit-digits", {"num_layers": 1}),
        ("resnet-digits", {"depths": (1, 1, 1, 1)}),
        ("densenet-digits", {}),
        ("lstm-text", {"hidden_size": 16}),
    ],
)
def test_the_smallest_and_the_largest_offered_size_can_be_trained(name, options):
    workload = workloads.get(name, **options)
    for value in (workload.sample_size.offered[0], workload.sample_size.offered[-1]):
        other = workload.resized(value)
        loss = other.compute_loss(other.build_model(), other.make_batch(2))
        assert loss.isfinite()


def test_other_options_are_kept_and_get_keeps_its_name():
    workload = workloads.get("gpt-small", num_layers=2, sequence_length=48)
    assert workload.name == "gpt-small"
    assert workload.sample_size.offered == (8, 16, 32, 48, 64, 128, 256)
    other = workload.resized(64)
    assert other.build_model.__self__ == dataclasses.replace(
        SPECS["gpt-small"], num_layers=2, sequence_length=64
    )
    assert len(other.build_model().transformer.wpe.weight) == 64


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("gpt-small", 10**6, "sequence_length=1000000 is longer than the text; allowed is an int"),
        ("vit-digits", 33, "image_size=33 is not a multiple of 4.* for instance 32 or 36"),
        ("vit-digits", 2, "image_size=2 is below 4, the smallest"),
        ("densenet-digits", 16, "image_size=16 is below 32, the smallest"),
        ("resnet-50", 10**9, "image_size=1000000000 is above 10000000"),
    ],
)
def test_a_size_that_a_model_or_its_data_cannot_have_is_refused(name, size, said):
    with pytest.raises(MemlabError, match=said):
        workloads.get(name).resized(size)


# the line beside the panel's slider


@pytest.mark.parametrize(
    ("changes", "config", "said"),
    [
        ({}, StepConfig(), "8 samples of 256 tokens: 2,048 tokens in each micro-batch"),
        ({}, StepConfig(batch_size=1), "1 sample of 256 tokens: 256 tokens in each micro-batch"),
        (
            {"value": 1024},
            StepConfig(batch_size=6, accumulation_steps=4),
            "2 samples of 1,024 tokens: 2,048 tokens in the largest micro-batch",
        ),
        (
            {"unit": "pixels", "value": 64, "dimensions": 2},
            StepConfig(),
            "8 samples of 64 x 64 pixels: 32,768 pixels in each micro-batch",
        ),
        ({}, None, "256 tokens in each sample"),
    ],
)
def test_the_size_of_a_sample_is_counted_in_a_micro_batch(changes, config, said):
    text = {"name": "sequence length", "unit": "tokens", "value": 256}
    size = SampleSize(**{**FIELDS, **text, **changes})
    assert texts.size_line(size, config).text == said
