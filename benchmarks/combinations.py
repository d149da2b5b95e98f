"""Which techniques combine? Every pair is tried on one tiny model; writes docs/combinations.md.

On a CPU a pair is trained for two updates, and its gradients are compared with those of the
reference step, as `memlab.verify` does. What a CPU refuses by itself is predicted for a card
instead. The model has work for each technique: convolutions, an activation after a layer, repeated
blocks with attention, a linear head with a cross entropy, no dropout. For an attention
implementation the blocks are those of transformers. Left out: tf32 and fp8-mixed, formats of a
card's tensor cores; fp16, as bf16 but for its digits; adamw-8bit and the losses of Liger and cut
cross-entropy, which are optional packages'; choices within a technique; more than two at a time;
and refusals that come from a model, such as dropout.
"""

import itertools
import string
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memlab import Outcome, StepConfig, Workload
from memlab.devices.cards import Target, resolve
from memlab.errors import MemlabError
from memlab.prediction.planning import plan_in_process
from memlab.prediction.plans import plan_for
from memlab.prediction.predict import predict_in_process
from memlab.running import Ended
from memlab.runtime.verify import reference_of, verify_in_process
from memlab.techniques import compilation
from memlab.techniques.registry import EVERY
from memlab.techniques.step import build_step, set_seed
from memlab.techniques.technique import Plan
from memlab.tracing import fake_cuda

PAGE = Path(__file__).resolve().parents[1] / "docs" / "combinations.md"
OF_PACKAGES = {
    "eager attention": {"attention": "eager"},
    "flash attention": {"precision": "bf16", "attention": "flash_attention_2"},
    "flex attention": {"precision": "bf16", "attention": "flex_attention"},
    "loss by trl": {"loss_kernel": "chunked-nll"},
}
"""They need transformers or trl, and not every model can have them."""
TECHNIQUES = {name: dict(fields) for t in EVERY for name, fields in t.examples.items()}
TRIED: dict[str, dict[str, Any]] = TECHNIQUES | OF_PACKAGES
"""Settings by the name of their technique; in a refusal, their last field stands for them."""

ON_A_CARD = (
    "offload_activations", "offload_parameters", "offload_optimizer", "expandable_segments",
)  # fmt: skip
ONLY_ON_A_CARD = ("flash attention", "flex attention")
CARD = "h200"
BATCH, BATCH_ON_A_CARD = 4, 1024  # predicted, not run: large enough to be offloaded
NUM_UPDATES = 2
UPDATE_TOLERANCE = 1e-3
"""Of all weights' changes in fp32: Adam divides a gradient by its size, which raises small errors.

In a narrower format an update can be lost in rounding, and there is no such comparison.
"""
WIDTH, CLASSES = 16, 32


HEAD = f"""# Which techniques combine

Written by `python -m benchmarks.combinations`, which tries every pair on one tiny model;
`tests/matrix/test_combinations.py` fails where this page says anything else. Rows and columns are
the same settings, on the diagonal each alone.

- ✓ trains on a CPU, and its gradients are those of the reference step within the tolerance of
  `memlab.verify`. In fp32, what {NUM_UPDATES} updates do to the weights differs by at most
  {UPDATE_TOLERANCE:g} from what those of the plain step do.
- ◌ was predicted for a card ({CARD}), since a CPU refuses it by itself; no card has run it here.
- ? is not refused, and has been neither run nor predicted.
- a letter is a refusal: its sentence is below. `predict`, `measure` and `verify` give it before
  anything runs, and the panel says so beside the control while it is set.
- an empty field: two values of one field.

Left out are `tf32` and `fp8-mixed`, which only a card computes; `fp16`, as `bf16` but for its
digits; and `adamw-8bit` and the losses `liger` and `cut`, which are optional packages'. What a
model rules out, such as dropout with a budget that torch.compile plans, is refused by name when it
is built.

With an attention implementation the blocks of the model are those of a Llama. `flash_attention_2`
and `flex_attention` are tried in bf16, since flash_attn computes in 16 bits. Of the losses that a
package computes, trl's and Liger's give the gradients of the plain loss but for rounding; cut
cross-entropy leaves out small ones, so its gradients are other ones.
"""


