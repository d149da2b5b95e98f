"""Training in real ranks by `training_step`: checkpoints that another number of ranks loads."""

import json
import os
import subprocess
import sys

import pytest

from tests import ROOT

ZERO3 = {"sharding": "zero3", "world_size": 2}


def trained(num_ranks, *arguments):
    """Return the losses that ranks print; torch's launcher starts them if there are several."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = [sys.executable, *(launcher if num_ranks > 1 else []), "-m", "tests.rank_training"]
    done = subprocess.run(
        [*command, *map(str, arguments[:-1]), json.dumps(arguments[-1])],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [float.fromhex(loss) for loss in json.loads(done.stdout.strip().splitlines()[-1])]


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
    with pytest.raises(AssertionError, match="ranks that divide layers were given different"):
        trained(2, tmp_path, "differ", tensor)
