"""A step as a page that lives without a kernel: recorded steps, the page's script, and its style.

`page/app.js` describes what the page is given. What it computes is in the recorded steps: batch
size, accumulation and memory budget, as far as these cover them. A page of one result holds that
instead, and moves nothing.
"""

from __future__ import annotations

import base64
import html
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlab import plots
from memlab._panel import catalog, choices, state, table
from memlab._panel.job import Latest
from memlab._panel.joined import PAGE, joined
from memlab._panel.questions import Question
from memlab._panel.state import describe
from memlab._util.tables import columns_table
from memlab._util.units import shown as shown_value
from memlab._version import __version__
from memlab.api import accumulation_effect, inspect_workload, predict_with_size_model
from memlab.config import StepConfig
from memlab.errors import ConfigError
from memlab.prediction.plans import known_frontier
from memlab.prediction.step_file import packed
from memlab.result import Outcome, Source, StepResult, outcome_checked
from memlab.runtime import isolation
from memlab.techniques import registry
from memlab.techniques.registry import CONTROLS

if TYPE_CHECKING:
    from memlab._panel.asked import Asked, Shown
    from memlab._panel.page import Page
    from memlab._panel.runs import Run, RunLog
    from memlab.prediction.predict import Prediction
    from memlab.workload import Workload

FORMAT, VERSION = "memlab page", 1
BEGINS = f'mount(root, {{"format":"{FORMAT}"'  # what a page is given, in its script


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedStep:
    """What a page shows.

    Attributes:
        workload_name: of the step.
        device: its name, such as "t4".
        where: on what, in words.
        config: on screen.
        limit: as typed; "" for what the device can hold.
        usable_bytes: that a step can hold there; None if it is not known.
        divided: what micro-batches do to the gradient, in words; "" if nothing.
        code: that makes this step.
    """

    workload_name: str
    device: str
    where: str
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
    for other in choices.covering(config):
        if not registry.is_refused(other, kind):
            more = predict_with_size_model(workload, other, device)
            if more.result.outcome is Outcome.OK:
                found.append(more)
    return [one for one in found if one.size_model is not None]


def payload_of(
    shown: SavedStep,
    steps: Sequence[str],
    number_format: str,
    runs: Mapping[str, Any],
    *,
    comparable: Sequence[int] = (),
    told: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what the page is given, as plain JSON types.

    Args:
        shown: the step.
        steps: files of it and of its relatives, in base64; or the file of one result.
        number_format: of its model.
        runs: the table of runs, as `table.told` returns it.
        comparable: numbers of runs that the steps tell of.
        told: what is said of a result; None for a step that sliders move.
    """
    config, default = shown.config, StepConfig()
    fixed = [
        (control.label, control.in_words(getattr(config, field)))
        for field, control in CONTROLS.items()
        if field != "precision"
        and (
            told if field in catalog.SLIDERS else getattr(config, field) != getattr(default, field)
        )
    ]
    what = "one result" if told else "a recorded step, computed in this page"
    return {
        "format": FORMAT,
        "version": VERSION,
        "workload": shown.workload_name,
        "device": shown.device,
        "where": shown.where,
        "usableBytes": shown.usable_bytes,
        "limit": shown.limit,
        "setting": state.on_sliders(config),
        "controls": [{**catalog.control(f, "slider"), "tooltip": ""} for f in catalog.SLIDERS],
        "fixed": [("Number format", number_format), *fixed],
        "divided": shown.divided,
        "code": shown.code,
        "made": f"made by memlab {__version__}: {what}; no kernel runs",
        "steps": list(steps),
        "runs": runs if runs["rows"] else None,
        "comparable": list(comparable),
        "told": told,
    }


def comparable(log: RunLog, shown: SavedStep) -> list[int]:
    """Return which runs of this panel the recorded steps of a page tell of."""
    here = Question(shown.workload_name, shown.config, shown.device).relatives
    return [run.number for run in log.own if Question.of(run.result).relatives == here]


def files_of(workload: Workload, predictions: Sequence[Prediction]) -> list[str]:
    """Return the files of predictions in base64."""
    found = []
    for one in predictions:
        config, device = one.result.config, one.result.device
        frontier = known_frontier(workload, config, device, seed=0)
        found.append(base64.b64encode(packed(one, frontier, config)).decode())
    return found


def divided_words(workload: Workload) -> str:
    """Return what micro-batches do to the gradient of a workload; "" if nothing."""
    return state.divided_words(inspect_workload(workload), accumulation_effect(workload))


def as_document(payload: dict[str, Any], still: str, *, keeps_link: bool = True) -> str:
    """Return a whole HTML file, which asks no other host for anything.

    Args:
        payload: of `payload_of`.
        still: what is shown where no script runs, as HTML.
        keeps_link: whether the address of the page holds the settings.
    """
    title = f"{payload['workload']} on {payload['device']}: memory of a step"
    return document(title, mounted("ml", still, payload, keeps_link=keeps_link))


def document(title: str, body: str) -> str:
    """Return an HTML file.

    Args:
        title: as text.
        body: as HTML, with its style and scripts.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{html.escape(title)}</title>'
        f"</head><body>{body}</body></html>\n"
    )


