"""The line of text beside each control.

Every line says what a setting means now, in samples, bytes or percent. The lines are pure functions
of the settings on screen and of the workload; none of them measures anything.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memlab._panel.state import (
    BAD,
    OPEN,
    OWN,
    WARN,
    Settings,
    Verdict,
    dividing_accumulation,
    gradient_verdict,
    is_sharded,
    largest_accumulation,
    nearest_batch,
    problems,
    setting_words,
    to_config,
)
from memlab._util.units import MIB, TIB, format_bytes, parse_bytes, with_unit
from memlab.config import FP32_FORMATS, MOST_SAMPLES, BudgetEngine, Precision, Sharding, StepConfig
from memlab.errors import MemlabError
from memlab.runtime.accumulation import AccumulationEffect
from memlab.runtime.inspect import WorkloadFacts
from memlab.techniques import accumulation, precision
from memlab.techniques.checkpointing import checkpointing
from memlab.techniques.optimizers import optimizer_in_backward, optimizers
from memlab.techniques.precision import MODEL_DTYPE
from memlab.techniques.registry import CONTROLS, EVERY
from memlab.techniques.sharding import sharding
from memlab.techniques.technique import Setup, Technique
from memlab.workload import SampleSize, WorkloadChoices

# `Line`: the line beside a control.


@dataclass(frozen=True, slots=True)
class Line:
    """The line beside a control: what it means now, a verdict, and a remedy to click.

    Attributes:
        text: the explanation, or a sentence that says what is wrong.
        verdict: shown after the text.
        remedy: the label of a button, and the settings that it makes, by field.
        kind: OPEN for an explanation, WARN or BAD for a problem.
    """

    text: str
    verdict: Verdict | None = None
    remedy: tuple[str, Mapping[str, object]] | None = None
    kind: str = OPEN

    @property
    def told(self) -> dict[str, Any]:
        """What the page is told."""
        remedy = self.remedy and {"label": self.remedy[0], "fields": as_json(self.remedy[1])}
        verdict = self.verdict and self.verdict.told
        return {"text": self.text, "kind": self.kind, "verdict": verdict, "remedy": remedy}


def as_json(fields: Mapping[str, object]) -> dict[str, Any]:
    """Return settings as plain JSON types; a person's own function is `OWN`."""
    return {name: OWN if callable(value) else _plain(value) for name, value in fields.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, str):
        return str(value)  # of an enumeration too
    return list(value) if isinstance(value, tuple) else value


OF_OPTIMIZER = (
    optimizers.OPTIMIZER,
    optimizers.IMPLEMENTATION,
    optimizer_in_backward.IN_BACKWARD,
)
"""Techniques whose controls have a line of their own."""

ON_TOP = (accumulation.BATCH, checkpointing.BUDGET, precision.PRECISION)
RANK_FIELDS = sharding.SHARDING
ELSEWHERE = (*ON_TOP, RANK_FIELDS)  # not folded under "more"
SHOWN = {"optimizer", *(c.field for technique in ELSEWHERE for c in technique.controls)}
DIVIDED = {"accumulation_steps": dividing_accumulation, "batch_size": nearest_batch}
"""What to set where ranks cannot divide a batch."""

MOST_NAMED = 2  # of the folded options, on their button
MORE = tuple(technique for technique in EVERY if technique not in (*OF_OPTIMIZER, *ELSEWHERE))
"""Techniques whose controls are folded under "more"."""


NOT_SPLIT = "the batch is not split"


def budget_line(settings: Settings, facts: WorkloadFacts | None, setup: Setup) -> Line:
    """Explain the memory budget, or why this workload cannot have one below 1."""
    budget = settings["memory_budget"]
    if budget >= 1.0:
        return Line("keeps every activation for backward; nothing is recomputed")
    if settings["budget_engine"] == BudgetEngine.COMPILE:
        return _compiled_budget_line(budget, facts)
    if refused := refusal_line((checkpointing.BUDGET,), setup):
        return refused
    if budget == 0.0:
        return Line("keeps as few activations as this model can, and recomputes the rest")

    return Line(f"keeps at most {100 * budget:.0f} % of the activations, and recomputes the rest")


