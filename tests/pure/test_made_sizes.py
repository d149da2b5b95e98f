"""Workloads in other sizes are made one at a time, the one that is waited for first."""

import threading

import pytest
from torch import nn

from memlab import MemlabError, SampleSize, Workload
from memlab._panel.choices import CLOSED, MadeSizes
from tests.panel_parts import PATIENCE_SECONDS, until

SIZES = (1, 2, 3, 4, 5)


class Maker:
    """Makes sizes, each once it is allowed to, and notes them."""

    def __init__(self):
        self.begun, self.may = [], {size: threading.Event() for size in SIZES}

    def make(self, size):
        self.begun.append(size)
        self.may[size].wait(PATIENCE_SECONDS)
        if size == 5:
            raise SystemExit
        return self.workload(size)

    def workload(self, size):
        return Workload(
            name="sums",
            build_model=nn.Identity,
            make_batch=list,
            compute_loss=max,
            sample_size=SampleSize(
                name="size", unit="numbers", value=size, offered=SIZES, make_workload=self.make
            ),
        )


@pytest.fixture
def maker():
    made = Maker()
    made.may[1].set()  # its own size, which is made again to be compared
    yield made
    for event in made.may.values():
        event.set()


@pytest.fixture
def own(maker):
    return maker.workload(1)


@pytest.fixture
def sizes(own):
    arrived = []
    found = MadeSizes({own.name: own}, lambda: arrived.append(len(arrived)))
    found.arrivals = arrived
    yield found
    found.close()


def test_the_page_does_not_wait_and_hears_of_what_is_made(maker, own, sizes):
    assert sizes.look(own, 1) is sizes.look(own, None) is own
    assert sizes.look(own, 2) is None
    assert sizes.arrivals == []
    maker.may[2].set()
    until(lambda: sizes.arrivals == [0])
    assert sizes.look(own, 2).name == "sums, size 2"
    assert sizes.look(own, 2) is sizes.get(own, 2)
    assert maker.begun.count(2) == 1


def test_the_newest_comes_first_and_what_was_passed_over_is_not_made(maker, own, sizes):
    assert sizes.look(own, 2) is sizes.look(own, 3) is sizes.look(own, 4) is None
    for event in maker.may.values():
        event.set()
    until(lambda: sizes.look(own, 4) is not None)
    assert [size for size in maker.begun if size != 1] == [2, 4]


def test_neighbours_are_made_after_it_and_told_of_once(maker, own, sizes):
    for event in maker.may.values():
        event.set()
    assert sizes.get(own, 3).sample_size.value == 3
    assert [one.sample_size.value for one in sizes.made(own, (1, 2, 3, 4))] == [1, 3]
    until(lambda: len(sizes.made(own, (1, 2, 3, 4))) == 4)
    until(lambda: sizes.arrivals == [0])


def test_why_one_cannot_be_made_is_said_each_time(maker, own, sizes):
    maker.may[5].set()
    for _ in range(2):
        with pytest.raises(MemlabError, match="sums cannot be made in size 5: SystemExit"):
            sizes.get(own, 5)
    with pytest.raises(MemlabError, match="size=0 is below 1"):
        sizes.get(own, 0)
    assert sizes.made(own, (1, 5)) == [own]


def test_whoever_waits_hears_that_the_panel_was_closed(maker, own, sizes):
    said = []

    def wait():
        with pytest.raises(MemlabError) as caught:
            sizes.get(own, 2)
        said.append(str(caught.value))

    waiting = threading.Thread(target=wait)
    waiting.start()
    until(lambda: 2 in maker.begun)
    sizes.close()
    waiting.join(PATIENCE_SECONDS)
    assert said == [CLOSED]