def mounted(name: str, still: str, payload: dict[str, Any], *, keeps_link: bool = False) -> str:
    """Return an element and the script that shows a step in it.

    The script leaves it to a panel that lives on the same page and hides it.

    Args:
        name: id of the element, with which those of its parts begin.
        still: what it holds where no script runs, as HTML.
        payload: of `payload_of`.
        keeps_link: whether the address of the page holds the settings.
    """
    data, script = in_script(payload), script_of("app.js")
    link = (
        "{ hash: location.hash, setHash: (hash) => history.replaceState(null, '', hash) }"
        if keeps_link
        else "undefined"
    )
    return (
        f"<style>{(PAGE / 'page.css').read_text('utf-8')}</style>"
        f'<div id="{name}" class="ml-still">{still}</div>'
        f'<script type="module">\n{script}\n'
        # a notebook that is shown twice, or copied, has the element twice
        f"for (const root of document.querySelectorAll('#{name}:not([data-lives])')) {{\n"
        f"  if (document.querySelector('[data-hides={name}]')) continue;\n"
        "  root.dataset.lives = '';\n"
        f"  mount(root, {data}, {link})\n"
        "    .catch((error) => root.append(error.message));\n"
        "}\n"
        "</script>"
    )


def in_script(payload: Mapping[str, Any]) -> str:
    """Return plain JSON types as a literal for a script in a page."""
    return json.dumps(payload, separators=(",", ":")).replace("<", "\\u003c")


def script_of(entry: str) -> str:
    """Return a file of the page with all that it imports, for a script in a page."""
    return joined(entry).replace("</script", "<\\/script")


# What a saved notebook keeps of a panel: the step, which lives there too, and its runs.

EMPTY = "memlab panel: nothing is known yet. With a kernel, run this cell again."
REST_SECONDS = 1.0  # that settings rest before the output is renewed
PICTURE_SIZE = (9.0, 4.0)