def _compiled_budget_line(budget: float, facts: WorkloadFacts | None) -> Line:
    """Explain a budget that torch.compile plans, or why this workload cannot have it."""
    by_memlab = ("let memlab plan it", {"budget_engine": BudgetEngine.EAGER, "compile": False})
    if facts and facts.recurrent_modules:
        where = facts.recurrent_modules[0] or "the model"
        return Line(
            f"not possible: torch.compile cannot put {where}, a recurrent module, in one graph",
            remedy=by_memlab,
            kind=WARN,
        )

    if facts and facts.random_modules:
        return Line(
            f"refused: {facts.random_modules[0]} draws random numbers, and then torch.compile "
            "computes wrong gradients below 1",
            remedy=by_memlab,
            kind=WARN,
        )

    keep = (
        f"saves at most {100 * budget:.0f} % for backward"
        if budget > 0
        else "saves as little for backward as it can without raising the peak"
    )
    return Line(f"{keep}; planned by torch.compile, which takes seconds to compile")


def batch_line(settings: Settings, facts: WorkloadFacts | None) -> Line:
    """Explain the batch size in samples and in bytes of data."""
    size = settings["batch_size"]
    text = f"{_count(size, 'sample')} in each optimizer update"
    if facts:
        text += f", {format_bytes(size * facts.sample_bytes)} of data"
    return Line(text)


def accumulation_line(
    config: StepConfig, facts: WorkloadFacts | None, effect: AccumulationEffect | None
) -> Line:
    """Explain the micro-batches, and what they do to the gradient."""
    return Line(_split_text(config), gradient_verdict(config, facts, effect))


def _split_text(config: StepConfig) -> str:
    sizes, is_part = config.micro_batch_sizes, config.data_parallel_size > 1
    if len(sizes) == 1:
        return f"the {sizes[0]} samples of a rank are not split" if is_part else NOT_SPLIT
    if sizes[0] == sizes[-1]:
        return f"{len(sizes)} micro-batches of {sizes[0]}{' in each rank' * is_part}"

    more = sizes.count(sizes[0])
    return (
        f"{_count(more, 'micro-batch')} of {sizes[0]} and {len(sizes) - more} of {sizes[-1]}, "
        "weighted by their samples"
    )


def size_line(size: SampleSize, config: StepConfig | None) -> Line:
    """Explain the size of a sample in tokens or pixels of a micro-batch.

    Args:
        size: on screen.
        config: on screen; None while the settings are not allowed.
    """
    each = f"{' x '.join([f'{size.value:,}'] * size.dimensions)} {size.unit}"
    if config is None:
        return Line(f"{each} in each sample")

    samples = config.micro_batch_size
    total = f"{samples * size.value**size.dimensions:,} {size.unit}"
    which = "each" if samples == config.micro_batch_sizes[-1] else "the largest"
    return Line(f"{_count(samples, 'sample')} of {each}: {total} in {which} micro-batch")


def choices_line(facts: WorkloadFacts | None) -> Line:
    """Say what is trained of a workload with choices; its facts are None while awaited."""
    if facts is None:
        return Line("looking at the model")
    trained, all_of_them = facts.num_trainable, facts.num_parameters
    if trained == all_of_them:
        return Line(f"all {all_of_them:,} parameters are trained")
    share = trained / max(all_of_them, 1)
    return Line(f"{trained:,} of {all_of_them:,} parameters are trained: {share:.2%}")


def wrong_choices_line(sentence: str, own: WorkloadChoices) -> Line:
    """Return why the workload cannot have these choices, with a button for its own."""
    return Line(sentence, remedy=("set them back", {"choices": own.values}), kind=BAD)


def wrong_size_line(sentence: str, own: SampleSize) -> Line:
    """Return why the workload cannot have a size, with a button for its own."""
    return Line(sentence, remedy=(f"set to {own.value}", {"sample_size": own.value}), kind=BAD)


