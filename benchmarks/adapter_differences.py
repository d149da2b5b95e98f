"""What people ask about fine-tuning: how much more or less does a choice take, and of what?

Each line compares two settings of `memlab.workloads.finetune` on one card, by prediction: the
difference of their allocated peaks, signed, and the category at the peak that differs most. The
small model is Llama 3.2 1B, the large one Llama 3 8B, since Llama 2 7B has 4,096 positions and
8,192 tokens are asked about, too; 7B is compared at the lengths that it has. Nothing is judged:
these are answers, not measurements.

`prepare_for_kbit` makes norms, embeddings and head fp32, and with them what flows between the
layers. Trainers then run under autocast, so that is compared, too. Without it attention is in fp32,
for which CUDA has no flash kernel; and where heads share keys (Llama 3) no memory-efficient one, so
that the matrix of attention weights is kept whole.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from benchmarks import report
from memlab import StepConfig, StepResult, workloads
from memlab._util.units import GIB
from memlab.devices import cards
from memlab.prediction.predict import predict_in_process

CARD = "a100-80"
LENGTHS = {"llama-1b": (512, 2048, 8192), "llama-7b": (512, 2048), "llama-8b": (512, 2048, 8192)}
USUAL = 2048  # tokens, where a length is not the question
OF_STEP = ("checkpointing", "precision")  # the other options are those of `finetune`
QUICK = 2
Setting = tuple[tuple[str, Any], ...]


def setting(**options: Any) -> Setting:
    """Return a setting: options of `finetune`, and the checkpointing and precision of the step."""
    return tuple({"adapter": "lora", "rank": 8, "base": "bf16", **options}.items())


def questions() -> list[tuple[str, int, str, Setting, Setting]]:
    """Return the model, the tokens, the question, and the settings it compares."""
    found = []
    for model, lengths in LENGTHS.items():
        bf16, nf4, lora = setting(), setting(base="nf4"), setting(targets="all-linear")
        prepared = setting(base="nf4", prepare_for_kbit=True)
        usual = (*prepared, ("precision", "bf16-mixed"))
        for tokens in lengths:
            found.append((model, tokens, "nf4 for bf16", bf16, nf4))
            found.append((model, tokens, "prepare_for_kbit on nf4", nf4, prepared))
            found.append((model, tokens, "autocast on that", prepared, usual))
            found.append((model, tokens, "all three for bf16", bf16, usual))
        checkpointed = setting(base="nf4", checkpointing="blocks")
        found.append((model, USUAL, "checkpointing, on nf4", nf4, checkpointed))
        for rank in (64, 256):
            more = setting(targets="all-linear", rank=rank)
            found.append((model, USUAL, f"rank {rank} for 8, all layers", lora, more))
        dora = setting(targets="all-linear", adapter="dora")
        found.append((model, USUAL, "DoRA for LoRA, all layers", lora, dora))
    return found


@cache
def predicted(model: str, tokens: int, chosen: Setting) -> StepResult:
    """Return what memlab predicts of one sample."""
    options = dict(chosen)
    of_step = {name: options.pop(name) for name in OF_STEP if name in options}
    config = StepConfig(batch_size=1, **of_step)
    made = predict_in_process(
        workloads.finetune(model, tokens=tokens, **options), config, cards.resolve(CARD),
        seed=0, memory_limit=None, report=lambda _: None,
    ).result  # fmt: skip
    assert made.outcome == "ok", made.message
    return made


def lines(quick: bool) -> Iterator[dict[str, Any]]:
    """Return the answers, one by one."""
    for question in questions()[: QUICK if quick else None]:
        yield line_of(*question)


def line_of(model: str, tokens: int, what: str, one: Setting, other: Setting) -> dict[str, Any]:
    """Return a line; the differences are signed."""
    before, after = (predicted(model, tokens, each) for each in (one, other))
    old, new = before.peak_allocated_bytes, after.peak_allocated_bytes
    kinds, changed = before.peak_by_category, after.peak_by_category
    assert old is not None
    assert new is not None
    assert kinds is not None
    assert changed is not None
    by_kind = {kind: (changed[kind] - kinds[kind]) / GIB for kind in kinds}
    most = max(by_kind, key=lambda kind: abs(by_kind[kind]))
    return {
        "model": model,
        "tokens": tokens,
        "what": what,
        "before GiB": old / GIB,
        "after GiB": new / GIB,
        "difference GiB": (new - old) / GIB,
        "%": 100 * (new / old - 1),
        "most of it": f"{most} {by_kind[most]:+.2f}",
    }


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how many answers there are."""
    return {"answers": len(lines)}


def show(lines: Sequence[dict[str, Any]]) -> None:
    """Print the answers."""
    report.show(f"what a choice changes, one sample on {CARD}, predicted", lines)
