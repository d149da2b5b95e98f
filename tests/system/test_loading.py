"""Data loading: what is counted by hand, dead workers, and what is refused."""

import mmap
import os
import signal
import time

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from memlab import LoadingConfig, MemlabError, StepConfig, measure_loading
from memlab._util.units import MIB
from memlab.runtime import loading as measuring
from memlab.runtime.isolation import run_here
from memlab.runtime.loading import private_bytes, resident_bytes
from memlab.workloads import JpegDigits
from tests.models import made_of

CONFIG = StepConfig(batch_size=4, optimizer="sgd")


class Numbers(Dataset):
    """64 numbers in a sample, the first of which is its index; slow if one likes."""

    def __init__(self, seconds=0.0, fail=None):
        self.seconds, self.fail = seconds, fail

    def __len__(self):
        return 16

    def __getitem__(self, index):
        time.sleep(self.seconds)
        if self.fail is not None:
            self.fail()
        return torch.full((64,), float(index))


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise ValueError("no such picture")


def workload(seen=None):
    def compute_loss(model, batch):
        if seen is not None:
            seen.append(batch[:, 0].tolist())
        return model(batch).square().mean()

    return made_of(
        lambda: nn.Linear(64, 1), lambda n: torch.zeros(n, 64), compute_loss, name="numbers"
    )


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_slow_dataset_is_waited_for_and_workers_share_the_wait(num_workers):
    loading = LoadingConfig(num_workers=num_workers)
    found = measure_loading(workload(), CONFIG, Numbers(0.1), loading, "cpu", num_steps=4)
    assert found.outcome == "ok", found.message
    assert found.waiting_fraction > 0.5  # 400 ms a batch; a step of less than one
    assert found.step_seconds > found.step_alone_seconds
    assert found.batch_bytes == 4 * 64 * 4
    assert found.queued_bytes == num_workers * 2 * found.batch_bytes
    assert found.main_resident_bytes > 50 * MIB  # torch itself
    if num_workers:
        assert found.workers_resident_bytes > found.workers_private_bytes > 0
    else:
        assert found.workers_private_bytes == 0


def test_the_steps_take_the_samples_of_the_dataset_in_the_seeded_order():
    def seen(num_workers):
        batches = []
        arguments = {
            "workload": workload(batches), "config": CONFIG, "dataset": Numbers(),
            "loading": LoadingConfig(num_workers=num_workers), "device": torch.device("cpu"),
            "num_steps": 3, "seed": 5,
        }  # fmt: skip
        found = run_here("loading", arguments, timeout_seconds=600)
        assert found.outcome == "ok", found.message
        return batches

    here, by_workers = seen(0), seen(2)
    assert here == by_workers
    assert all(batch == here[0] for batch in here[:4])  # alone: a first step, then three
    assert len({tuple(batch) for batch in here[4:]}) == 4  # then one batch after another
    assert len(here) == 8


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_that_fails_is_an_outcome_with_a_sentence(num_workers):
    loading = LoadingConfig(num_workers=num_workers)
    found = measure_loading(workload(), CONFIG, Numbers(fail=fail), loading, "cpu")
    assert found.outcome == "failed"
    assert "ValueError: no such picture" in found.message
    assert ("in a loader worker" in found.message) == bool(num_workers)


@pytest.mark.slow
def test_workers_that_die_are_an_outcome_and_the_next_run_works():
    loading = LoadingConfig(num_workers=2)
    found = measure_loading(workload(), CONFIG, Numbers(fail=die), loading, "cpu")
    assert found.outcome == "crashed", found.message
    assert "a loader worker died" in found.message
    assert "lower num_workers" in found.message
    assert measure_loading(workload(), CONFIG, Numbers(), device="cpu").outcome == "ok"


def test_what_cannot_be_is_refused_with_a_remedy():
    for fields, said in (
        ({"num_workers": -1}, "num_workers=-1 is below 0; allowed is an int of at least 0"),
        ({"prefetch_factor": 4}, "does nothing with num_workers=0; add num_workers=2"),
        ({"num_workers": 2, "prefetch_factor": 0}, "prefetch_factor=0 is below 1; allowed"),
        ({"non_blocking": True}, "add pin_memory=True"),
        ({"pin_memory": 1}, "pin_memory=1 is not a bool; allowed is True or False"),
    ):
        with pytest.raises(MemlabError, match=said):
            LoadingConfig(**fields)
    with pytest.raises(MemlabError, match="not map-style"):
        measure_loading(workload(), CONFIG, iter([]))
    with pytest.raises(MemlabError, match="not a LoadingConfig"):
        measure_loading(workload(), CONFIG, Numbers(), {"num_workers": 2})
    pinned = LoadingConfig(pin_memory=True)
    found = measure_loading(workload(), CONFIG, Numbers(), pinned, "cpu")
    assert found.outcome == "unsupported"
    assert "use pin_memory=False" in found.message


class Uncounted(Numbers):
    def __len__(self):
        raise TypeError("no length")


class Empty(Numbers):
    def __len__(self):
        return 0


@pytest.mark.parametrize(
    ("dataset", "said"),
    [(Uncounted(), "its __len__ raised TypeError: no length"), (Empty(), "has no samples")],
)
def test_a_dataset_that_cannot_be_counted_raises_in_the_caller(dataset, said):
    with pytest.raises(MemlabError, match=said):
        measure_loading(workload(), CONFIG, dataset)


def test_all_lines_of_what_a_worker_raised_are_told():
    raised = """Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "a.py", line 1, in f
    g()
ValueError: first
second"""
    assert "worker: ValueError: first second; try" in measuring._explain(RuntimeError(raised))[1]


def test_a_jpeg_is_decoded_to_the_digit_that_it_shows():
    digits = JpegDigits(image_size=8, file_size=64, num_files=20)
    image, label = digits[0]
    assert image.shape == (1, 8, 8)
    assert label == 0
    assert image[0, 3, 4] < 0.3 < 0.5 < image[0, 3, 2]  # a nought: empty inside
    assert digits.files[0][:2] == b"\xff\xd8"  # what a JPEG file begins with
    assert JpegDigits(16, num_channels=3, num_files=2)[1][0].shape == (3, 16, 16)
    assert len(digits) == 20


def test_resident_memory_grows_by_what_is_written():
    before = resident_bytes(), private_bytes()
    if before[0] is None:
        pytest.skip("needs Linux's /proc")
    held = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # no old memory
    for _ in range(64):
        held.write(bytes(MIB))
    after = resident_bytes(), private_bytes()
    for low, high in zip(before, after, strict=True):
        assert 60 * MIB < high - low < 80 * MIB
    assert len(held)
    assert resident_bytes(2**22 + 1) is None  # no such process