def precision_line(settings: Settings, facts: WorkloadFacts | None, device: str) -> Line:
    """Explain the number format."""
    precision = settings["precision"]
    formats = facts.parameter_formats if facts else ()
    size = masters = ""

    if facts:
        masters = f" ({format_bytes(facts.fp32_parameter_bytes)})"
        weights = facts.fp32_parameter_bytes
        if precision == Precision.AS_BUILT:
            weights = facts.parameter_bytes
        elif precision in MODEL_DTYPE:
            weights = facts.half_parameter_bytes

        size = f" ({format_bytes(weights)})"

    fp32 = f"weights{size}, gradients and activations in 32-bit numbers"
    built = Precision.AS_BUILT.in_words(formats)
    texts = {
        Precision.AS_BUILT: fp32 if built == "fp32" else f"{built}: weights{size}; nothing is cast",
        Precision.FP32: fp32,
        Precision.BF16_MIXED: f"matrix products in bf16, weights{size} in fp32",
        Precision.FP16_MIXED: f"matrix products in fp16 with a loss scaler, weights{size} in fp32",
        Precision.BF16: f"weights{size}, gradients and optimizer state in bf16: small updates are "
        "lost",
        Precision.FP16: f"weights{size}, gradients and optimizer state in fp16, no loss scaler: "
        "small gradients vanish and the loss may become NaN",
        Precision.BF16_MASTER: f"weights{size} and gradients in bf16; the optimizer keeps fp32 "
        f"master weights{masters}, so small updates are not lost",
        Precision.BF16_STOCHASTIC: f"weights{size} and gradients in bf16, optimizer state in fp32; "
        "updated weights are rounded up or down at random, so small updates are not lost",
        Precision.TF32: f"weights{size} in fp32; matrix products round their inputs to TF32: "
        "faster on Ampere and newer, but saves no memory",
        Precision.FP8_MIXED: f"linear layers multiply in fp8 (torchao; on Ada, Hopper and newer "
        f"cards); otherwise like bf16-mixed, weights{size} in fp32",
    }

    instead = {Precision.TF32: Precision.AS_BUILT, Precision.FP8_MIXED: Precision.BF16_MIXED}
    if precision in instead and device == "cpu":
        other = instead[Precision(precision)]
        return Line(
            f"not possible on a CPU: {precision} needs the tensor cores of a CUDA card",
            remedy=(f"use {other.in_words(formats)}", {"precision": other}),
            kind=WARN,
        )

    if precision == Precision.FP16_MIXED and device == "cpu":
        return Line(
            "many times slower than fp32 on a CPU; bf16-mixed saves as much memory",
            remedy=("use bf16-mixed", {"precision": Precision.BF16_MIXED}),
            kind=WARN,
        )

    return Line(texts[precision])


def more_line(setup: Setup, facts: WorkloadFacts | None, name: str) -> Line:
    """Explain the folded controls that are on, or why one of them is not possible."""
    if refused := refusal_line(MORE, setup):
        return refused
    said = [clause for technique in MORE if (clause := technique.says(setup))]
    if facts and not facts.blocks:
        said.insert(0, f"{name} has no repeated blocks to checkpoint")
    return Line("; ".join(said) or "all of these are off")


def optimizer_line(setup: Setup) -> Line:
    """Explain the optimizer, its implementation and when it runs, or why it is not possible."""
    # OPTIMIZER itself is not checked here, since it imports a package for a second in the kernel;
    # a prediction reports its refusal
    if refused := refusal_line(OF_OPTIMIZER[1:], setup):
        return refused
    return Line("; ".join(clause for t in OF_OPTIMIZER if (clause := t.says(setup))))


def refusal_line(techniques: Iterable[Technique], setup: Setup) -> Line | None:
    """Return why one of these techniques is refused, with a remedy; None if none is refused."""
    for technique in techniques:
        for refusal in technique.refusals(setup):
            if not refusal.remedies:
                return Line(str(refusal), kind=WARN)
            remedy = refusal.remedies[0]
            words = ", ".join(CONTROLS[name].named(value) for name, value in remedy.items())
            return Line(refusal.why, remedy=(words, remedy), kind=WARN)
    return None


