"""Settings on screen to and from `StepConfig`. No widgets.

A setting on screen may be wrong for a while (accumulation above the batch size, letters in a number
box), so settings are a mapping by field name until `to_config` turns them into a `StepConfig`.
"""

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from memlab._util.units import format_bytes, shown
from memlab.config import Precision, Sharding, StepConfig, allowed_value
from memlab.errors import ConfigError
from memlab.result import CountedPeak, FitStatus, Outcome, Source, StepResult, format_percent
from memlab.runtime.accumulation import AccumulationEffect
from memlab.runtime.inspect import WorkloadFacts
from memlab.runtime.verify_report import VerifyReport
from memlab.techniques.registry import CONTROLS

Settings = Mapping[str, Any]

PRECISIONS = tuple(Precision)
FIELDS = tuple(CONTROLS)
DESCRIBED = ("memory_budget", "batch_size", "accumulation_steps", "precision")
SAID_TOGETHER = ("sharding", "world_size")
MOST_MICRO_BATCHES = 10**4  # lists of a billion would hold up the kernel for minutes
OWN = "own"  # what a page is told of a person's own function
HEADER_FIELDS = ("workload", "device", "memory_limit", "check_gradients")
OTHER_FIELDS = (*HEADER_FIELDS, "choices", "sample_size")
"""What can be set that is no field of a config."""


@functools.cache  # a move asks for each field
def offered(field: str) -> tuple[Any, ...]:
    """Return the choices of a field in the panel; empty for a number or a switch."""
    value = getattr(StepConfig(), field)
    kind: Any = type(value)
    return CONTROLS[field].offered or (tuple(kind) if isinstance(value, StrEnum) else ())


def to_config(settings: Settings) -> StepConfig:
    """Return the config of these settings, without the options of techniques that are off.

    Raises:
        ConfigError: a setting is not allowed; the message is the sentence to show.
    """
    return StepConfig(**{f: value for f, value in settings.items() if counts(f, settings)})


def counts(field: str, settings: Settings) -> bool:
    """Return whether a field has an effect with these settings (a solver needs a budget)."""
    return CONTROLS[field].counts(settings)


def is_sharded(settings: Settings) -> bool:
    """Return whether several ranks share the step."""
    return bool(settings["sharding"] != Sharding.NONE)


def from_config(config: StepConfig) -> dict[str, Any]:
    """Return the settings that show this config.

    Raises:
        ConfigError: the panel has no control for one of its values.
    """
    for field in FIELDS:
        value, choices = getattr(config, field), offered(field)
        is_own = field == "optimizer" and config.has_own_optimizer
        if choices and value not in choices and not is_own:
            raise _no_control(field, str(value))

    if config.checkpoint_modules != "auto":
        raise ConfigError(
            f"checkpoint_modules={config.checkpoint_modules!r} has no control in the panel; "
            "allowed is 'auto', or memlab.measure for others"
        )

    if config.compile_mode is not config.compile_mode.DEFAULT:
        raise ConfigError(
            f"compile_mode={str(config.compile_mode)!r} has no control in the panel; allowed is "
            "'default', or memlab.measure for others"
        )

    return {field: getattr(config, field) for field in FIELDS}


def _no_control(field: str, value: object) -> ConfigError:
    names = ", ".join(repr(str(name)) for name in offered(field))
    return ConfigError(
        f"{field}={shown(value)} has no control in the panel; allowed is one of {names}"
    )


def check_names(fields: Iterable[str]) -> None:
    """Check that every field has a control.

    Raises:
        ConfigError: a field has no control; the message lists those that have one.
    """
    known = (*FIELDS, *OTHER_FIELDS)
    for name in fields:
        if name not in known:
            raise ConfigError(f"the panel has no control {name!r}; allowed is one of {known}")


def problems(settings: Settings) -> dict[str, str]:
    """Return an error for each field that is not allowed; empty if the settings are valid."""
    return dict(_problems(tuple((name, type(value), value) for name, value in settings.items())))


@functools.lru_cache(maxsize=64)  # a move asks several times, and each time makes many configs
def _problems(typed_settings: tuple[tuple[str, type, Any], ...]) -> dict[str, str]:
    settings = {name: value for name, _, value in typed_settings}
    found = {}
    for field, value in settings.items():
        try:
            allowed_value(field, value)
        except ConfigError as error:
            found[field] = str(error)

    if not found and settings["accumulation_steps"] > MOST_MICRO_BATCHES:
        found["accumulation_steps"] = (
            f"the panel lists each micro-batch, so it takes at most {MOST_MICRO_BATCHES:,} of them"
        )
    if not found:
        try:
            to_config(settings)
        except ConfigError as error:
            found[_blamed(settings)] = str(error)

    return found


