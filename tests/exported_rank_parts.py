"""What the tests of exported files of several ranks share: torchrun starts both sides.

The files run where memlab cannot be imported. memlab's own step runs in ranks of its own, by
`python -m tests.exported_rank_parts`.
"""

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests import ROOT

NUM_STEPS = 4
FILES = """
import contextlib, faulthandler, io, os, sys
import torch
import torch.distributed as dist
faulthandler.dump_traceback_later(300, exit=True)
torch.set_num_threads(1)
# one group for all files: a second one in the same processes can wait for the first for ever
dist.init_process_group("gloo")
dist.init_process_group = dist.destroy_process_group = lambda *_, **__: None
sys.modules["memlab"] = None  # importing it raises ImportError
prepare, folder, *paths = sys.argv[1:]
exec(prepare)
rank = os.environ["RANK"]
for number, path in enumerate(paths):
    names = {"__name__": "exported", "__file__": path}
    exec(compile(open(path, encoding="utf-8").read(), path, "exec"), names)
    names["NUM_STEPS"] = NUM_STEPS
    kept = {}
    if train := names.get("train"):
        def keeping(*args):
            model, losses = train(*args)
            # a parameter of DeepSpeed has its part apart
            part = lambda p: getattr(p, "ds_tensor", p)
            local = lambda p: p.to_local() if hasattr(p, "to_local") else part(p)
            kept.update(
                (name.removeprefix("_orig_mod."), local(p).detach())  # of a compiled model
                for name, p in model.named_parameters()
            )
            return model, losses
        names["train"] = keeping
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        names["main"]()
    if "accelerate" in sys.modules:  # it keeps the precision of the first script of a process
        state = sys.modules["accelerate.state"]
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()
    torch.save((said.getvalue(), kept), f"{folder}/file-{number}-{rank}")
os._exit(0)  # Gloo's threads can abort a process that ends in the ordinary way
""".replace("NUM_STEPS", str(NUM_STEPS)).replace(f'"{NUM_STEPS}"', '"NUM_STEPS"')


def in_ranks(num_ranks, *command):
    """Run a Python command in ranks that torch's launcher starts, and return what they print."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    done = subprocess.run(
        [sys.executable, *launcher, *map(str, command)],
        capture_output=True, text=True, timeout=500, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo",
             "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def losses_in(said):
    """Return the losses that a file has printed."""
    return [float(x) for x in re.findall(r"^step \d+: loss (\S+)$", said, re.M)]


def of_files(texts, folder, num_ranks=2, prepare="pass"):
    """Run scripts in ranks; return for each the losses, and the weights that each rank holds.

    Args:
        texts: of the scripts.
        folder: to run in.
        num_ranks: that run them.
        prepare: a statement that is executed before the first.
    """
    paths = []
    for number, text in enumerate(texts):
        paths.append(folder / f"script_{number}.py")
        paths[-1].write_text(text, encoding="utf-8")
    runner = folder / "runner.py"
    runner.write_text(FILES, encoding="utf-8")
    in_ranks(num_ranks, runner, prepare, folder, *paths)
    return [_loaded(folder, f"file-{number}", num_ranks) for number in range(len(texts))]


def of_steps(pairs, folder, num_ranks=2):
    """Return the same of memlab's own step."""
    (folder / "pairs").write_bytes(pickled(pairs))
    in_ranks(num_ranks, "-m", "tests.exported_rank_parts", folder)
    return [_loaded(folder, f"step-{number}", num_ranks) for number in range(len(pairs))]


def pickled(pairs):
    """Return workloads and configs as bytes."""
    from memlab.runtime.sending import dumps

    return dumps(pairs)


def _loaded(folder, name, num_ranks):
    found = [torch.load(folder / f"{name}-{rank}") for rank in range(num_ranks)]
    losses = found[0][0]
    if isinstance(losses, str):
        losses = losses_in(losses)
    return losses, [weights for _, weights in found]


def main(folder):
    """Train with memlab's step in this rank, and keep losses and weights."""
    # late, since `of_files` needs none of it
    from memlab.integrations.export import plan_of
    from memlab.integrations.training_step import _mean
    from memlab.techniques.sharding.ranks import local
    from memlab.techniques.step import build_step

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for number, (workload, config) in enumerate(pickle.loads((folder / "pairs").read_bytes())):
        step = build_step(workload, config, "cpu", plan=plan_of(workload, config, "cpu"))
        step.set_seed(0)
        losses = [_mean(step(), step.device) for _ in range(NUM_STEPS)]
        kept = {name: local(p).detach() for name, p in step.model.named_parameters()}
        torch.save((losses, kept), f"{folder}/step-{number}-{dist.get_rank()}")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