def lines(
    settings: Settings,
    wrong: Mapping[str, str],
    facts: WorkloadFacts | None,
    *,
    device: str,
    name: str,
    effect: AccumulationEffect | None,
) -> dict[str, Line]:
    """Return the line beside each control: its explanation, or what is wrong with its setting.

    Args:
        settings: on screen.
        wrong: the error of each setting that is not allowed, by field.
        facts: of the workload; None while they are not known.
        device: where it would run.
        name: of the workload.
        effect: as for `gradient_verdict`.
    """
    asked = setup_of(settings, wrong, device)
    explained: dict[str, Callable[[], Line]] = {
        "memory_budget": lambda: budget_line(settings, facts, asked),
        "batch_size": lambda: batch_line(settings, facts),
        "accumulation_steps": lambda: accumulation_line(asked.config, facts, effect),
        "precision": lambda: precision_line(settings, facts, device),
        "more": lambda: more_line(asked, facts, name),
        "optimizer": lambda: optimizer_line(asked),
    }
    if "batch_size" in wrong:
        explained["accumulation_steps"] = lambda: Line("needs a valid batch size first")

    return {
        field: wrong_line(field, wrong[field], settings) if field in wrong else explained[field]()
        for field in explained
    }


def setup_of(settings: Settings, wrong: Mapping[str, str], device: str) -> Setup:
    """Return what techniques are asked about, with defaults in place of wrong settings.

    Of wrong settings nobody knows how ranks would divide them, so there are none.
    """
    default, right = StepConfig(), dict(settings)
    for field in (*wrong, *(("accumulation_steps",) if "batch_size" in wrong else ())):
        right[field] = getattr(default, field)
    if wrong:
        right["sharding"] = Sharding.NONE
    kind = "cpu" if device == "cpu" else "cuda"
    return Setup(config=to_config(right), device=torch.device(kind))


def wrong_line(field: str, sentence: str, settings: Settings) -> Line:
    """Return the error of a wrong setting, with a button for the nearest allowed one."""
    batch = settings["batch_size"]
    value: float = {"memory_budget": 1.0, "batch_size": 8, "accumulation_steps": 1}[field]
    both = isinstance(batch, int) and isinstance(settings["accumulation_steps"], int)
    if field == "accumulation_steps" and both and settings[field] > batch > 0:
        value = largest_accumulation(batch)
        sentence = f"more than the {batch} samples of the batch; every micro-batch needs a sample"
    elif field in DIVIDED and both and 0 < batch <= MOST_SAMPLES and settings[field] > 0:
        value = DIVIDED[field](settings)

    return Line(sentence, remedy=(f"set to {value:g}", {field: value}), kind=BAD)


def more_label(settings: Settings) -> str:
    """Return the label of the button of the folded controls: the optimizer, and what is on."""
    default = StepConfig()
    on = [CONTROLS[field].named(settings[field]) for field in CONTROLS
          if field not in SHOWN and settings[field] != getattr(default, field)]  # fmt: skip
    named = ", ".join([CONTROLS["optimizer"].in_words(settings["optimizer"]), *on[:MOST_NAMED]])
    rest = len(on) - MOST_NAMED
    return f"More options ({named}{f' and {rest} more' if rest > 0 else ''})"


def about_line(name: str, facts: WorkloadFacts | str | None) -> Line:
    """Say what the workload is; its facts are None while awaited, or a text if there are none."""
    if facts is None:
        return Line(f"{name}: looking at the model")
    if isinstance(facts, str):
        return Line(f"{name}: cannot be built", kind=BAD)

    blocks = f", {len(facts.blocks)} repeated blocks" if facts.blocks else ""
    return Line(
        f"{name}: {facts.num_parameters:,} parameters, "
        f"{format_bytes(facts.parameter_bytes)} in {_in_formats(facts.parameter_formats)}{blocks}"
    )


def limit_line(typed: str, capacity_bytes: int | None, whose: str) -> Line | None:
    """Return a line about a typed limit that is probably meant otherwise; None if it is not.

    Args:
        typed: the text of the limit, which is a size; "" for none.
        capacity_bytes: what the device can hold; None if that is not known.
        whose: memory the capacity is: "this machine" or "the card".
    """
    if not typed:
        return None
    size = parse_bytes(typed)

    if re.fullmatch(r"[0-9.]+", typed) and size < MIB:
        meant = with_unit(typed, capacity_bytes or TIB)
        remedy = (f"did you mean {meant}?", {"memory_limit": meant})
        return Line(
            f"a limit of {_count(size, 'byte')}: no unit was given", remedy=remedy, kind=WARN
        )

    if capacity_bytes is not None and size > capacity_bytes:
        held = format_bytes(capacity_bytes)
        return Line(
            f"the limit of {format_bytes(size)} is more than {whose} can hold, so {held} counts",
            remedy=(f"use {held}", {"memory_limit": ""}),
            kind=WARN,
        )
    return None


