"""`StepView`: one result, or a step that `panel.save` wrote, to look at; nothing is run.

It is the page of `saved_page.py` as the HTML output of a cell, and no widget: so it needs no kernel
once it is shown, and is the same in a saved notebook, in what `nbconvert` writes, and in a file. Of
a file only data is read, and checked: it is shown by the page of this version.
"""

import base64
import html
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memlab import workloads
from memlab._panel import choices, state, table
from memlab._panel.asked import as_source
from memlab._panel.runs import RunLog
from memlab._panel.saved_page import (
    BEGINS,
    VERSION,
    SavedStep,
    as_document,
    file_for,
    mounted,
    payload_of,
    plain_table,
    still_of,
    write,
)
from memlab._util.checks import of_type, size
from memlab._util.units import format_bytes, shown
from memlab.errors import ConfigError, MemlabError
from memlab.prediction.step_file import packed_result, result_in
from memlab.result import Outcome, Source, StepResult
from memlab.store.sources import results_of_json

MOST_BYTES = 2**26  # of a file
ALLOWED = (
    "a Workload, a StepResult, a RunResult, or the path of a file that panel.save wrote, or a "
    "command of memlab with --json, for a step"
)
NO_RUNS = {"columns": (), "rows": ()}
ASK = {Source.MEASURED: "measure", Source.PREDICTED: "predict", Source.RECORDED: "recorded"}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class StepView:
    """A result to look at. Show it by making it the last line of a cell.

    Attributes:
        result: the `StepResult`. That of a saved step with sliders is of the setting with which it
            was saved, and without a timeline.
    """

    result: StepResult
    _payload: dict[str, Any]
    _limit_bytes: int | None

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write what is shown as one HTML file that works without a kernel; return its path.

        Where no script runs there is a picture of a result, and words alone of a saved step.

        Args:
            path: of the file, which is replaced if it exists.

        Raises:
            ConfigError: it cannot be written; the message says why.
        """
        file = file_for(path)
        write(file, as_document(self._payload, self._still))
        return file

    @property
    def _still(self) -> str:
        return still_of(self.result, self._limit_bytes, self._payload["runs"] or NO_RUNS)

    def __repr__(self) -> str:
        """Return one line."""
        return f"<memlab view of {self.result}>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """Return the page, which is a picture and a table where no script runs."""
        page = mounted(f"memlab-{uuid.uuid4().hex[:8]}", self._still, self._payload)
        return {"text/plain": repr(self), "text/html": page}

    def _mime_(self) -> tuple[str, str]:
        """Return a frame for marimo, which runs no script in an output."""
        page = as_document(self._payload, self._still, keeps_link=False)
        style = "width: 100%; height: 960px; border: 0"
        return "text/html", f'<iframe style="{style}" srcdoc="{html.escape(page)}"></iframe>'


def view(given: Any, memory_limit: int | str | None) -> StepView:
    """Return a view of a result, or of what a file holds.

    Args:
        given: a `StepResult`, or a path.
        memory_limit: the peak is compared with; None for that of the result or file.

    Raises:
        ConfigError: the file cannot be read, or holds something else; or the limit is no size.
    """
    size("memory_limit", memory_limit)
    if isinstance(given, StepResult):
        return _of_result(given, memory_limit)
    try:
        text = _text(Path(os.fsdecode(given)).expanduser())
        start = text.find(BEGINS)
        if start >= 0:
            page = json.JSONDecoder().raw_decode(text, start + BEGINS.index("{"))[0]
            return _of_page(page, memory_limit)
        return _of_result(_only(results_of_json(text)), memory_limit)
    except OSError as error:
        why = f"cannot be read ({error.strerror or error})"
    except UnicodeDecodeError:
        why = "holds no text"
    except MemlabError as error:
        why = str(error)
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        why = f"is damaged ({type(error).__name__}: {shown(str(error))})"
    raise ConfigError(f"workload={shown(given)} {why}; allowed is {_allowed(given)}") from None


def _allowed(given: Any) -> str:
    if given in workloads.names():
        return f"{ALLOWED}; you may mean memlab.workloads.get({given!r})"
    return ALLOWED


def _text(file: Path) -> str:
    if not file.is_file():
        raise OSError("it is no file" if file.exists() else "there is no such file")
    if (nbytes := file.stat().st_size) > MOST_BYTES:
        raise ConfigError(f"has {format_bytes(nbytes)}, more than {format_bytes(MOST_BYTES)}")
    text = file.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("<") and BEGINS not in text:
        raise ConfigError("is a page that panel.save did not write, or a damaged one")
    return text


def _only(results: list[StepResult]) -> StepResult:
    if len(results) != 1:
        raise ConfigError(f"holds {len(results)} results, and a view shows one")
    return results[0]


def _of_result(result: StepResult, memory_limit: int | str | None) -> StepView:
    limit = result.memory_limit_bytes if memory_limit is None else memory_limit
    limit_bytes = size("memory_limit", limit)
    peak, is_ok = result.counted_peak, result.outcome is Outcome.OK
    usable = result.usable_memory_bytes
    if usable and peak and is_ok and result.source is not Source.PREDICTED:
        usable = max(usable, peak.nbytes)  # what a device has held, it can hold
    device = result.device.removesuffix(f", {result.source}")
    relation = "for" if result.source is Source.PREDICTED else "on"
    words = choices.limit_text(limit)
    one = SavedStep(
        workload_name=result.workload_name,
        device=device,
        where=f"{result.source} {relation} {device}",
        config=result.config,
        limit=words,
        usable_bytes=usable,
        divided="",
        code=as_source(None, result.config, device, words, ask=ASK[result.source]),
    )
    title = f"{result.workload_name}: {state.OUTCOME_WORDS[result.outcome]}"
    # of a peak the page itself says whether it fits, since the limit can be changed there
    ended = peak is None or result.ended_before_its_peak
    fit = state.fit_verdict(result, limit_bytes) if ended else state.Verdict(state.OPEN, "")
    told = {
        "fit": fit.told,
        "failure": None if is_ok else {"title": title, "sentence": result.message},
        "notes": list(result.notes),
    }
    log = RunLog()
    log.add(result, limit_bytes=limit_bytes or usable)
    file = base64.b64encode(packed_result(result)).decode()
    payload = payload_of(one, [file], result.number_format, table.told(log), told=told)
    return StepView(result=result, _payload=payload, _limit_bytes=limit_bytes)


def _of_page(page: Mapping[str, Any], memory_limit: int | str | None) -> StepView:
    """Return what a page was given, as this version gives it."""
    if page["version"] > VERSION:
        raise ConfigError("was written by a newer memlab: update memlab to open it")
    steps = of_type("steps", page["steps"], list[str])
    results = [result_in(base64.b64decode(step, validate=True)) for step in steps]
    result = results[0]
    limit = of_type("limit", page["limit"], str)
    if memory_limit is not None:
        limit = choices.limit_text(memory_limit)
    if page["told"] is not None:
        return _of_result(result, limit or None)
    one = SavedStep(
        workload_name=result.workload_name,
        device=result.device,
        where=f"on {result.device}",
        config=result.config,
        limit=limit,
        usable_bytes=of_type("usableBytes", page["usableBytes"], int | None),
        divided=of_type("divided", page["divided"], str),
        code=of_type("code", page["code"], str),
    )
    runs = of_type("runs", page["runs"], Mapping | None) or NO_RUNS
    plain_table(runs)  # or it is damaged
    runs_of_steps = of_type("comparable", page["comparable"], list[int])
    payload = payload_of(one, steps, result.number_format, runs, comparable=runs_of_steps)
    return StepView(result=result, _payload=payload, _limit_bytes=None)