def _blamed(settings: Settings) -> str:
    """Return the field at which to say that these settings, each allowed, do not go together."""
    steps = settings["accumulation_steps"]
    if not is_sharded(settings) or settings["batch_size"] < steps:
        return "accumulation_steps"
    try:
        ranks = to_config({**settings, "batch_size": steps * settings["world_size"]})
    except ConfigError:
        return "world_size"
    divides = settings["batch_size"] % ranks.data_parallel_size == 0
    return "accumulation_steps" if divides else "batch_size"


def nearest_batch(settings: Settings) -> int:
    """Return the next smaller batch size that the ranks on screen can divide, or the least."""
    steps, size = int(settings["accumulation_steps"]), int(settings["batch_size"])
    ranks = to_config({**settings, "batch_size": steps * settings["world_size"]})
    unit = steps * ranks.data_parallel_size
    return max(size // unit, 1) * unit


def parse_number(text: str, kind: type[int] | type[float]) -> Any:
    """Return the number that was typed, or the text itself, which `StepConfig` refuses by name."""
    try:
        number = kind(text.strip())
    except ValueError:
        return text.strip()
    # no JSON for a page holds the others
    return number if isinstance(number, int) or math.isfinite(number) else text.strip()


def from_page(field: str, sent: Any, own: Any) -> Any:
    """Return the value of a field that a page has sent; a number may be a wrong text.

    Args:
        field: of a config.
        sent: plain JSON.
        own: what is no choice of the panel's and was on screen, such as a person's own function;
            None if nothing was.

    Raises:
        ConfigError: it is no choice of the panel's.
    """
    kind = type(getattr(StepConfig(), field))
    if kind in (int, float):
        is_number = isinstance(sent, str | int | float) and not isinstance(sent, bool)
        return parse_number(str(sent), kind) if is_number else shown(sent)
    if not offered(field):
        return bool(sent)
    is_bool = isinstance(sent, bool)  # which is a number to Python
    same = [one for one in offered(field) if one == sent and isinstance(one, bool) is is_bool]
    if own is not None and sent == (OWN if callable(own) else own):
        same.append(own)
    if not same:
        raise _no_control(field, sent)
    return same[0]


def largest_accumulation(batch_size: int) -> int:
    """Return the largest power of two up to the batch size."""
    return 1 << (batch_size.bit_length() - 1)


def dividing_accumulation(settings: Settings) -> int:
    """Return the largest power of two up to the one on screen that divides the batch of a rank."""
    samples = to_config({**settings, "accumulation_steps": 1}).rank_batch_size
    return math.gcd(samples, largest_accumulation(settings["accumulation_steps"]))


def on_sliders(config: StepConfig) -> dict[str, float]:
    """Return what a page computes with."""
    return {
        "batchSize": config.batch_size,
        "accumulationSteps": config.accumulation_steps,
        "memoryBudget": config.memory_budget,
    }


def describe(result: StepResult) -> str:
    """Return a run's settings in words: the four sliders, then what differs from the defaults."""
    config = result.config
    parts = [
        f"budget {config.memory_budget:g}",
        f"batch {config.batch_size}",
        f"accumulation {config.accumulation_steps}",
        result.number_format,
        *others(config),
    ]

    return ", ".join(parts)


def briefly(result: StepResult) -> str:
    """Return a run's batch size, and what else of its settings differs from the defaults."""
    config, default = result.config, StepConfig()
    parts = [f"batch {config.batch_size}"]
    if config.accumulation_steps != default.accumulation_steps:
        parts.append(f"accumulation {config.accumulation_steps}")
    if config.memory_budget != default.memory_budget:
        parts.append(f"budget {config.memory_budget:g}")
    if config.precision != default.precision:
        parts.append(result.number_format)
    return ", ".join([*parts, *others(config)])


def others(config: StepConfig) -> list[str]:
    """Return, in words, the settings without a slider that differ from the defaults."""
    is_sharded = config.sharding is not Sharding.NONE
    ranks = [f"{config.sharding} x {config.world_size}"] if is_sharded else []
    return ranks + [
        CONTROLS[field].named(value)
        for field in FIELDS
        if field not in (*DESCRIBED, *SAID_TOGETHER)
        and (value := getattr(config, field)) != getattr(StepConfig(), field)
    ]


# Judgements in words, colour and symbol: fits, gradients, outcome of a run. Pure functions.
#
# What the controls mean is in `texts.py`.

OUTCOME_WORDS = {
    Outcome.OK: "ok",
    Outcome.OUT_OF_MEMORY: "out of memory",
    Outcome.UNSUPPORTED: "unsupported",
    Outcome.FAILED: "failed",
    Outcome.CRASHED: "crashed",
    Outcome.CANCELLED: "stopped",
    Outcome.TIMED_OUT: "timed out",
}
GOOD, BAD, OPEN, WARN = "good", "bad", "open", "warn"
WORTH_SAYING = 0.02  # of the peak: how much less a step must need than it takes


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judgement: `kind` is one of GOOD, BAD, OPEN, WARN, and chooses colour and symbol.

    Attributes:
        detail: shown by hover.
    """

    kind: str
    text: str
    detail: str = ""

    @property
    def told(self) -> dict[str, str]:
        """What the page is told."""
        return {"kind": self.kind, "text": self.text, "detail": self.detail}


def gradient_verdict(
    config: StepConfig, facts: WorkloadFacts | None, effect: AccumulationEffect | None
) -> Verdict:
    """Say whether micro-batches and ranks leave the gradient of the undivided batch as it is.

    Args:
        config: with the batch size, the accumulation steps and the ranks.
        facts: None while they are not known.
        effect: what micro-batches do to the gradient; None while it is not known.
    """
    if config.accumulation_steps * config.data_parallel_size == 1:
        return Verdict(GOOD, "gradient: unchanged")
    if facts is None:
        return Verdict(OPEN, "gradient: not known yet", "the model is being looked at")
    if facts.sample_mixing_modules:
        where = facts.sample_mixing_modules[0]
        return Verdict(
            WARN,
            f"gradient differs: BatchNorm in {where} sees {config.micro_batch_size} "
            f"samples, not {config.batch_size}",
            _and_others(facts.sample_mixing_modules),
        )
    if facts.random_modules:
        return Verdict(
            WARN,
            f"gradient differs: {facts.random_modules[0]} draws new random numbers in each "
            f"{'micro-batch' if config.data_parallel_size == 1 else 'rank and micro-batch'}",
            _and_others(facts.random_modules),
        )
    if effect is None:
        return Verdict(OPEN, "gradient: not checked yet", "a few samples are being tried")
    if effect.same == "yes":
        return Verdict(GOOD, "gradient: unchanged", "equal within rounding")
    if effect.same in ("refused", "unknown"):
        return Verdict(OPEN, "gradient: not checked", str(effect))
    return Verdict(WARN, "gradient differs from that of the whole batch", effect.why)


def divided_words(facts: WorkloadFacts | None, effect: AccumulationEffect | None) -> str:
    """Return what micro-batches do to the gradient, however many there are; "" if nothing.

    A page says it of numbers of micro-batches that the kernel was not asked about.
    """
    if facts is not None and facts.sample_mixing_modules:
        where = facts.sample_mixing_modules[0]
        return f"gradient differs: BatchNorm in {where} sees each micro-batch alone"
    divided = StepConfig(batch_size=2, accumulation_steps=2)
    verdict = gradient_verdict(divided, facts, effect)
    return "" if verdict.kind == GOOD else verdict.text


def fit_verdict(result: StepResult | None, limit_bytes: int | None) -> Verdict:
    """Say in words the `fit` of a step and the limit that is on screen.

    Args:
        result: of the step. If it was made under another limit, or none, it is asked for its `fit`
            to this one; if it ran out of memory, the words are of the limit that it ran under.
        limit_bytes: None for what the card can hold, if that is known.
    """
    if result is None:
        return Verdict(OPEN, "not measured yet")
    if result.ended_before_its_peak and result.source is not Source.PREDICTED:
        ran_under = result.memory_limit_bytes
        what = f"the limit of {format_bytes(ran_under)}" if ran_under else "this machine"
        return Verdict(BAD, f"does not fit {what}", result.message)
    peak = result.counted_peak
    if peak is None:
        return Verdict(OPEN, f"no peak measured: {OUTCOME_WORDS[result.outcome]}", result.message)
    if limit_bytes is None:
        limit_bytes = result.usable_memory_bytes
    if limit_bytes is None:
        return Verdict(OPEN, f"no limit set; peak {peak}, {result.source}")

    return _fit_of_peak(result.against_limit(limit_bytes), peak, limit_bytes)


def _fit_of_peak(result: StepResult, peak: CountedPeak, limit_bytes: int) -> Verdict:
    share = f"{_of(peak.nbytes, limit_bytes)} ({format_percent(peak.nbytes / limit_bytes)})"
    share += f", {result.source}{_needed(peak)}"
    detail = f"peak {peak.kind} bytes, {result.source} for {result.device}"
    is_predicted = result.source is Source.PREDICTED  # what ran there did not need to be smaller
    has_less_cache = bool(result.fits) and is_predicted and peak.nbytes > limit_bytes
    if has_less_cache:
        detail += "; at the limit the caching allocator gives back what it holds unused"

    if result.fit is FitStatus.TOO_CLOSE:
        about = f" ± {format_percent(peak.judged_uncertainty)}"
        return Verdict(WARN, f"too close to say: {share}{about}", f"{detail}{about}")
    if result.fit is FitStatus.FITS:
        return Verdict(GOOD, f"fits{' with less cache' * has_less_cache}: {share}", detail)
    measured = result.source is Source.MEASURED
    return Verdict(BAD, f"does not fit: {share}", result.message if measured else detail)


def _needed(peak: CountedPeak) -> str:
    """Return what a step needs, where that is clearly less than what it takes."""
    if peak.needed_bytes is None or peak.nbytes - peak.needed_bytes <= WORTH_SAYING * peak.nbytes:
        return ""
    return f", needs {format_bytes(peak.needed_bytes)}"


def _of(size: int, limit: int) -> str:
    """Return for instance "1.31 of 2.00 GiB", or both units where they differ."""
    part, whole = format_bytes(size), format_bytes(limit)
    unit = f" {whole.split()[-1]}"
    return f"{part.removesuffix(unit)} of {whole}"


def of_last_run(verdict: Verdict, result: StepResult) -> Verdict:
    """Return the verdict of a result as one on settings that are not on screen any more."""
    return Verdict(OPEN, f"{_last(result)}: {verdict.text}", verdict.detail)


def _last(result: StepResult) -> str:
    return "kept prediction" if result.source is Source.PREDICTED else "last run"


def outcome_verdict(result: StepResult) -> Verdict:
    """Say how a run ended, or that it is a prediction, for its row in the table."""
    words = OUTCOME_WORDS[result.outcome]
    if result.source is Source.PREDICTED:
        is_ok = result.outcome is Outcome.OK
        return Verdict(OPEN, "predicted" if is_ok else f"predicted: {words}", result.message)
    if result.outcome is Outcome.OK:
        if result.finite is False:
            return Verdict(WARN, "loss not finite", result.message)
        return Verdict(GOOD, words, result.message)
    quiet = result.outcome in (Outcome.CANCELLED, Outcome.TIMED_OUT)
    return Verdict(OPEN if quiet else BAD, words, result.message)


def gradients_verdict(report: VerifyReport | None) -> Verdict:
    """Say what the comparison with the reference step found."""
    if report is None:
        return Verdict(OPEN, "not checked", 'tick "check gradients" to compare them')
    if report.outcome is not Outcome.OK:
        return Verdict(OPEN, f"not checked: {OUTCOME_WORDS[report.outcome]}", report.why)
    if not report.ok:
        if report.max_relative_error is None or report.buffers_equal is False:
            return Verdict(BAD, "differ", report.why)
        return Verdict(BAD, f"differ by {report.max_relative_error:.0e}", report.why)
    return Verdict(GOOD, "same", report.why)


def stale_note(
    result: StepResult, workload_name: str, device: str, config: StepConfig | None
) -> str:
    """Say in what the run of the picture differs from the settings on screen; "" if in nothing.

    Args:
        result: of the picture.
        workload_name: on screen.
        device: on screen.
        config: on screen; None while the settings contradict one another.
    """
    if config is None:
        return f"{_last(result)}: {describe(result)}"
    said = []
    if result.workload_name != workload_name:
        said.append(result.workload_name)
    if result.device != device:
        said.append(f"on {result.device}")
    for field in FIELDS:
        if getattr(result.config, field) != getattr(config, field):
            said.append(setting_of(result, field))
    return f"{_last(result)}: {', '.join(said)}; what is set now was not run" if said else ""


def setting_of(result: StepResult, field: str) -> str:
    """Return one setting of a run as the table of runs names it."""
    if field == "precision":
        return result.number_format
    return setting_words(field, getattr(result.config, field))


def setting_words(field: str, value: object) -> str:
    """Return one setting as the table of runs names it."""
    return CONTROLS[field].named(value)


def _and_others(paths: tuple[str, ...]) -> str:
    return f"and {len(paths) - 1} more" if len(paths) > 1 else ""