class Still:
    """The output of a panel that a notebook saves, renewed in a thread once something is new.

    Args:
        asked: the settings on screen.
        page: knows what is predicted for them.
        log: of the runs.
        name: id of the element in it.
    """

    def __init__(self, asked: Asked, page: Page, log: RunLog, name: str) -> None:
        self._asked, self._page, self._log, self._name = asked, page, log, name
        self._output: Shown | None = None
        self._shown: object = None  # what it shows, to be compared
        self._renew = Latest(self._renew_after_rest)

    def show(self, plain: Mapping[str, str], display: Callable[[Mapping[str, Any]], Shown]) -> None:
        """Show what is known by now as an output of the running cell.

        Args:
            plain: the rest of its MIME bundle.
            display: shows it and returns the output.
        """
        self._plain, self._shown = plain, self._key
        self._output = display({**plain, "text/html": self.html()})

    def renew(self) -> None:
        """Renew the output soon, if what is on screen or on the table is new."""
        if self._output is not None and self._key != self._shown:
            self._renew()

    def close(self) -> None:
        """Renew nothing more."""
        self._renew.close()

    @property
    def _key(self) -> object:
        runs = [(run.number, run.name, run.report, run.prediction) for run in self._log.visible]
        is_known = self._result is not None  # a failure has no steps
        return self._asked.question, self._asked.limit, self._page.steps, is_known, runs

    def renew_now(self) -> None:
        """Renew the output at once, for code after which the kernel may end."""
        with self._page.guarded():
            key = self._key
            if self._output is None or self._result is None or key == self._shown:
                return
            bundle = {**self._plain, "text/html": self.html()}
            if not isolation.leaving.is_set():  # else it would be lost, or spoil other messages
                self._output.update(bundle, raw=True)
                self._shown = key

    def _renew_after_rest(self, _: object) -> None:
        with self._page.guarded():
            key = self._key
            time.sleep(REST_SECONDS)
            if self._key == key:
                self.renew_now()

    @property
    def _result(self) -> StepResult | None:
        """The run or prediction on screen, be it a failure, or else the last run."""
        now = self._page.outlook()
        found = now.run.result if now.run else now.predicted or now.failure
        return found or (now.last.result if now.last else None)

    def html(self) -> str:
        """Return the output: the step where scripts run, else a picture, and the table of runs."""
        payload, result = self.payload(), self._result
        still = self.of(result) if result else f"<p>{html.escape(EMPTY)}</p>"
        if payload is None:
            return f'<div id="{self._name}" class="ml-still">{still}</div>'
        return mounted(self._name, still, payload)

    def of(self, result: StepResult) -> str:
        """Return a result as HTML for where no script runs: in words, a picture, and all runs."""
        compared = self._log.compared_run
        beside = None if compared is None or compared.result is result else compared
        return still_of(result, self._asked.limit, table.told(self._log), beside)

    def payload(self) -> dict[str, Any] | None:
        """Return what a page without a kernel is given; None while no step is recorded."""
        result, steps = self._result, self._page.step_files()
        if result is None or not steps:
            return None
        return self.payload_with(steps, result.number_format, self._page.divided)

    def payload_with(
        self, steps: Sequence[str], number_format: str, divided: str
    ) -> dict[str, Any]:
        """Return what a page of the settings on screen is given.

        Args:
            steps: files of the step and of its relatives, as `files_of` returns them.
            number_format: of its model.
            divided: what micro-batches do to the gradient, in words; "" if nothing.
        """
        device = choices.name_of(self._asked.device)
        shown = SavedStep(
            workload_name=self._asked.workload.name,
            device=device,
            where=f"on {device}",
            config=self._asked.config,
            limit=self._asked.limit_text,
            usable_bytes=self._asked.capacity,
            divided=divided,
            code=self._asked.source(),
        )
        return payload_of(
            shown,
            steps,
            number_format,
            table.told(self._log),
            comparable=comparable(self._log, shown),
        )


def still_of(
    result: StepResult, limit_bytes: int | None, runs: Mapping[str, Any], beside: Run | None = None
) -> str:
    """Return a result in words, as a picture, and the table of runs, as HTML without scripts.

    Args:
        result: of the step; it may have no timeline, and then there is no picture.
        limit_bytes: that the picture shows.
        runs: the table of runs, as `table.told` returns it.
        beside: a run that the picture compares it with.
    """
    where = "predicted for" if result.source is Source.PREDICTED else "on"
    title = f"{result.workload_name}, {where} {result.device}: {describe(result)}"
    said = f"<p><b>{html.escape(title)}</b></p><p>{html.escape(result.message)}</p>"
    if result.timeline is None or not len(result.timeline):
        return f"{said}{plain_table(runs)}"
    figure = plots.timeline(
        result,
        limit_bytes=limit_bytes,
        size=PICTURE_SIZE,
        compare=beside.result if beside else None,
        compare_label=beside.label if beside else "",
    )
    picture = base64.b64encode(plots.to_png(figure)).decode()
    image = f'<img alt="{html.escape(str(result))}" src="data:image/png;base64,{picture}">'
    return f"{said}{image}{plain_table(runs)}"


def plain_table(runs: Mapping[str, Any]) -> str:
    """Return the table of runs as HTML without style; "" without a run."""
    heads = [column["name"] for column in runs["columns"]]
    rows = [
        [cell if isinstance(cell, str) else cell["text"] for cell in row["cells"]]
        for row in reversed(runs["rows"])
    ]
    return columns_table(heads, rows)