class Kind(StrEnum):
    """What came of trying settings; its value is what the page shows of it."""

    TRAINS = "✓"
    PREDICTED = "◌"
    REFUSED = "refused"
    OPEN = "?"
    WRONG = "wrong"


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What came of trying settings, and the sentence that says why."""

    kind: Kind
    why: str = ""


class Block(nn.Module):
    """Attention and a perceptron, without a bias whose gradient is 0 but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        # a slope close to 1: rounding flips the sign of what lies near 0
        self.act = nn.LeakyReLU(0.9)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, tokens, WIDTH) -> the same."""
        query, key, value = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        x = x + nn.functional.scaled_dot_product_attention(query, key, value).squeeze(1)
        return x + self.down(self.act(self.up(x)))


class Net(nn.Module):
    """Convolutions, blocks of attention, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act = nn.Conv2d(3, 8, 3, padding=1), nn.LeakyReLU(0.9)
        self.patches = nn.Conv2d(8, WIDTH, 4, stride=4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(n, 3, 16, 16) -> (n, 16, CLASSES)."""
        x = self.patches(self.act(self.first(images))).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class OfTransformers(nn.Module):
    """The same with the blocks of a Llama, whose attention implementation can be set."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaModel  # seconds, and only then needed

        self.first, self.act = nn.Conv2d(3, 8, 3, padding=1), nn.LeakyReLU(0.9)
        self.patches = nn.Conv2d(8, WIDTH, 4, stride=4)
        sizes = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
        self.body = LlamaModel(LlamaConfig(**sizes, **heads, vocab_size=CLASSES, use_cache=False))
        self.body.embed_tokens.requires_grad_(False)  # what it would embed comes from the images
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(n, 3, 16, 16) -> (n, 16, CLASSES)."""
        x = self.patches(self.act(self.first(images))).flatten(2).transpose(1, 2)
        return self.head(self.body(inputs_embeds=x).last_hidden_state)


def _batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 3, 16, 16), torch.randint(CLASSES, (n, 16))


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    logits = model(batch[0])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


WORKLOAD = Workload(name="pairs", build_model=Net, make_batch=_batch, compute_loss=_loss)
OF_BLOCKS = replace(WORKLOAD, name="pairs of transformers", build_model=OfTransformers)


def pairs() -> list[tuple[str, str]]:
    """Return every two techniques that can be set at once, and each with itself."""
    found = itertools.combinations_with_replacement(TRIED, 2)
    return [(a, b) for a, b in found if a == b or not _is_one_field(a, b)]


def _is_one_field(a: str, b: str) -> bool:
    """Return whether two techniques are values of one field."""
    return bool(TRIED[a].keys() & TRIED[b].keys())


def workload_of(fields: Mapping[str, Any]) -> Workload:
    """Return the model on which settings are tried."""
    return OF_BLOCKS if "attention" in fields else WORKLOAD


def is_for_a_card(a: str, b: str) -> bool:
    """Return whether a CPU refuses one of two techniques by itself."""
    return bool({a, b} & set(ONLY_ON_A_CARD) or settings(a, b).keys() & set(ON_A_CARD))


def settings(a: str, b: str) -> dict[str, Any]:
    """Return the fields of a pair."""
    return TRIED[a] | TRIED[b]


def fields_of(a: str, b: str) -> list[str]:
    """Return the fields that a refusal of this pair must name."""
    return [list(TRIED[name])[-1] for name in dict.fromkeys((a, b))]


@cache
def tried(a: str, b: str) -> Found:
    """Return what comes of a pair, or of one technique alone."""
    fields = settings(a, b)
    fake_cuda.device()  # autograd counts the devices at the first backward of a process
    try:
        found = _predicted(fields) if is_for_a_card(a, b) else _trained(fields)
    except (MemlabError, Ended) as error:
        found = Found(kind=Kind.REFUSED, why=str(error))
    if found.kind is Kind.REFUSED and any(name not in found.why for name in fields_of(a, b)):
        return Found(kind=Kind.WRONG, why=f"a refusal that does not name both: {found.why}")
    return found


def _predicted(fields: Mapping[str, Any]) -> Found:
    target = resolve(CARD)
    config = StepConfig(batch_size=BATCH_ON_A_CARD, **fields)
    workload = workload_of(fields)
    found = predict_in_process(
        workload,
        config,
        target,
        seed=0,
        memory_limit=None,
        plan=_plan(workload, config, target),
        report=_mute,
    ).result
    if found.outcome is Outcome.OK:
        return Found(kind=Kind.PREDICTED)
    if found.outcome is not Outcome.UNSUPPORTED:
        return Found(kind=Kind.WRONG, why=found.message)
    is_open = "cannot be predicted" in found.message  # and can be measured
    return Found(kind=Kind.OPEN if is_open else Kind.REFUSED, why=found.message)


def _trained(fields: Mapping[str, Any]) -> Found:
    config, device = StepConfig(batch_size=BATCH, **fields), torch.device("cpu")
    workload = workload_of(fields)
    plan = _plan(workload, config, resolve("cpu"))
    try:
        why = _wrong_update(workload, config, plan)
        # runs what was compiled for the updates
        report = verify_in_process(workload, config, device, seed=0, plan=plan, report=_mute)
    finally:
        if compilation.is_compiled(config):
            compilation.forget()
    if report.outcome is Outcome.UNSUPPORTED:
        return Found(kind=Kind.REFUSED, why=report.why)
    if why or not report.ok:
        return Found(kind=Kind.WRONG, why=why or report.why)
    return Found(kind=Kind.TRAINS)


def _plan(workload: Workload, config: StepConfig, target: Target) -> Plan | None:
    def run(_: str, arguments: dict[str, Any]) -> Any:
        return plan_in_process(**arguments, report=_mute)

    return plan_for(workload, config, target, seed=0, run=run)


def _wrong_update(workload: Workload, config: StepConfig, plan: Plan | None) -> str:
    """Return what is wrong with the weights after some updates; "" if nothing is."""
    found = _changes(workload, config, plan)
    stuck = [name for name, change in found.items() if not change.isfinite().all()]
    if stuck or not any(change.any() for change in found.values()):
        return f"weights are not finite or not updated: {stuck}"
    if config.precision is not config.precision.AS_BUILT:
        return ""
    same = replace(reference_of(config), accumulation_steps=1)
    expected = _changes_of_the_plain_step(workload, same)
    error = sum(float((found[n] - expected[n]).square().sum()) for n in expected)
    size = sum(float(change.square().sum()) for change in expected.values())
    error = (error / size) ** 0.5
    if error > UPDATE_TOLERANCE:
        return f"weights after {NUM_UPDATES} updates differ by {error:.1e}"
    return ""


@cache
def _changes_of_the_plain_step(workload: Workload, config: StepConfig) -> dict[str, torch.Tensor]:
    return _changes(workload, config, None)


def _changes(workload: Workload, config: StepConfig, plan: Plan | None) -> dict[str, torch.Tensor]:
    """Return what some updates do to each weight, in fp64."""
    step = build_step(workload, config, "cpu", plan=plan)
    before = {name: p.detach().clone() for name, p in step.model.named_parameters()}
    for _ in range(NUM_UPDATES):
        set_seed(0)
        step()
    return {name: p.detach().double() - before[name] for name, p in step.model.named_parameters()}


def _mute(_: object) -> None:
    """Report nothing."""


def page() -> str:
    """Return the page that says what came of every pair.

    Raises:
        RuntimeError: a pair is neither right nor refused.
    """
    found = {pair: tried(*pair) for pair in pairs()}
    wrong = [f"{a} with {b}: {f.why}" for (a, b), f in found.items() if f.kind is Kind.WRONG]
    if wrong:
        raise RuntimeError("\n".join(wrong))
    reasons = dict.fromkeys(f.why for f in found.values() if f.kind is Kind.REFUSED)
    letters = dict(zip(reasons, string.ascii_letters, strict=False))
    cells = {pair: letters.get(f.why, str(f.kind)) for pair, f in found.items()}
    cells |= {(b, a): cell for (a, b), cell in cells.items()}
    names = list(TRIED)
    numbers = [str(i + 1) for i in range(len(names))]
    lines = [f"| | | {' | '.join(numbers)} |", f"|---|---|{'---|' * len(names)}"]
    for number, name in zip(numbers, names, strict=True):
        row = " | ".join(cells.get((name, other), "") for other in names)
        lines.append(f"| {number} | {name} | {row} |")
    asked = [f"{i}. {_code(TRIED[name])}" for i, name in zip(numbers, names, strict=True)]
    said = [f"- **{letter}** {reason}" for reason, letter in letters.items()]
    parts = [HEAD, *lines, "", "## The settings", "", *asked, "", "## The refusals", "", *said]
    return "\n".join(parts) + "\n"


def _code(fields: Mapping[str, Any]) -> str:
    return f"`{', '.join(f'{name}={value!r}' for name, value in fields.items())}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
