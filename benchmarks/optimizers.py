"""Is a step with any optimizer predicted to the byte, and does verify find it unchanged?

All optimizers of torch.optim are passed as classes, those of other packages too where these are
installed, and those with a name by name. Goal: all that take dense gradients, to the byte on a CPU.
What needs a closure or sparse gradients must be refused, and what reads values states it.
"""

import importlib.util
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

import memlab
from benchmarks import report
from memlab import StepConfig, Workload
from memlab.config import Optimizer

BATCH, SIZE, CLASSES = 8, 8, 10
OTHERS = {
    "pytorch_optimizer": ("SOAP", "AdEMAMix", "Shampoo", "ADOPT", "Lamb", "Adan", "LARS", "Tiger"),
    "lion_pytorch": ("Lion",),
    "schedulefree": ("AdamWScheduleFree", "SGDScheduleFree"),
    "prodigyopt": ("Prodigy",),
    "dadaptation": ("DAdaptAdam", "DAdaptSGD"),
    "bitsandbytes.optim": ("AdamW", "Lion8bit", "AdEMAMix"),
}
"""Packages that are not needed, and classes of them."""
RATES = {"came_pytorch": ("CAME",)}  # without a learning rate of their own
QUICK = ("adamw", "torch.optim.NAdam", "torch.optim.LBFGS")


def workload(only_matrices: bool) -> Workload:
    """Return a model with weights of four, two and one dimensions, or of two alone."""

    def build() -> nn.Module:
        if only_matrices:
            return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE**2, CLASSES, bias=False))
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 64), nn.LayerNorm(64), nn.ReLU(),
            nn.Linear(64, CLASSES),
        )  # fmt: skip

    return Workload(
        name="matrices" if only_matrices else "mixed",
        build_model=build,
        make_batch=lambda n: (torch.randn(n, 3, SIZE, SIZE), torch.randint(CLASSES, (n,))),
        compute_loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )


def optimizers() -> Iterator[tuple[str, Any]]:
    """Yield every optimizer with what it is called."""
    yield from ((str(each), each) for each in Optimizer)
    for name, kind in sorted(vars(torch.optim).items()):
        is_kind = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
        if is_kind and kind is not torch.optim.Optimizer:
            yield f"torch.optim.{name}", kind
    for package, names in (OTHERS | RATES).items():
        if importlib.util.find_spec(package.partition(".")[0]) is None:
            continue
        module = importlib.import_module(package)
        more: dict[str, Any] = {"lr": 1e-4} if package in RATES else {}
        yield from ((f"{package}.{name}", partial(getattr(module, name), **more)) for name in names)


def row(name: str, optimizer: Any) -> dict[str, Any]:
    """Return what one optimizer was predicted and measured to take."""
    own = workload(only_matrices=name == "torch.optim.Muon")
    config = StepConfig(batch_size=BATCH, optimizer=optimizer)
    found = memlab.predict(own, config, "cpu")
    real = memlab.measure(own, config, "cpu", repeats=1)
    predicted, measured = found.peak_allocated_bytes, real.peak_allocated_bytes
    is_ok = predicted is not None and measured is not None
    report_of = memlab.verify(own, config, "cpu") if is_ok else None
    return {
        "optimizer": name,
        "predicted": predicted or 0,
        "measured": measured or 0,
        "difference": predicted - measured if predicted and measured else 0,
        "outcome": str(found.outcome),
        "verify": "" if report_of is None else "ok" if report_of.ok else report_of.why,
        "said": "" if found.outcome == real.outcome == "ok" else str(found.message or real.message),
    }


def main() -> None:
    """Print the table and write it as JSON."""
    given = report.options(__file__, __doc__ or "")
    before = report.environment()
    every = [(name, kind) for name, kind in optimizers() if not given.quick or name in QUICK]
    rows = [row(name, kind) for name, kind in every]
    shown = [{key: value for key, value in each.items() if key != "said"} for each in rows]
    report.show("bytes allocated at the peak of a step on a CPU", shown)
    for each in rows:
        if each["said"]:
            print(f"{each['optimizer']}: {each['said']}")
    ran = [each for each in rows if each["outcome"] == "ok"]
    exact = sum(each["difference"] == 0 for each in ran)
    print(f"\n{exact} of {len(ran)} that run are predicted to the byte")
    report.write(given, before, {"rows": rows})


if __name__ == "__main__":
    main()
