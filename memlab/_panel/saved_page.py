"""A step as a page that lives without a kernel: recorded steps, the page's script, and its style.

`page/app.js` describes what the page is given. What it computes is in the recorded steps: batch
size, accumulation and memory budget, as far as these cover them.
"""

from __future__ import annotations

import base64
import html
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlab._panel.joined import PAGE, joined
from memlab._panel.state import GOOD, gradient_verdict
from memlab._util.units import shown as shown_value
from memlab._version import __version__
from memlab.api import accumulation_effect, inspect_workload, predict_with_size_model
from memlab.config import BudgetEngine, Checkpointing, StepConfig
from memlab.errors import ConfigError
from memlab.prediction.plans import known_frontier
from memlab.prediction.step_file import packed
from memlab.result import Outcome, outcome_checked
from memlab.techniques import every
from memlab.techniques.every import CONTROLS

if TYPE_CHECKING:
    from memlab.prediction.predict import Prediction
    from memlab.workload import Workload

ON_SLIDERS = ("batch_size", "accumulation_steps", "memory_budget")
RECORDED = (1, 2, 3)  # micro-batches: a recording of three gives every larger number of them
SOME_BUDGET = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedStep:
    """What a page shows.

    Attributes:
        workload: of the step.
        device: its name, such as "t4".
        config: on screen.
        limit: as typed; "" for what the device can hold.
        usable_bytes: that a step can hold there; None if it is not known.
        divided: what micro-batches do to the gradient, in words; "" if nothing.
        code: that makes this step.
    """

    workload: Workload
    device: str
    config: StepConfig
    limit: str
    usable_bytes: int | None
    divided: str
    code: str


def file_for(path: str | os.PathLike[str]) -> Path:
    """Return where a page is to be written, which is looked at before a person waits for it.

    Raises:
        ConfigError: no file can be there; the message says why.
    """
    try:
        file = Path(os.fsdecode(path)).expanduser()
        if file.is_dir() or not file.parent.is_dir():
            raise FileNotFoundError(f"{'a folder' if file.is_dir() else 'no such folder'}")
    except (OSError, TypeError, ValueError, RuntimeError) as error:  # a null byte; no such home
        raise _not_written(path, error) from error
    return file


def write(file: Path, document: str) -> None:
    """Write a page.

    Raises:
        ConfigError: it cannot be written; the message says why.
    """
    try:
        file.write_text(document, encoding="utf-8")
    except OSError as error:
        raise _not_written(file, error) from error


def _not_written(path: object, error: Exception) -> ConfigError:
    return ConfigError(
        f"path={shown_value(path)} cannot be written ({error}); name an HTML file in a folder that "
        "exists"
    )


def predicted_around(workload: Workload, config: StepConfig, device: str) -> list[Prediction]:
    """Return predictions of a step and of others, from which a page computes all near to it.

    Raises:
        UnsupportedError: the step itself cannot be predicted; the message says why.
        MemlabError: it took too long, or its workload is not allowed.
    """
    first = predict_with_size_model(workload, config, device)
    outcome_checked(first.result, "the prediction")
    found = [first]
    kind = "cpu" if device == "cpu" else "cuda"
    for other in _others(config):
        if not every.is_refused(other, kind):
            more = predict_with_size_model(workload, other, device)
            if more.result.outcome is Outcome.OK:
                found.append(more)
    return [one for one in found if one.size_model is not None]


def _others(config: StepConfig) -> Iterator[StepConfig]:
    """Yield configs whose recordings cover what that of a config leaves open."""
    parts = config.data_parallel_size
    for steps in sorted({*RECORDED} - {min(config.accumulation_steps, max(RECORDED))}):
        batch = max(config.batch_size // (parts * steps), 2) * parts * steps
        yield replace(config, batch_size=batch, accumulation_steps=steps)
    is_eager = not config.compile and config.checkpointing is Checkpointing.NONE
    if is_eager and config.budget_engine is BudgetEngine.EAGER and parts == 1:
        yield replace(config, memory_budget=1.0 if config.memory_budget < 1.0 else SOME_BUDGET)


def payload_of(shown: SavedStep, predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return what the page is given, as plain JSON types."""
    config = shown.config
    fixed = [
        (control.label, control.in_words(getattr(config, field)))
        for field, control in CONTROLS.items()
        if field not in ON_SLIDERS and getattr(config, field) != getattr(StepConfig(), field)
    ]
    formats = predictions[0].result.number_format
    return {
        "workload": shown.workload.name,
        "device": shown.device,
        "usableBytes": shown.usable_bytes,
        "limit": shown.limit,
        "setting": {
            "batchSize": config.batch_size,
            "accumulationSteps": config.accumulation_steps,
            "memoryBudget": config.memory_budget,
        },
        "fixed": [("Number format", formats), *(f for f in fixed if f[0] != "Precision")],
        "divided": shown.divided,
        "code": shown.code,
        "made": f"made by memlab {__version__}",
        "steps": [base64.b64encode(_packed(shown, one)).decode() for one in predictions],
    }


def _packed(shown: SavedStep, prediction: Prediction) -> bytes:
    config = prediction.result.config
    device = prediction.result.device
    return packed(prediction, known_frontier(shown.workload, config, device, seed=0), config)


def divided_words(workload: Workload) -> str:
    """Return what micro-batches do to the gradient of a workload; "" if nothing."""
    config = StepConfig(batch_size=2, accumulation_steps=2)
    facts, effect = inspect_workload(workload), accumulation_effect(workload)
    verdict = gradient_verdict(config, facts, effect)
    return "" if verdict.kind == GOOD else verdict.text


def as_document(payload: dict[str, Any], still: str) -> str:
    """Return a whole HTML file, which asks no other host for anything.

    Args:
        payload: of `payload_of`.
        still: the answer in words, for where no script runs.
    """
    title = html.escape(f"{payload['workload']} on {payload['device']}: memory of a step")
    data = json.dumps(payload, separators=(",", ":")).replace("<", "\\u003c")
    script = joined("app.js").replace("</script", "<\\/script")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{title}</title>'
        f"<style>{(PAGE / 'page.css').read_text('utf-8')}</style></head>"
        f'<body><div id="step"><p>{html.escape(still)}</p></div>'
        f'<script type="application/json" id="data">{data}</script>'
        f'<script type="module">\n{script}\n'
        "const root = document.getElementById('step');\n"
        "const link = { hash: location.hash, "
        "setHash: (hash) => history.replaceState(null, '', hash) };\n"
        "mount(root, JSON.parse(document.getElementById('data').textContent), link)"
        ".catch((error) => root.append(error.message));\n"
        "</script></body></html>\n"
    )
