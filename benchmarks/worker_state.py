"""Whatever a job does to its worker, the next ones are measured as in a fresh process.

Each attack is run in `build_model` of a small workload; then another workload is measured three
times and compared with the bytes and the loss that this process, which ran no attack, gives.

    python -m benchmarks.worker_state --out worker_state.json

Not counted is time: attacks that only slow a run down are not among these.
"""

# ruff: noqa: E501 - what is executed stands on one line

import argparse
import json
from pathlib import Path

import torch
from torch import nn

from memlab import StepConfig, Workload, measure

PYTHON = {  # name: what build_model executes
    "layer replaced": "nn.LayerNorm = nn.RMSNorm",
    "method patched": "f = nn.Linear.forward; nn.Linear.forward = lambda s, x: f(s, x) * 2",
    "code of a method replaced": "nn.ReLU.forward.__code__ = (lambda self, input: input).__code__",
    "default of a function": "nn.LayerNorm.__init__.__defaults__ = (1.0, True, True, None, None)",
    "functional patched": "nn.functional.relu = lambda x, inplace=False: x * 1.5",
    "torch function patched": "r = torch.relu; torch.relu = lambda x: r(x) * 2",
    "optimizer replaced": "torch.optim.AdamW = torch.optim.SGD",
    "optimizer's step patched": "torch.optim.AdamW.step = lambda self, closure=None: None",
    "tensor method patched": "torch.Tensor.mean = torch.Tensor.sum",
    "initialisation patched": "nn.init.kaiming_uniform_ = lambda t, **k: t.data.fill_(1)",
    "class attribute": "nn.Module.training = False",
    "module method added": "nn.LayerNorm.__call__ = lambda self, x: x",
    "global forward hook": "nn.modules.module.register_module_forward_hook(lambda m, i, o: o * 2)",
    "global pre-hook": "nn.modules.module.register_module_forward_pre_hook(lambda m, i: (i[0] * 2,))",
    "global backward hook": "nn.modules.module.register_module_full_backward_hook(lambda *a: None)",
    "optimizer hook": "torch.optim.optimizer.register_optimizer_step_pre_hook(lambda *a: None)",
    "autocast left on": "torch.autocast('cpu', torch.bfloat16).__enter__()",
    "no_grad left on": "torch.no_grad().__enter__()",
    "grad mode": "torch.set_grad_enabled(False)",
    "inference mode": "KEEP.append(torch.inference_mode()); KEEP[-1].__enter__()",
    "default dtype": "torch.set_default_dtype(torch.float64)",
    "default device": "torch.set_default_device('meta')",
    "saved tensors hooks": "torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t).__enter__()",
    "saved tensors hooks off": "torch._C._autograd._saved_tensors_hooks_disable('off')",
    "anomaly mode": "torch.autograd.set_detect_anomaly(True)",
    "deterministic": "torch.use_deterministic_algorithms(True)",
    "flush denormal": "torch.set_flush_denormal(True)",
    "matmul precision": "torch.set_float32_matmul_precision('medium')",
    "mkldnn off": "torch.backends.mkldnn.set_flags(False)",
    "threads": "torch.set_num_threads(1)",
    "cudnn off": "torch.backends.cudnn.enabled = False",
    "pytree registration": "class P: pass\ntorch.utils._pytree.register_pytree_node(P, lambda p: ([], None), lambda c, x: P())",
    "operator overridden": "l = torch.library.Library('aten', 'IMPL'); KEEP.append(l); l.impl('relu', lambda x: x * 1.0, 'CPU')",
    "validation of distributions off": "torch.distributions.Distribution.set_default_validate_args(False)",
    "dispatch mode": "from torch.utils._python_dispatch import TorchDispatchMode as M\nclass D(M):\n def __torch_dispatch__(s, f, t, a=(), k=None): return f(*a, **(k or {}))\nD().__enter__()",
    "function mode": "from torch.overrides import TorchFunctionMode as M\nclass D(M):\n def __torch_function__(s, f, t, a=(), k=None): return f(*a, **(k or {}))\nD().__enter__()",
    "tensors kept": "torch.kept = [torch.ones(2**23)]",
    "stdout closed": "sys.stdout.close()",
    "stdout replaced": "sys.stdout = None",
    "descriptor 1 closed": "os.close(1)",
    "sys.modules emptied": "sys.modules.clear()",
    "a module removed": "sys.modules.pop('torch.nn.functional')",
    "perf_counter patched": "import time; time.perf_counter = lambda: 0.0",
    "builtins patched": "import builtins; builtins.len = lambda x: 3",
    "random patched": "import random; random.seed = lambda *a: None",
    "numpy patched": "import numpy; numpy.median = lambda *a: 0.0",
    "numpy errors": "import numpy; numpy.seterr(all='raise')",
    "decimal context": "import decimal; decimal.getcontext().prec = 3",
    "gc off": "import gc; gc.disable()",
    "signal handler": "import signal; signal.signal(signal.SIGUSR1, lambda *a: None)",
    "warnings are errors": "import warnings; warnings.simplefilter('error')",
    "recursion limit": "sys.setrecursionlimit(300)",
    "trace": "sys.settrace(lambda *a: None)",
    "profile": "sys.setprofile(lambda *a: None)",
    "import hook": "class F:\n def find_spec(self, *a): return None\nsys.meta_path.insert(0, F())",
    "environment": "os.environ['OMP_NUM_THREADS'] = '1'",
    "folder": "os.chdir('/')",
    "umask": "os.umask(0)",
    "limit of the process": "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))",
    "thread left": "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "process left": "import subprocess; KEEP.append(subprocess.Popen(['sleep', '60']))",
    "cloudpickle patched": "import cloudpickle; cloudpickle.dumps = None",
    "bases of a class": "class E(nn.Module):\n def __call__(self, x): return super().__call__(x) * 1.5\nnn.Sequential.__bases__ = (E,)",
    "cell of a closure": "for c in nn.modules.utils._pair.__closure__:\n if c.cell_contents == 2: c.cell_contents = 3",
    "class of a module": "class M(type(torch)): pass\nnn.functional.__class__ = M",
    "registered with an abstract class": "from collections.abc import Mapping\nMapping.register(nn.ModuleDict)",
    "virtual timer": "import signal; signal.setitimer(signal.ITIMER_VIRTUAL, 0.5)",
    "profiling timer": "import signal; signal.setitimer(signal.ITIMER_PROF, 0.5)",
    "scheduled when idle": "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))",
    "raw thread left": "import _thread, time; _thread.start_new_thread(time.sleep, (60,))",
    "memlab patched": "import memlab.techniques.step; memlab.techniques.step.build_step = None",
}


