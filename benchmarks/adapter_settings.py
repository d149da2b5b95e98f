"""Adapters on a small model on this CPU, in the manner of peft's own examples.

Each setting is predicted and measured: goals for the difference of the allocated peaks are 0.1 % in
the median and 3 % at most. And one step is run by memlab and by plain PyTorch: the gradients of
what is trained must agree to 1e-5, and the base must be the same, bit for bit, after the update.

The first settings are those of `memlab.workloads.finetune`; the others are adapters that it has no
word for, put on a base by `peft.get_peft_model` as a person does.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

import memlab
from benchmarks import report
from memlab import StepConfig, Workload, workloads
from memlab.techniques.step import build_step

MODEL, TOKENS, SAMPLES = "llama-tiny", 48, 2
GOAL_MEDIAN, GOAL_MOST, GOAL_GRADIENTS = 0.1, 3.0, 1e-5  # %, %, relative
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
QUICK = 2
Setting = tuple[dict[str, Any], dict[str, Any]]
SETTINGS: list[Setting] = [
    ({"adapter": "lora", "rank": 8, "targets": ("q_proj", "v_proj")}, {}),
    ({"adapter": "lora", "rank": 64, "targets": "all-linear"}, {"checkpointing": "blocks"}),
    ({"adapter": "lora", "rank": 16, "dropout": 0.1, "base": "fp32"}, {}),
    ({"adapter": "lora", "rank": 8, "base": "fp16"}, {"optimizer": "sgd"}),
    ({"adapter": "lora", "rank": 8, "modules_to_save": ("embed_tokens", "lm_head")}, {}),
    ({"adapter": "lora", "rank": 8, "base": "nf4", "prepare_for_kbit": True}, {}),
    ({"adapter": "lora", "rank": 64, "base": "nf4", "targets": "all-linear"},
     {"accumulation_steps": 2}),
    ({"adapter": "lora", "rank": 8, "base": "fp4", "double_quantization": False}, {}),
    ({"adapter": "lora", "rank": 8, "base": "int8"}, {"checkpointing": "blocks"}),
    ({"adapter": "dora", "rank": 16, "targets": ATTENTION}, {}),
    ({"adapter": "dora", "rank": 16, "base": "nf4", "targets": ATTENTION}, {}),
    ({"adapter": "rslora", "rank": 32, "base": "fp32"}, {"accumulation_steps": 2}),
    ({"adapter": "ia3"}, {}),
    ({"adapter": "prefix", "num_virtual_tokens": 30}, {}),
    ({"adapter": "prompt", "num_virtual_tokens": 8}, {}),
]  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "AdaLoraConfig": {"init_r": 12, "target_r": 8, "total_step": 100},
    "LoHaConfig": {"r": 8, "target_modules": ["q_proj", "v_proj"]},
    "LoKrConfig": {"r": 8, "target_modules": ["q_proj", "v_proj"]},
    "VeraConfig": {"r": 32, "target_modules": ["q_proj", "o_proj"]},
    "PromptEncoderConfig": {"num_virtual_tokens": 20, "encoder_hidden_size": 64},
}
"""Classes of peft, and what they are given."""


def cases() -> list[tuple[str, Workload, StepConfig]]:
    """Return the name, the workload and the step of each setting."""
    found = []
    for options, changes in SETTINGS:
        config = StepConfig(batch_size=SAMPLES * changes.get("accumulation_steps", 1), **changes)
        words = [f"{name}={value}" for name, value in {**options, **changes}.items()]
        made = workloads.finetune(MODEL, tokens=TOKENS, **options)
        found.append((" ".join(words), made, config))
    base = workloads.finetune(MODEL, tokens=TOKENS, adapter="none")
    for name, given in OWN.items():
        made = dataclasses.replace(base, name=name, build_model=adapted(base, name, given))
        found.append((name, made, StepConfig(batch_size=SAMPLES)))
    return found


def adapted(base: Workload, name: str, given: dict[str, Any]) -> Callable[[], nn.Module]:
    """Return a function that builds a base with an adapter of peft."""

    def build() -> nn.Module:
        import peft  # an extra

        config = getattr(peft, name)(task_type="CAUSAL_LM", **given)
        made: nn.Module = peft.get_peft_model(base.build_model(), config)
        return made

    return build


def lines(quick: bool) -> Iterator[dict[str, Any]]:
    """Return what is found of each setting, one by one."""
    for name, workload, config in cases()[: QUICK if quick else None]:
        yield line_of(name, workload, config)


def line_of(name: str, workload: Workload, config: StepConfig) -> dict[str, Any]:
    """Return a line; the error is relative to what was measured, signed."""
    made = memlab.predict(workload, config, "cpu", timeout_seconds=600)
    real = memlab.measure(workload, config, "cpu", repeats=1, warmup=0, timeout_seconds=600)
    if made.peak_allocated_bytes is None or real.peak_allocated_bytes is None:
        return {"setting": name, "why": made.message or real.message}
    error, is_untouched = against_pytorch(workload, config)
    return {
        "setting": name,
        "measured bytes": real.peak_allocated_bytes,
        "predicted bytes": made.peak_allocated_bytes,
        "error %": 100 * (made.peak_allocated_bytes / real.peak_allocated_bytes - 1),
        "gradients": error,
        "base untouched": is_untouched,
    }


def against_pytorch(workload: Workload, config: StepConfig) -> tuple[float, bool]:
    """Return how far a step's gradients are from plain PyTorch's, and if the base is unchanged.

    The first is the largest relative difference of a trained tensor, with all samples at once.
    """
    config = dataclasses.replace(config, batch_size=SAMPLES, accumulation_steps=1)
    torch.manual_seed(1)
    batch = workload.make_batch(SAMPLES)
    torch.manual_seed(0)
    plain = workload.build_model().to("cpu")
    torch.manual_seed(2)
    workload.compute_loss(plain, batch).backward()
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}

    step = build_step(dataclasses.replace(workload, make_batch=lambda n: batch), config, "cpu")
    found: dict[str, torch.Tensor] = {}
    before = {n: p.detach().clone() for n, p in step.model.named_parameters()}
    for name, parameter in step.model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_keeping(found, name))
    torch.manual_seed(2)
    step()
    assert found.keys() == expected.keys()
    apart = [_apart(found[name], gradient) for name, gradient in expected.items()]
    frozen = [(n, p) for n, p in step.model.named_parameters() if not p.requires_grad]
    return max(apart), all(torch.equal(before[name], p) for name, p in frozen)


def _keeping(found: dict[str, torch.Tensor], name: str) -> Callable[[torch.Tensor], None]:
    def keep(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        found[name] = parameter.grad.clone()

    return keep


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    size = float(other.norm())
    return float((one - other).norm()) / size if size else float(one.norm())


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how far off the lines are."""
    known = [line for line in lines if "why" not in line]
    errors = [abs(line["error %"]) for line in known]
    return {
        "settings": len(lines),
        "without an answer": len(lines) - len(known),
        "median %": statistics.median(errors),
        "max %": max(errors),
        "gradients, max": max(line["gradients"] for line in known),
        "bases untouched": sum(line["base untouched"] for line in known),
    }


def show(lines: Sequence[dict[str, Any]]) -> None:
    """Print the lines, and whether the goals are met."""
    report.show(f"adapters on {MODEL}, predicted and measured on this CPU", lines)
    for line in lines:
        if "why" in line:
            print(f"{line['setting']}: {line['why']}")
    found = summary(lines)
    report.show("absolute errors of allocated bytes, and relative ones of gradients", [found])
    is_met = found["median %"] <= GOAL_MEDIAN and found["max %"] <= GOAL_MOST
    print(f"median {GOAL_MEDIAN} %, at most {GOAL_MOST} %: {report.verdict(is_met)}")
    is_same = found["gradients, max"] <= GOAL_GRADIENTS
    is_same = is_same and found["bases untouched"] == found["settings"]
    print(f"gradients to {GOAL_GRADIENTS}, bases untouched: {report.verdict(is_same)}")
