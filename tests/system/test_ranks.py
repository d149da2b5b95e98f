"""Sharded steps in real ranks: what each holds, equal updates, ends that leave nothing behind."""

import dataclasses
import os
import re
import socket
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.ranks import Ranks
from memlab import Outcome, StepConfig, StepResult, measure, predict, verify
from memlab.runtime import isolation, rank_group
from memlab.runtime.measure import MOST_UNSEEN_BYTES
from memlab.runtime.rank_group import measure_ranks, together
from memlab.runtime.wire import Job
from tests.models import half_used, made_of
from tests.rank_parts import ODD, WIDTH, faulty, left_running, running, two_stacks

TWO = {"sharding": "zero3", "world_size": 2}
WEIGHTS = 3 * (WIDTH * WIDTH + WIDTH) * 4  # bytes of three linear layers


def test_each_rank_of_zero3_holds_its_half(monkeypatch):
    # a panel closed by a test before may still use the other one
    lane = isolation.Lane(is_predicting=False)
    monkeypatch.setattr(isolation, "measuring", lane)
    sharded = measure(faulty(), StepConfig(batch_size=4, **TWO), "cpu", repeats=1)
    worker = isolation.measuring.worker
    alone = measure(faulty(), StepConfig(batch_size=4), "cpu", repeats=1)
    assert isolation.measuring.worker is worker, "starting ranks has changed it"
    assert sharded.outcome is Outcome.OK, sharded.message
    assert [rank.rank_numbers for rank in sharded.ranks] == [(0,), (1,)]
    assert alone.peak_by_category["parameters"] == WEIGHTS

    num_tensors, step_bytes = 6, 4
    for rank in sharded.ranks:
        assert rank.outcome is Outcome.OK
        assert rank.peak_by_category["parameters"] == WEIGHTS // 2
        held = rank.timeline.bytes_of("optimizer_state")
        assert held.max() == WEIGHTS + num_tensors * step_bytes  # two numbers of each weight
        assert rank.samples_per_second == pytest.approx(4 / rank.step_seconds)

    highest = max(rank.peak_allocated_bytes for rank in sharded.ranks)
    assert sharded.peak_allocated_bytes == highest
    assert sharded.loss == pytest.approx(alone.loss, rel=1e-6)
    assert not left_running()
    worker.kill()


@pytest.mark.parametrize(
    ("fault", "outcome", "said"),
    [
        ("kill", Outcome.CRASHED, "rank 1 of 2 was ended by SIGKILL"),
        pytest.param("exit", Outcome.CRASHED, "rank 1 of 2 exited with 3", marks=pytest.mark.slow),
        pytest.param("error", Outcome.FAILED, "only here", marks=pytest.mark.slow),
        ("memory", Outcome.OUT_OF_MEMORY, "rank 1 of 2: out of memory in forward"),
    ],
)
@pytest.mark.slow
def test_a_rank_that_ends_ends_the_run_by_its_name(fault, outcome, said):
    result = measure(faulty(fault), StepConfig(batch_size=4, **TWO), "cpu", repeats=1)
    assert result.outcome is outcome
    assert said in result.message
    first, second = result.ranks
    assert second.outcome is outcome
    if outcome is Outcome.CRASHED and first.outcome is Outcome.FAILED:
        # its collective noticed before the launcher did
        assert re.search("[Cc]onnection|remote worker", first.message), first.message
    else:
        assert first.outcome is Outcome.CANCELLED
        assert "was stopped while measuring memory" in first.message
    assert not left_running()


def test_a_rank_that_is_gone_is_the_cause_whoever_notices_first():
    config = StepConfig(batch_size=4, **TWO)
    asked = {
        "source": "measured",
        "device": "cpu",
        "config": config,
        "workload_name": "faulty",
        "memory_limit_bytes": None,
    }
    lost, gone = (
        StepResult(**asked, outcome=outcome, message=message, rank_numbers=(rank,))
        for rank, (outcome, message) in enumerate(
            [
                (Outcome.FAILED, "rank 0 failed: connection closed by peer"),
                (Outcome.CRASHED, "rank 1 was ended by SIGKILL"),
            ]
        )
    )
    both = together([lost, gone], order=[0, 1])
    assert (both.outcome, both.ranks) == (Outcome.CRASHED, (lost, gone))
    assert both.message == "rank 1 of 2 was ended by SIGKILL"


