"""What a step takes on a card where there is room, and the least that it needs."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from memlab import StepConfig, Workload, evidence, predict, workloads
from memlab._util.units import MIB
from memlab.devices import cards
from memlab.memory.replay import AllocatorSettings, least_limit, replay, serves
from memlab.prediction.error_bounds import width_of_needed
from memlab.prediction.evidence import width_of
from memlab.prediction.predict import Prediction, predict_in_process
from memlab.result import CountedPeak, FitStatus
from tests.models import blocks, made_of

CARD = cards.find("rtx-3060")


def predicted(workload: Workload, **options: Any) -> Prediction:
    target = cards.Target(kind="cuda", card=CARD, name="rtx-3060")
    given: dict[str, Any] = {"seed": 0, "memory_limit": None, "report": lambda _: None, **options}
    return predict_in_process(workload, StepConfig(batch_size=32), target, **given)


@pytest.fixture(scope="module")
def of_convnet() -> Prediction:
    made = predicted(small_convnet())
    assert made.result.outcome == "ok", made.result.message
    return made


def small_convnet() -> Workload:
    def build() -> nn.Module:
        layers = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 64 * 64, 2))

    return made_of(build, lambda n: torch.zeros(n, 8, 64, 64))


def test_a_step_needs_no_more_than_it_takes(of_convnet: Prediction) -> None:
    result, size_model = of_convnet.result, of_convnet.size_model
    assert size_model is not None
    assert result.peak_reserved_bytes is not None
    assert result.needed_bytes is not None
    assert size_model.own.sum() > size_model.least.sum(), "the middle hypothesis takes a workspace"
    assert result.needed_bytes <= result.peak_reserved_bytes
    sizes = result.config.micro_batch_sizes
    assert size_model.runs_within(sizes, result.needed_bytes)
    assert not size_model.runs_within(sizes, int(0.95 * result.needed_bytes))


def test_its_widths_are_those_of_models_left_out(of_convnet: Prediction) -> None:
    widths = of_convnet.result.uncertainty
    assert widths is not None
    for number in ("peak_allocated_bytes", "peak_reserved_bytes"):
        assert widths[number] == width_of(number, ("convolutions",)).half_width
    assert widths["needed_bytes"] == width_of_needed()
    assert of_convnet.result.kernels == ("convolutions",)
    runs = width_of("peak_reserved_bytes", ("convolutions",)).runs
    assert any(f"{runs} runs" in note for note in of_convnet.result.notes)


def test_without_convolutions_what_is_taken_is_what_is_needed_but_for_the_cache() -> None:
    made = predicted(blocks())
    assert made.size_model is not None
    assert made.result.uncertainty is not None
    assert np.array_equal(made.size_model.own, made.size_model.least)
    width = width_of("peak_reserved_bytes", ()).half_width
    assert made.result.uncertainty["peak_reserved_bytes"] == width


@pytest.mark.parametrize(
    ("make", "config", "device", "kinds"),
    [
        (lambda: workloads.finetune(base="nf4"), {}, "rtx-4060", ("quantized weights",)),
        (lambda: workloads.get("gpt-small"), {"optimizer": "adamw-8bit"}, "rtx-4060", ()),
        (lambda: workloads.get("gpt-small"), {"sharding": "zero3", "world_size": 2},
         "2x-a100-40", ("several cards",)),
    ],
)  # fmt: skip
def test_the_kinds_of_its_kernels_are_those_that_ran(make, config, device, kinds):
    found = predict(make(), StepConfig(batch_size=4, **config), device, progress=False)
    assert found.kernels == kinds
    if kinds == ("quantized weights",):
        runs = evidence(found, "peak_allocated_bytes")
        assert {run.kernels for run in runs} == {kinds}


def test_a_limit_between_needed_and_taken_fits(of_convnet: Prediction) -> None:
    result, size_model = of_convnet.result, of_convnet.size_model
    assert size_model is not None
    assert result.needed_bytes is not None
    roomy = int(1.05 * result.needed_bytes)
    assert size_model.against_limit(result, roomy).fit is FitStatus.FITS
    assert result.against_limit(roomy).fit is FitStatus.FITS, "also without the forecast"
    tight = int(0.9 * result.needed_bytes)
    assert size_model.against_limit(result, tight).fit is FitStatus.DOES_NOT_FIT
    assert result.against_limit(tight).fit is FitStatus.DOES_NOT_FIT
    assert result.against_limit(result.needed_bytes).fit is FitStatus.TOO_CLOSE


def test_what_is_needed_is_judged_by_its_own_uncertainty() -> None:
    peak = CountedPeak(
        kind="reserved", nbytes=1000, uncertainty=0.1, needed_bytes=800, needed_uncertainty=0.02
    )
    said = {limit: (peak.fits(limit), peak.is_close_to(limit)) for limit in (830, 810, 790, 780)}
    assert said == {
        830: (True, False), 810: (True, True), 790: (False, True), 780: (False, False),
    }  # fmt: skip


def test_the_least_limit_is_found_and_was_tried() -> None:
    """A cached block of 30 MiB is too small for 40, so at a limit it is given back first."""
    address, nbytes = np.array([1, 2, 1, 3]), np.array([30, 20, -30, 40]) * MIB
    least = least_limit(address, nbytes, AllocatorSettings())
    assert replay(address, nbytes).peak_reserved_bytes == 90 * MIB
    assert 60 * MIB <= least < 60.5 * MIB
    assert serves(address, nbytes, AllocatorSettings(), least)
    assert not serves(address, nbytes, AllocatorSettings(), 60 * MIB - 1)


def test_a_block_that_shrinks_with_the_batch_never_gets_below_nothing(
    of_convnet: Prediction,
) -> None:
    size_model = of_convnet.size_model
    assert size_model is not None
    program = size_model.program
    own = size_model.least.copy()
    # a workspace that only the smaller of the two recorded sizes takes
    born_in_step_0 = program._births()[min(program.partners.values())]
    own[born_in_step_0] += 64 * MIB
    trace = program.trace(own, [10 * program.size])
    assert np.cumsum(trace.nbytes).min() >= 0
    replay(trace.address, trace.nbytes)


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("batch", [8, 16])
def test_small_steps_need_no_more_than_they_take_either(dim: int, batch: int) -> None:
    """The cache is given back before each step in both replays, which matters below 100 MiB."""
    make = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dim - 1]
    side = (4096, 64, 16)[dim - 1]
    workload = made_of(
        lambda: nn.Sequential(*[make(8, 8, 3, padding=1) for _ in range(3)]),
        lambda n: torch.zeros(n, 8, *[side] * dim),
        name="small",
    )
    target = cards.Target(kind="cuda", card=cards.find("p100"), name="p100")
    made = predict_in_process(
        workload, StepConfig(batch_size=batch), target,
        seed=0, memory_limit=None, report=lambda _: None,
    )  # fmt: skip
    assert made.result.needed_bytes is not None
    assert made.result.peak_reserved_bytes is not None
    assert made.result.needed_bytes <= made.result.peak_reserved_bytes


def test_what_was_found_for_the_memory_of_the_device_stays(of_convnet: Prediction) -> None:
    """Also for an interpolated result, of which nobody has searched what it needs."""
    result = of_convnet.result
    assert result.needed_bytes is not None
    usable = int(1.05 * result.needed_bytes)
    found = dataclasses.replace(
        result, needed_bytes=None, usable_memory_bytes=usable, fit=FitStatus.FITS,
        peak_reserved_bytes=2 * usable,
    )  # fmt: skip
    assert found.against_limit(usable).fit is FitStatus.FITS
    assert found.against_limit(usable - 1).fit is FitStatus.DOES_NOT_FIT
    close = dataclasses.replace(found, fit=FitStatus.TOO_CLOSE)
    assert close.against_limit(usable).fit is FitStatus.TOO_CLOSE
