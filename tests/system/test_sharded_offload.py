"""What is offloaded in real ranks of a CPU, against one process that offloads nothing."""

import json
import subprocess
import sys

import pytest

from tests import ROOT
from tests.rank_offloading import ROW, SAMPLES, WAYS


@pytest.mark.slow
def test_ranks_that_offload_train_as_one_process():
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "tests.rank_offloading"],
        capture_output=True, text=True, timeout=300, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found.keys() == WAYS.keys()
    for name, (error, host_bytes) in found.items():
        assert error < 1e-6, name
        # what each of three layers and activation functions reads in backward, and the output;
        # no gathered parameter, though one is as large as many samples
        assert host_bytes == 7 * SAMPLES // 2 * ROW, name