@pytest.mark.slow
def test_a_port_in_use_does_no_harm(monkeypatch):
    """A notebook may have the variables of another job, and something else their port."""
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        others = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": 5, "RANK": 3}
        for name, value in others.items():
            monkeypatch.setenv(name, str(value))
        result = measure(faulty(), StepConfig(batch_size=4, **TWO), "cpu", repeats=1)
    assert result.outcome is Outcome.OK, result.message
    assert [rank.rank_numbers for rank in result.ranks] == [(0,), (1,)]


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_its_place(tmp_path, monkeypatch):
    sign, hour, moment = tmp_path / "hangs", 3600.0, 3.0
    since = []  # when the sign was first seen

    def clock():
        """An hour has passed a moment after a rank hangs, in which the other one comes to wait."""
        now = time.monotonic()
        if sign.exists():
            since.append(now)
        return now + hour if since and now > since[0] + moment else now

    monkeypatch.setattr(rank_group, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    job = Job(
        function="", arguments=b"", path=list(sys.path), folder=os.getcwd(),
        own_files={}, own_values={}, environment={}, threads=1,
    )  # fmt: skip
    result = measure_ranks(
        faulty("hang", sign), StepConfig(batch_size=4, **TWO), torch.device("cpu"), job=job,
        timeout_seconds=hour, report=lambda progress: None,
        repeats=1, warmup=0, seed=0, memory_limit=None,
    )  # fmt: skip
    assert result.outcome is Outcome.TIMED_OUT
    assert "rank 1 of 2 had not finished after 3600 s" in result.message
    assert "in wait_for_ever" in result.message
    assert "waited for another rank" in result.ranks[0].message
    assert not left_running()


@pytest.mark.slow
def test_a_step_of_ranks_ends_when_its_time_is_over():
    config = StepConfig(batch_size=4, **TWO)
    result = measure(faulty("hang"), config, "cpu", repeats=1, timeout_seconds=40)
    assert result.outcome is Outcome.TIMED_OUT
    assert "rank 1 of 2 had not finished after 40.0 s" in result.message
    assert not left_running()


@pytest.mark.slow
def test_a_rank_that_fails_while_it_is_timed_ends_the_others():
    calls = []

    def compute_loss(model, batch):
        calls.append(1)
        if len(calls) == 4 and torch.distributed.get_rank() == 1:  # of the memory pass are two
            raise ValueError("only later")
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    late = dataclasses.replace(faulty(), compute_loss=compute_loss)
    result = measure(late, StepConfig(batch_size=4, **TWO), "cpu")
    assert result.outcome is Outcome.FAILED
    assert "rank 1 of 2" in result.message
    assert "only later" in result.message
    assert result.peak_allocated_bytes is not None
    assert not left_running()


def test_more_ranks_than_this_machine_can_run_are_refused():
    config = StepConfig(batch_size=512, sharding="zero3", world_size=512)
    result = measure(faulty(), config, "cpu")
    assert result.outcome is Outcome.UNSUPPORTED
    assert "world_size=512" in result.message
    assert "memlab.predict" in result.message


# of ranks that these tests share, which are there from now on


@pytest.fixture(scope="module")
def ranks():
    started = Ranks()
    yield started
    started.end()


def test_ranks_that_run_are_seen(ranks):
    ranks.of(2)
    assert len(running()) == 2


def test_ddp_holds_everything_and_zero1_the_state_of_its_share(ranks):
    whole, share = (
        ranks.measured(faulty(), StepConfig(batch_size=4, sharding=name, world_size=2))
        for name in ("ddp", "zero1")
    )
    assert [r.peak_by_category["parameters"] for r in whole.ranks] == [WEIGHTS, WEIGHTS]
    # the buckets of gradients, which a forward makes
    assert all(r.peak_by_category["buffers"] >= WEIGHTS for r in whole.ranks)
    assert all(r.peak_by_category["activations"] < WEIGHTS for r in whole.ranks)
    state = [int(r.timeline.bytes_of("optimizer_state").max()) for r in whole.ranks]
    shares = [int(r.timeline.bytes_of("optimizer_state").max()) for r in share.ranks]
    assert state == [2 * WEIGHTS + 6 * 4] * 2
    assert sum(shares) == state[0]
    assert all(held < state[0] for held in shares)


def test_a_limit_is_that_of_each_rank(ranks):
    config = StepConfig(batch_size=4, **TWO)
    peak = ranks.measured(faulty(), config).peak_allocated_bytes
    over = ranks.measured(faulty(), config, memory_limit=peak // 2)
    assert over.outcome is Outcome.OUT_OF_MEMORY
    assert over.fits is False
    assert ranks.measured(faulty(), config, memory_limit=2 * peak).fits is True


@pytest.mark.parametrize("sharding", ["ddp", "zero3"])
def test_dropout_batch_norm_and_uneven_losses_train_as_in_one_process(sharding, ranks):
    config = StepConfig(batch_size=8, accumulation_steps=2, sharding=sharding, world_size=2)
    report = ranks.verified(ODD, config)
    assert report.ok, report.why
    assert report.same_as_full_batch == "no"
    assert "norm" in report.why


def test_every_stack_of_blocks_is_sharded_and_trains_as_in_one_process(ranks):
    config = StepConfig(batch_size=4, **TWO)
    measured, predicted = ranks.measured(two_stacks(), config), predict(two_stacks(), config, "cpu")
    assert abs(measured.peak_allocated_bytes - predicted.peak_allocated_bytes) < MOST_UNSEEN_BYTES
    report = ranks.verified(two_stacks(), config)
    assert report.max_relative_error < 1e-5
    # a device mesh, which torch.distributed keeps, is not worth a word
    assert not any("still held" in note for note in measured.notes)


def test_what_a_workload_keeps_is_said_of_ranks_too(ranks):
    kept = []

    def compute_loss(model, batch):
        kept.append(torch.zeros(1000))
        return model(batch[0]).square().mean()

    keeping = dataclasses.replace(faulty(), compute_loss=compute_loss)
    found = ranks.measured(keeping, StepConfig(batch_size=4, **TWO))
    assert any("still held" in note for note in found.notes), found.notes


@pytest.mark.parametrize("sharding", ["ddp", pytest.param("zero1", marks=pytest.mark.slow)])
def test_a_parameter_that_the_loss_does_not_use_is_refused_in_the_words_of_a_prediction(
    sharding, ranks
):
    config = StepConfig(batch_size=4, sharding=sharding, world_size=2)
    measured, predicted = ranks.measured(half_used(), config), predict(half_used(), config, "cpu")
    assert measured.outcome is predicted.outcome is Outcome.UNSUPPORTED
    assert "does not use the parameters 'idle.weight', 'idle.bias', and" in predicted.message
    first, said = measured.message.split(": ", 1)
    assert first in ("rank 0 of 2", "rank 1 of 2")  # both find it
    assert said == predicted.message


CLASSES = 6
OF_CLASSES = {
    "one unit": lambda: nn.Linear(4, CLASSES),
    "in a block": lambda: nn.Sequential(
        *(nn.Sequential(nn.Tanh(), nn.Linear(CLASSES, CLASSES)) for _ in range(3))
    ),
    "behind what is not trained": lambda: nn.Sequential(
        nn.Linear(CLASSES, 4).requires_grad_(False), nn.Linear(4, CLASSES)
    ),
}


@pytest.mark.parametrize("where", OF_CLASSES)
def test_a_head_that_only_the_loss_reads_is_still_whole_then(where, ranks):
    model = OF_CLASSES[where]()
    features = next(model.parameters()).shape[1]
    workload = made_of(
        OF_CLASSES[where],
        lambda n: (torch.randn(n, features), torch.randint(CLASSES, (n,))),
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )
    report = ranks.verified(workload, StepConfig(batch_size=8, loss_chunks=2, **TWO))
    assert report.ok, report.why


class Unread(nn.Module):
    """Has a head whose output nothing reads."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        self.head(x)
        return self.body(x)


def test_a_loss_in_chunks_that_no_rank_uses_is_refused(ranks):
    unread = made_of(Unread, (4,))
    result = ranks.measured(unread, StepConfig(batch_size=4, loss_chunks=2, **TWO))
    assert result.outcome is Outcome.UNSUPPORTED
    assert "the output of head" in result.message


class Routed(nn.Module):
    """Blocks, and experts of which each rank runs others, as its tokens ask for."""

    def __init__(self, experts):
        super().__init__()
        self.first, self.experts = nn.Linear(4, 4), nn.ModuleList()
        self.experts.extend(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.chosen = experts

    def forward(self, x):
        x = self.first(x)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        for expert in self.chosen[rank]:
            x = x + self.experts[expert](x)
        return x


@pytest.mark.parametrize("chosen", [((0,), (1,)), ((0,), (0, 1, 2))])
def test_ranks_that_run_other_experts_are_an_error(chosen, ranks):
    routed = made_of(lambda: Routed(chosen), (4,))
    result = ranks.measured(routed, StepConfig(batch_size=4, **TWO))
    assert result.outcome is Outcome.UNSUPPORTED
    assert "experts." in result.message
    assert "let every rank run every module" in result.message


class Differing(nn.Linear):
    """Computes something else in rank 1."""

    def forward(self, x):
        is_second = torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
        return super().forward(2 * x if is_second else x)


@pytest.mark.slow
def test_a_step_that_computes_something_else_in_one_rank_is_found():
    differing = made_of(lambda: nn.Sequential(Differing(4, 4), nn.Tanh()), (4,))
    report = verify(differing, StepConfig(batch_size=4, **TWO), "cpu")
    assert not report.ok
    assert report.max_relative_error > 0.01