def _in_formats(formats: tuple[str, ...]) -> str:
    """Return number formats as a person lists them: "uint8, bfloat16 and float32"."""
    if formats == FP32_FORMATS:
        return "fp32"
    *others, last = formats
    return f"{', '.join(others)} and {last}" if others else last


def _count(number: int, noun: str) -> str:
    plural = {"micro-batch": "micro-batches"}.get(noun, f"{noun}s")
    return f"{number} {noun if number == 1 else plural}"


def error_text(error: Exception) -> str:
    """Return the text that the page shows for an error that would otherwise not be seen."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, MemlabError):
        return text
    return f"{text}; this is a bug in memlab, not in your settings: run the cell again"


# Sentences that several files say.

RUN_BY_CELL = "a cell is running it: interrupt the kernel to stop it"
PLAYED_BACK = "is another machine: Run shows what was measured there"
NOT_HERE = "is not in this machine: you can keep its predictions, not run it"
KEEPING = "is added to the table as soon as it is exact"


# The line beside the number of ranks, and the button that shows it. Pure functions.

ALONE = "one device trains by itself; a sharding divides the step over several"
TWO = ("2 ranks", {"world_size": 2})
REMEDIES: tuple[Mapping[str, object], ...] = (
    {"shard_group_size": 8},
    {"shard_group_size": 4},
    {"shard_group_size": 2},
    {"tensor_parallel_size": 1},
    {"world_size": 2},
    {"world_size": 2, "shard_group_size": 2},
)
"""What may make ranks go together, the one that changes least first."""


def ranks_line(
    settings: Settings,
    wrong: Mapping[str, str],
    setup: Setup,
    *,
    is_here: bool,
    num_cards: int | None = None,
) -> Line:
    """Explain who computes and keeps what, or why these ranks are not possible.

    Args:
        settings: on screen.
        wrong: the error of each setting that is not allowed, by field.
        setup: the same settings, with defaults in place of wrong ones.
        is_here: whether the device is in this machine, so that Run starts real ranks.
        num_cards: of the cluster on screen; None if the device is none.
    """
    if "world_size" in wrong:
        return Line(wrong["world_size"], remedy=_remedy(settings, num_cards), kind=BAD)
    if not is_sharded(settings):
        return Line(ALONE) if num_cards is None else _unused_line(num_cards)
    if wrong:
        return Line("needs valid settings above first")
    if refused := refusal_line((RANK_FIELDS,), setup):
        return refused
    if setup.config.world_size == 1:
        return Line(RANK_FIELDS.says(setup), remedy=TWO, kind=WARN)

    most = sharding.most_ranks(setup.device) if is_here else None
    if most is not None and setup.config.world_size > most:
        at_most = f"; Run starts at most {most} ranks on this machine, so this is predicted only"
        return Line(RANK_FIELDS.says(setup) + at_most, kind=WARN)
    return Line(RANK_FIELDS.says(setup))


def ranks_label(settings: Settings) -> str:
    """Return the label of the button that shows the controls of ranks, which says what is set."""
    if not is_sharded(settings):
        return "Ranks (one device)"
    return f"Ranks ({settings['sharding']} x {settings['world_size']})"


def _unused_line(num_cards: int) -> Line:
    """Return that a sharding would use all cards of a cluster, with a button for one."""
    every: Mapping[str, object] = {"sharding": "zero3", "world_size": num_cards}
    text = f"one of {num_cards} cards trains by itself; a sharding divides the step over them"
    return Line(text, remedy=(f"zero3 x {num_cards}", every))


def _remedy(settings: Settings, num_cards: int | None) -> tuple[str, Mapping[str, object]] | None:
    """Return the first remedy that lifts the error, with its words."""
    every = () if num_cards is None else ({"world_size": num_cards},)
    was_wrong = "world_size" in problems(settings)
    for remedy in (*REMEDIES, *every) if was_wrong else every:
        if "world_size" not in problems({**settings, **remedy}):
            return ", ".join(setting_words(*change) for change in remedy.items()), remedy
    return None
