"""DeepSpeed's engine in real ranks: what each holds, and updates equal to those of one process."""

import functools

import pytest
import torch
from torch import nn

from memlab import Outcome, StepConfig, Workload, measure, verify
from tests.rank_parts import ODD, left_running, trained

# above 100,000 values, below which stage 3 leaves a parameter whole; no bias, as these are small
WIDTH = 320
NUM_WEIGHTS = 2 * WIDTH * WIDTH
BYTES = 4


def wide():
    """Two blocks whose weights are divided over ranks without a rest."""
    return Workload(
        name="wide",
        build_model=lambda: nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(2))
        ),
        make_batch=lambda n: (torch.randn(n, WIDTH), torch.randn(n, WIDTH)),
        compute_loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    )


def config(stage, **fields):
    own = {"batch_size": 4, "sharding": f"deepspeed-zero{stage}", "world_size": 2}
    return StepConfig(**(own | fields))


@functools.cache
def loss_of_one_process():
    return measure(wide(), StepConfig(batch_size=4), "cpu", repeats=1).loss


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_rank_holds_its_share(stage):
    result = measure(wide(), config(stage), "cpu", repeats=1)
    assert result.outcome is Outcome.OK, result.message
    assert not any("still held" in note for note in result.notes)
    assert not result.printed
    whole, half = NUM_WEIGHTS * BYTES, NUM_WEIGHTS * BYTES // 2
    for rank in result.ranks:
        parameters = half if stage == 3 else whole
        assert rank.timeline.bytes_of("parameters").max() == parameters
        # an fp32 copy, two numbers of Adam for each weight, and the counter of updates
        state = rank.timeline.bytes_of("optimizer_state")
        assert 3 * half + BYTES <= state.max() < 3 * half + 100
    assert result.loss == pytest.approx(loss_of_one_process(), rel=1e-6)
    assert not left_running()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "fields"),
    [
        (1, {"accumulation_steps": 2, "sync_each_micro_batch": False, "max_grad_norm": 0.01}),
        (2, {"accumulation_steps": 2, "optimizer": "sgd-momentum", "max_grad_norm": 0.01}),
        (3, {"accumulation_steps": 2}),
    ],
)
def test_dropout_batch_norm_and_uneven_losses_train_as_in_one_process(stage, fields):
    report = verify(ODD, config(stage, batch_size=8, **fields), "cpu")
    assert report.ok, report.why
    assert report.max_relative_error <= 1e-5
    assert "norm" in report.why


@pytest.mark.slow
def test_recomputed_blocks_gather_divided_parameters_again():
    report = verify(wide(), config(3, checkpointing="blocks"), "cpu")
    assert report.ok, report.why
    assert report.max_relative_error <= 1e-5


@pytest.mark.slow
def test_training_continues_as_in_one_process(tmp_path):
    fields = {"sharding": "deepspeed-zero3", "world_size": 2}
    alone = trained(1, tmp_path, "train", {"accumulation_steps": 2})
    assert trained(2, tmp_path, "train", fields) == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
def test_weights_that_deepspeed_is_not_told_of_are_refused():
    narrow = Workload(
        name="narrow",
        build_model=lambda: nn.Linear(8, 8, dtype=torch.bfloat16),
        make_batch=lambda n: torch.randn(n, 8, dtype=torch.bfloat16),
        compute_loss=lambda model, batch: model(batch).square().mean(),
    )
    result = measure(narrow, config(2), "cpu", repeats=1)
    assert result.outcome is Outcome.UNSUPPORTED
    assert "weight is bfloat16" in result.message
    assert "'bf16-master'" in result.message
