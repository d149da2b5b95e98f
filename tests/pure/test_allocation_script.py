"""Stories of the caching allocator by hand; tracebacks that hold tensors, really run."""

import pytest
import torch
from torch import nn

from memlab import StepConfig, Workload, measure, replay_allocations
from memlab._util.units import MIB
from memlab.errors import ConfigError

GROWING = [line for n in (12, 16, 20, 24) for line in (f"x{n} = {n} MiB", f"del x{n}")]


def mib(moments, name):
    return [getattr(moment, name) // MIB for moment in moments]


def test_growing_requests_leave_every_segment_behind():
    moments = replay_allocations([*GROWING, "empty_cache()"])
    assert mib(moments, "allocated_bytes") == [12, 0, 16, 0, 20, 0, 24, 0, 0]
    assert mib(moments, "reserved_bytes") == [12, 12, 28, 28, 48, 48, 72, 72, 0]
    assert mib(moments, "releasable_bytes")[-2:] == [72, 0]


def test_pages_serve_growing_requests_with_what_the_largest_takes():
    moments = replay_allocations(GROWING, expandable_segments=True)
    assert mib(moments, "reserved_bytes")[-1] == 40  # two pages of 20 MiB
    assert mib(moments, "allocated_bytes") == mib(replay_allocations(GROWING), "allocated_bytes")


def test_one_block_keeps_its_segment_from_being_given_back():
    blocks = [f"x{n} = 4 MiB" for n in range(10)]  # five to a segment of 20 MiB
    freed = [f"del x{n}" for n in range(10) if n % 5]
    last = replay_allocations([*blocks, *freed, "empty_cache()"])[-1]
    assert (last.allocated_bytes, last.reserved_bytes) == (8 * MIB, 40 * MIB)
    assert (last.releasable_bytes, last.non_releasable_bytes) == (0, 32 * MIB)


@pytest.mark.parametrize("line", ["free a", "del b", "= 3 MiB", "a"])
def test_another_line_is_refused(line):
    with pytest.raises(ConfigError, match="allowed are 'a = 12 MiB'"):
        replay_allocations(["a = 1 MiB", line])


def held_by(keep):
    """Return what is held after a run whose loss fails and is caught, and kept in some form."""
    kept = []

    def compute_loss(model, x):
        try:
            hidden = model[0](x)
            raise ValueError(f"no loss of {tuple(hidden.shape)}")
        except ValueError as error:
            kept.append(keep(error))
        return model(x).square().mean()

    workload = Workload(
        name="caught",
        build_model=lambda: nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 1)),
        make_batch=lambda n: torch.ones(n, 64),
        compute_loss=compute_loss,
    )
    found = measure(workload, StepConfig(batch_size=1024, optimizer="sgd"), "cpu", repeats=1)
    assert found.outcome == "ok", found.message
    return found, [note for note in found.notes if "still held" in note]


@pytest.mark.slow
def test_a_kept_error_holds_the_tensors_of_its_frames():
    leaking, said = held_by(lambda error: error)
    clean, nothing = held_by(str)
    assert said
    assert not nothing
    # the hidden layer of a step, (1024, 256) float32, that the caught error's frame names
    assert leaking.peak_allocated_bytes >= clean.peak_allocated_bytes + 1024 * 256 * 4
