"""`ladder`: switch on one technique after another, and find the cost of each rung.

The effective batch stays as it is, so the gradient does too, within what a narrower format rounds;
`memlab.verify` of each result's config says how closely. If a rung divides the batch, and that
gives another gradient, the notes of the last result say so. Which rungs are worth their time is
left to the reader.
"""

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from memlab._util.checks import anything, checked, count, of_type, seconds
from memlab._util.units import is_a, shown
from memlab.api import accumulation_effect, measure, predict
from memlab.config import StepConfig
from memlab.errors import ConfigError
from memlab.result import Outcome, StepResult
from memlab.runtime.bar import shows_progress
from memlab.runtime.isolation import OnProgress
from memlab.store.frames import ResultList
from memlab.store.recorded import is_here
from memlab.techniques.technique import catalogue, in_words
from memlab.workload import Workload

Rung = Mapping[str, Any]
"""Fields of `StepConfig` that a rung sets, on top of those before it."""

RUNGS: tuple[Rung, ...] = tuple(
    row.offers[0]
    for row in sorted(itertools.chain(*catalogue().values()), key=lambda row: row.rung)
    if row.rung
)
"""From the cheapest to the most expensive. A rung that is refused is left out and named."""

REFUSED = (Outcome.UNSUPPORTED, Outcome.FAILED)
BUILT_ON = (Outcome.OK, Outcome.OUT_OF_MEMORY)


@checked(rungs=anything, repeats=count(1), batch_size=count(1), timeout_seconds=seconds)
@shows_progress
def ladder(
    workload: Workload,
    rungs: Sequence[Rung] | None = None,
    *,
    device: str | torch.device | None = None,
    batch_size: int = 64,
    seed: int = 0,
    repeats: int = 3,
    timeout_seconds: float = 600,
    on_progress: OnProgress | None = None,
    progress: bool = True,
    cancel: threading.Event | None = None,
) -> list[StepResult]:
    """Return the cost of the plain step, and with each rung on top of those before it.

    The plain step is fp32 with AdamW. A rung that this device, workload or combination does not
    support is left out of the rungs after it. If it is one of `rungs`, its result stays in
    the list with its outcome. If it is one of the default rungs, it is dropped from the list, as
    is a default rung that does not lower the peak (on a card, the reserved one), and the notes of
    the last result name it.

    Args:
        workload: what is trained.
        rungs: fields of `StepConfig` for each rung; None is `RUNGS`.
        device: measured if it is in this machine, else predicted, as `memlab.predict` takes it.
        batch_size: samples per optimizer update, on every rung.
        seed: set before the model, the batch and each step.
        repeats: timed steps of each rung, where it is measured.
        timeout_seconds: after which a rung ends as `timed_out`.
        on_progress: as for `measure`.
        progress: as for `measure`.
        cancel: once set, the rung that is running and all after it end as `cancelled`.

    Raises:
        MemlabError: an argument is not allowed; the message names it and what is allowed.

    >>> import memlab
    >>> rungs = [{"optimizer": "sgd"}]
    >>> plain, last = ladder(memlab.workloads.get("vit-digits"), rungs, device="t4", batch_size=8)
    >>> last.peak_allocated_bytes < plain.peak_allocated_bytes
    True
    """
    options: dict[str, Any] = {"seed": seed, "timeout_seconds": timeout_seconds}
    options |= {"on_progress": on_progress, "cancel": cancel}

    def run(config: StepConfig) -> StepResult:
        if is_here(device):
            return measure(workload, config, device, repeats=repeats, **options)
        return predict(workload, config, device, **options)

    config = StepConfig(batch_size=batch_size)
    if rungs is not None:
        rungs = _checked(rungs, config)

    results, left_out = [run(config)], list[str]()
    for rung in RUNGS if rungs is None else rungs:
        result = _tried(run, config, rung, results[0])
        why = result.message if result.outcome in REFUSED else _idle(result, results[-1])
        if not why or rungs is not None:
            results.append(result)
        else:
            left_out.append(f"{in_words(rung, ', ')} is left out: {why}")

        if result.outcome in BUILT_ON and (not why or rungs is not None):
            config = result.config

    if any(one.config.accumulation_steps * one.config.data_parallel_size > 1 for one in results):
        said = str(accumulation_effect(workload, on_progress=on_progress, cancel=cancel))
        left_out += [said] if said else []
    results[-1] = replace(results[-1], notes=(*results[-1].notes, *left_out))
    return ResultList(results)


def _checked(rungs: Any, plain: StepConfig) -> list[Rung]:
    """Return the rungs as a list, each on top of all before it.

    Raises:
        ConfigError: it is not a list of rungs. This is checked before anything runs.
    """
    try:
        every = [_plain(rung) for rung in of_type("rungs", rungs, Sequence[Any])]
    except ConfigError as error:
        raise ConfigError(
            f"{error} of dicts of fields of StepConfig: [{{'optimizer': 'sgd'}}]"
        ) from error

    config = plain
    for rung in every:
        config = _on_top(config, rung)
    return every


def _plain(rung: Any) -> Rung:
    """Return a rung as a dict. A person's own mapping may raise any exception."""
    try:
        if is_a(rung, Mapping):
            return dict(rung)
    except Exception as error:
        raise ConfigError(
            f"rungs hold {shown(rung)}, which cannot be read ({type(error).__name__}); "
            "allowed is a list"
        ) from error

    raise ConfigError(f"rungs hold {shown(rung)}; allowed is a list")


def _tried(
    run: Callable[[StepConfig], StepResult], config: StepConfig, rung: Rung, plain: StepResult
) -> StepResult:
    """Return the cost of a rung; it is refused if it needs a rung that was refused."""
    try:
        above = _on_top(config, rung)
    except ConfigError as error:
        return StepResult(
            outcome=Outcome.UNSUPPORTED,
            message=f"{in_words(rung, ', ')} builds on a rung that was refused: {error}",
            source=plain.source,
            device=plain.device,
            versions=plain.versions,
            config=config,
            workload_name=plain.workload_name,
        )

    return run(above)


def _idle(result: StepResult, before: StepResult) -> str:
    """Return why a rung is left out; empty if it is kept. On a card, what is reserved counts."""
    pairs = (
        (result.peak_reserved_bytes, before.peak_reserved_bytes),
        (result.peak_allocated_bytes, before.peak_allocated_bytes),
    )
    known = [(now, then) for now, then in pairs if now is not None and then is not None]
    for now, then in known:
        if now != then:
            return "" if now < then else "it raises the peak here"
    return "it does not lower the peak here" if known else ""


def _on_top(config: StepConfig, rung: Rung) -> StepConfig:
    """Return the config with one more rung.

    Raises:
        ConfigError: the rung names a field that does not exist, or divides the batch otherwise.
    """
    known = {field.name for field in fields(StepConfig)} - {"batch_size"}
    unknown = [name for name in rung if name not in known]
    if unknown:
        raise ConfigError(
            f"rungs name {shown(unknown[0])}; allowed is a field of StepConfig: "
            f"{', '.join(sorted(known))}"
        )
    return replace(config, **rung)
