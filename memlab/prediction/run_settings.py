"""`TrainingRun`: what a run does beside its steps: evaluation, generation, saving, averaging."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from memlab._util.checks import choice, count, flag, of_type
from memlab.errors import ConfigError

MOST = 10**6  # batches or tokens: a mistyped number must not exhaust the machine
FEW_BATCHES = 4  # of an evaluation that keeps nothing, since all batches then take the same


class EvaluationOutputs(StrEnum):
    """What an evaluation keeps on the device of the outputs and labels of each batch."""

    NONE = "none"
    CONCATENATED = "concatenated"
    LIST = "list"


class CacheKind(StrEnum):
    """How a cache of keys and values gets room for the next token."""

    DYNAMIC = "dynamic"
    STATIC = "static"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """An evaluation between two steps: forward passes without gradients, in the mode of `eval()`.

    Attributes:
        batch_size: samples of a batch. All batches count as full.
        num_samples: of the evaluation set; None if nothing is kept, as all batches then take the
            same.
        keep_outputs: "none": only the loss. "concatenated": what the model returns beside its loss,
            and the labels, are joined with those of all earlier batches, as transformers' `Trainer`
            does with `compute_metrics`. "list": they stay as they are, in a list.
        to_host_every: after this many batches what was kept goes to the host (the `Trainer`'s
            `eval_accumulation_steps`); None is never.

    Raises:
        ConfigError: a value is not allowed; the message names field, value and remedy.

    >>> Evaluation(batch_size=8, num_samples=1000, keep_outputs="concatenated").num_batches
    125
    >>> Evaluation(batch_size=8).num_batches  # the fifth takes what the fourth took
    4
    """

    batch_size: int = 8
    num_samples: int | None = None
    keep_outputs: EvaluationOutputs = EvaluationOutputs.NONE
    to_host_every: int | None = None

    def __post_init__(self) -> None:
        _check(self, "batch_size", count(1, MOST))
        _check(self, "num_samples", _optional(count(1)))
        _check(self, "to_host_every", _optional(count(1)))
        _check(self, "keep_outputs", choice(*EvaluationOutputs))
        if self.keeps and self.num_samples is None:
            raise ConfigError(
                f"keep_outputs={str(self.keep_outputs)!r} grows with the evaluation set, and "
                "num_samples=None; add num_samples=..., or keep_outputs='none'"
            )
        if self.to_host_every is not None and not self.keeps:
            raise ConfigError(
                f"to_host_every={self.to_host_every} does nothing with keep_outputs='none'; add "
                "keep_outputs='concatenated', or leave it out"
            )
        if self.num_samples is not None and self.num_samples > MOST * self.batch_size:
            raise ConfigError(
                f"num_samples={self.num_samples} makes more than {MOST} batches of "
                f"{self.batch_size}; use a larger batch_size, or fewer samples"
            )

    @property
    def keeps(self) -> bool:
        """Whether outputs are kept on the device."""
        return self.keep_outputs is not EvaluationOutputs.NONE

    @property
    def num_batches(self) -> int:
        """Batches that are evaluated until nothing new happens on the device."""
        if self.num_samples is None:
            return FEW_BATCHES
        batches = -(-self.num_samples // self.batch_size)
        # what went to the host leaves the device as it was before the first batch
        return min(batches, (self.to_host_every or MOST) if self.keeps else FEW_BATCHES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """Greedy generation between two steps, as `generate` of transformers does it.

    Attributes:
        batch_size: prompts at once.
        prompt_tokens: of each prompt; none is padded.
        new_tokens: that are generated; none ends earlier.
        cache: "dynamic": each token makes a new, longer tensor of the keys and one of the values of
            each layer. "static": room for all tokens is made at the beginning.

    Raises:
        ConfigError: a value is not allowed; the message names field, value and remedy.

    >>> Generation(batch_size=4, prompt_tokens=128, new_tokens=64).num_tokens
    192
    """

    batch_size: int = 1
    prompt_tokens: int = 128
    new_tokens: int = 128
    cache: CacheKind = CacheKind.DYNAMIC

    def __post_init__(self) -> None:
        for name in ("batch_size", "prompt_tokens", "new_tokens"):
            _check(self, name, count(1, MOST))
        _check(self, "cache", choice(*CacheKind))

    @property
    def num_tokens(self) -> int:
        """Tokens of a prompt and its continuation."""
        return self.prompt_tokens + self.new_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRun:
    """What a run consists of beside its steps. Gradient clipping is a field of `StepConfig`.

    The stages come in this order: build, first step, step, evaluation, generation, saving, and one
    step more. Averaged weights are made before the first step and updated after each.

    Attributes:
        evaluate: the evaluation; None if there is none.
        generate: the generation; None if there is none.
        save: whether a checkpoint of weights and optimizer state is written.
        ema: whether an exponential moving average of the weights is kept on the device
            (`torch.optim.swa_utils.AveragedModel`, which copies the whole model).

    Raises:
        ConfigError: a value is not allowed; the message names field, value and remedy.

    >>> TrainingRun(evaluate=Evaluation(batch_size=16), save=True).words
    'evaluation, saving'
    """

    evaluate: Evaluation | None = None
    generate: Generation | None = None
    save: bool = False
    ema: bool = False

    def __post_init__(self) -> None:
        _check(self, "evaluate", lambda name, value: of_type(name, value, Evaluation | None))
        _check(self, "generate", lambda name, value: of_type(name, value, Generation | None))
        _check(self, "save", flag)
        _check(self, "ema", flag)

    @property
    def words(self) -> str:
        """What is added to the steps, in words."""
        parts = {
            "evaluation": self.evaluate is not None,
            "generation": self.generate is not None,
            "saving": self.save,
            "EMA weights": self.ema,
        }
        return ", ".join(name for name, is_added in parts.items() if is_added)


def _check(record: Any, name: str, rule: Any) -> None:
    """Check a field of a frozen record and keep the value that the rule returns."""
    object.__setattr__(record, name, rule(name, getattr(record, name)))


def _optional(rule: Any) -> Any:
    return lambda name, value: None if value is None else rule(name, value)
