"""What saving allocates: against real ranks, bytes counted by hand, and lists of PyTorch."""

import dataclasses
import pickle

import pytest
import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_save_plan,
)

from benchmarks import saving_peak
from memlab import StepConfig, predict, training_step
from memlab.devices.cards import Target
from memlab.prediction.interpolation import interpolated
from memlab.prediction.predict import predict_in_process
from memlab.techniques import checkpoint_contents
from memlab.techniques.checkpoint_contents import SavedTensor, added_by_saving, saved_tensors
from tests.models import IN, OUT, blocks, linear

RANDOM = torch.get_rng_state().nbytes
WEIGHT = 4 * IN * OUT


def saved(name="w", shape=(64, 8), num_holders=1, **facts):
    own = {"own_shape": shape, "is_divided": False, "is_on_device": True, "is_view": False}
    return SavedTensor(
        name=name, shape=shape, dtype=torch.float32, num_holders=num_holders, **{**own, **facts}
    )


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_peak_is_that_of_real_ranks(world_size):
    rows = saving_peak.compared(world_size, ["plain-mlp"])
    assert len(rows) == len(saving_peak.STRATEGIES[world_size])
    for row in rows:
        # the lists of ranks that hold other states differ by kilobytes
        assert abs(row["error"]) < 0.003, row
        assert row["more than before"] >= RANDOM


def test_one_process_adds_the_state_of_the_random_generator():
    result = predict(linear(), StepConfig(batch_size=4, optimizer="sgd"), "cpu")
    batch = 4 * 4 * IN
    assert result.saving_peak_bytes == WEIGHT + batch + RANDOM
    assert result.saving_host_bytes is None
    assert "peak while saving" in result._repr_html_()


def test_another_batch_size_moves_the_peak_by_its_batch():
    cpu = Target(kind="cpu", card=None, name="cpu")
    made = {
        size: predict_in_process(
            linear(), StepConfig(batch_size=size), cpu, seed=0, memory_limit=None, report=print
        )
        for size in (8, 4)
    }
    few = interpolated(made[8], StepConfig(batch_size=4))
    assert few.saving_peak_bytes == made[4].result.saving_peak_bytes
    assert few.saving_peak_bytes == made[8].result.saving_peak_bytes - 4 * 4 * IN


def test_a_card_copies_weights_and_states_to_the_host():
    result = predict(linear(), StepConfig(batch_size=4), "t4")
    assert result.saving_host_bytes == 3 * WEIGHT + RANDOM
    assert result.timeline is not None
    assert result.saving_peak_bytes == result.timeline.total_bytes[-1]
    parts = predict(linear(), StepConfig(batch_size=4, sharding="zero3", world_size=2), "t4")
    assert parts.saving_host_bytes == 3 * WEIGHT // 2 + RANDOM


def test_what_ranks_hold_alike_one_of_them_copies():
    config = StepConfig(batch_size=8, sharding="ddp", world_size=2)
    result = predict(linear(), config, "t4")
    # three tensors of one size: one rank writes two of them
    assert result.saving_host_bytes == 2 * WEIGHT + RANDOM


def test_a_part_that_is_a_view_of_more_is_copied():
    config = StepConfig(batch_size=2, sharding="zero3", world_size=2)
    plain = saved(is_divided=True, own_shape=(32, 8))
    views = [dataclasses.replace(plain, is_view=True, name=f"{i}") for i in range(2)]
    # 4,000 rows would be counted in 32,000 bytes; both copies are larger than the lists
    large = [dataclasses.replace(each, shape=(400, 100), own_shape=(200, 100)) for each in views]
    added = added_by_saving(large, config, is_first=False, is_cpu=True)
    assert added.device_bytes == RANDOM + 2 * 4 * 200 * 100
    kept = added_by_saving([plain], config, is_first=False, is_cpu=True)
    assert kept.device_bytes < RANDOM + 10_000


def test_a_step_that_cannot_be_saved_has_no_peak():
    config = StepConfig(batch_size=4, offload_parameters=True)
    result = predict(blocks(), config, "t4")
    assert result.outcome == "ok"
    assert result.saving_peak_bytes is None
    assert result.saving_host_bytes is None


def test_rank_0_holds_the_lists_of_all_ranks():
    found = []
    for world_size in (64, 1024):
        config = StepConfig(batch_size=2 * world_size, sharding="zero3", world_size=world_size)
        result = predict(blocks(width=2048, depth=1), config, "h100")
        first = next(rank for rank in result.ranks if 0 in rank.rank_numbers)
        found.append(first.saving_peak_bytes - first.timeline.total_bytes[-1])
    assert found[1] == pytest.approx(16 * found[0], rel=0.1)


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_copies_are_shared_out_as_pytorch_does(num_ranks):
    sizes = [64, 8, 8, 300, 1, 70, 2, 2, 2, 65, 33, 90]
    tensors = [saved(f"w{i}", (n, 4), num_ranks) for i, n in enumerate(sizes)]
    planner = DefaultSavePlanner(flatten_state_dict=False)
    every = {tensor.name: torch.zeros(tensor.shape) for tensor in tensors}
    own = create_default_local_save_plan(every, is_coordinator=False)
    shares, _ = planner.create_global_plan([own] * num_ranks)
    longest = checkpoint_contents.most_written(tensors, num_ranks, len)
    assert len(longest) == max(len(plan.items) for plan in shares)
    by_name = {tensor.name: tensor.nbytes for tensor in tensors}

    def bytes_of(found):
        return sum(tensor.nbytes for tensor in found)

    heaviest = checkpoint_contents.most_written(tensors, num_ranks, bytes_of)
    written = [sum(by_name[line.index.fqn] for line in plan.items) for plan in shares]
    assert bytes_of(heaviest) == max(written)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_lists_are_as_large_as_those_of_pytorch(tmp_path, optimizer):
    config = StepConfig(batch_size=4, optimizer=optimizer)
    training = training_step(blocks(), config, "cpu")
    training(training._step.workload.make_batch(4))
    held = (*saved_tensors(training._step), checkpoint_contents.of_random_state())
    written = training.save(tmp_path) / ".metadata"
    # one process receives no names from others: each is written once
    assert checkpoint_contents.metadata_bytes(held, 1) == pytest.approx(
        written.stat().st_size, rel=0.1
    )

    every = {tensor.name: torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in held}
    planner = DefaultSavePlanner()
    planner.set_up_planner({**every, checkpoint_contents.PROGRESS: "one update"})
    plan = pickle.dumps(planner.create_local_plan())
    assert checkpoint_contents.plan_bytes(held) == pytest.approx(len(plan), rel=0.05)


class ReadsValues(torch.nn.Linear):
    """A layer that saves what it computes from values, as those of 4-bit weights do."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}sum"] = self.weight.sum().item()


def test_what_is_saved_may_depend_on_values_that_a_prediction_does_not_have():
    plain = linear()
    workload = dataclasses.replace(plain, build_model=lambda: ReadsValues(IN, OUT, bias=False))
    config = StepConfig(batch_size=4)
    result = predict(workload, config, "cpu")
    assert result.peak_allocated_bytes == predict(plain, config, "cpu").peak_allocated_bytes
    assert result.saving_peak_bytes is None
