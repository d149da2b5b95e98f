"""Training in real ranks by `training_step`: checkpoints that another number of ranks loads."""

import pytest

from tests.rank_parts import trained

ZERO3 = {"sharding": "zero3", "world_size": 2}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum"])
def test_a_sharded_checkpoint_is_loaded_by_other_numbers_of_ranks(tmp_path, optimizer):
    own = {"optimizer": optimizer}
    saved = trained(2, tmp_path, "save", {**ZERO3, **own})
    assert trained(2, tmp_path, "load", {**ZERO3, **own}) == saved
    assert trained(2, tmp_path, "load", {**ZERO3, **own, "sharding": "zero1"}) == saved
    # one process adds the halves of the batch in the same order
    assert trained(1, tmp_path, "load", {**own, "accumulation_steps": 2}) == saved
    four = trained(4, tmp_path, "load", {**own, "sharding": "zero2", "world_size": 4})
    assert four == pytest.approx(saved, rel=1e-6)


@pytest.mark.slow
def test_sharded_optimizer_state_is_loaded_by_one_process(tmp_path):
    saved = trained(2, tmp_path, "save", {"sharding": "zero1", "world_size": 2})
    assert trained(1, tmp_path, "load", {"accumulation_steps": 2}) == saved


@pytest.mark.slow
def test_layers_that_are_divided_are_saved_whole(tmp_path):
    tensor = {"sharding": "tensor", "world_size": 2}
    saved = trained(2, tmp_path, "save", tensor)
    assert trained(2, tmp_path, "load", tensor) == saved
    assert trained(1, tmp_path, "load", {}) == pytest.approx(saved, rel=1e-6)
    both = {"sharding": "zero3", "world_size": 4, "tensor_parallel_size": 2}
    assert trained(4, tmp_path, "load", both) == pytest.approx(saved, rel=1e-6)
    replicas = {**both, "sharding": "zero1"}
    saved = trained(4, tmp_path, "save", replicas)
    assert trained(4, tmp_path, "load", replicas) == saved
    assert trained(1, tmp_path, "load", {}) == pytest.approx(saved, rel=1e-6)
    with pytest.raises(AssertionError, match="ranks that divide layers were given different"):
        trained(2, tmp_path, "differ", tensor)


@pytest.mark.slow
def test_a_divided_weight_of_two_modules_is_saved_as_one(tmp_path):
    twice = {"is_held_twice": True}
    tensor = {"sharding": "tensor", "world_size": 2, **twice}
    saved = trained(2, tmp_path, "save", tensor)
    assert trained(1, tmp_path, "load", twice) == pytest.approx(saved, rel=1e-6)
    both = {"sharding": "zero3", "world_size": 4, "tensor_parallel_size": 2, **twice}
    assert trained(4, tmp_path, "load", both) == pytest.approx(saved, rel=1e-6)