def attack(source: str) -> Workload:
    """Return a workload that executes this as it builds its model."""

    def build() -> nn.Module:
        import os
        import sys

        exec(source, {"torch": torch, "nn": nn, "os": os, "sys": sys, "KEEP": []})
        return nn.Linear(2, 2)

    return Workload(
        name="attack",
        build_model=build,
        make_batch=lambda n: torch.ones(n, 2),
        compute_loss=lambda model, batch: model(batch).mean(),
    )


def clean() -> Workload:
    """Return the workload that is measured after each attack."""
    return Workload(
        name="clean",
        build_model=lambda: nn.Sequential(
            nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4)
        ),
        make_batch=lambda n: (torch.randn(n, 16), torch.randn(n, 4)),
        compute_loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    )


def facts_of_clean(*, isolate: bool) -> list[object]:
    """Return what has to be the same after every attack."""
    config = StepConfig(batch_size=4)
    result = measure(clean(), config, "cpu", repeats=1, isolate=isolate)
    return [str(result.outcome), result.peak_by_category, result.loss, list(result.notes)]


def main() -> None:
    """Run the attacks; print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=list(PYTHON), help="names of attacks")
    chosen = parser.parse_args()
    expected = facts_of_clean(isolate=False)

    rows = {}
    for name in chosen.only:
        attacked = measure(attack(PYTHON[name]), StepConfig(batch_size=4), "cpu", repeats=1)
        after = [facts_of_clean(isolate=True) for _ in range(3)]
        rows[name] = {"outcome": str(attacked.outcome), "right": [one == expected for one in after]}
        print(f"{name:28} {attacked.outcome:12} {rows[name]['right']}", flush=True)
    right = sum(all(row["right"]) for row in rows.values())
    print(f"{right} of {len(rows)} attacks reach no later run")
    if chosen.out:
        chosen.out.write_text(json.dumps({"right": right, "attacks": rows}, indent=1))


if __name__ == "__main__":
    main()
