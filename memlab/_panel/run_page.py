"""The answer to `memlab run` as a page: the verdict, the timeline, the tables, what is wrong.

It asks no other host. Where scripts run, its timeline can be pointed at and zoomed; where they do
not, it is a picture. In a notebook `RunView` shows the same.
"""

import os
import uuid
from dataclasses import dataclass
from html import escape
from pathlib import Path

from memlab import plots
from memlab._panel.joined import PAGE
from memlab._panel.saved_page import document, file_for, in_script, script_of, write
from memlab._util.tables import columns_table
from memlab._util.units import format_bytes, format_seconds, plus_minus
from memlab.prediction.run_result import RunResult, RunTimeline
from memlab.result import FitStatus, Outcome

STYLE = """
.ml-run { --jp-ui-font-color1: var(--ml-ink); --jp-layout-color1: var(--ml-paper);
          padding: 12px 16px 32px; overflow-wrap: break-word; }
.ml-run h1 { font-size: 18px; margin: 0 0 4px; overflow-wrap: anywhere; }
.ml.ml-run h2 { margin: 20px 0 6px; }
.ml-run td:first-child { min-width: 11ch; overflow-wrap: anywhere; }
.ml-run td:nth-child(2) { white-space: nowrap; }
@media (max-width: 480px) { .ml.ml-run :is(td, th) { padding: 3px 4px; } }
.ml-run .ml-verdict { font-size: 15px; font-weight: 600; max-width: 110ch; }
.ml-run .ml-chart { height: clamp(240px, 40vh, 420px); }
.ml-run ul { margin: 0; padding-left: 18px; max-width: 110ch; }
.ml-run li { margin-bottom: 4px; }
.ml-tables { display: grid; gap: 18px 28px; margin-top: 18px; align-items: start;
             grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); }
"""
COLOURS = {FitStatus.FITS: "ml-good", FitStatus.TOO_CLOSE: "ml-warn",
           FitStatus.DOES_NOT_FIT: "ml-bad"}  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RunView:
    """A run to look at. Show it by making it the last line of a cell.

    Attributes:
        result: the `RunResult`.
    """

    result: RunResult

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page that `memlab run --html` writes; return its path.

        Args:
            path: of the file, which is replaced if it exists.

        Raises:
            ConfigError: it cannot be written; the message says why.
        """
        file = file_for(path)
        write(file, run_page(self.result))
        return file

    def __repr__(self) -> str:
        """Return one line."""
        return f"<memlab view of {self.result}>"

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        """Return the page, whose timeline is a picture where no script runs."""
        page = _body(self.result, f"memlab-{uuid.uuid4().hex[:8]}")
        return {"text/plain": repr(self), "text/html": page}


def run_page(result: RunResult) -> str:
    """Return what a run holds as one HTML file."""
    body = f"<style>body {{ margin: 0; }}</style>{_body(result, 'timeline')}"
    return document(f"{_title(result)}: memory of a run", body)


def _title(result: RunResult) -> str:
    return f"{result.workload_name}, {result.source} for {result.device}"


def _body(result: RunResult, name: str) -> str:
    """Return what a run holds as HTML, with its timeline in an element of this id."""
    is_ok, stages = result.outcome is Outcome.OK, [stage.fit for stage in result.stages]
    worst = next((fit for fit in reversed(FitStatus) if fit in stages), None)
    colour = COLOURS.get(worst, "") if is_ok and worst else "" if is_ok else "ml-bad"
    tables = "".join(columns_table(heads, rows) for heads, *rows in result.tables())
    return (
        f"<style>{(PAGE / 'page.css').read_text('utf-8')}{STYLE}</style>"
        f'<main class="ml ml-run"><h1>{escape(_title(result))}</h1>'
        f'<p class="ml-verdict {colour}">{escape(str(result))}</p>'
        f'<p class="ml-quiet">{escape(_facts(result))}</p>'
        f"{_timeline(result, result.timeline, name) if result.timeline else ''}"
        f'<div class="ml-plain ml-tables">{tables}</div>'
        f"{_listed('What is wrong in it', result.faults)}"
        f"{_listed('What is assumed, and what to know', result.notes)}</main>"
    )


def _facts(result: RunResult) -> str:
    facts = []
    if result.step_seconds is not None:
        about = plus_minus(result.seconds_uncertainty)
        facts.append(f"{format_seconds(result.step_seconds)}{about} a step without loading data")
    if result.uncertainty:
        facts.append(f"peaks{plus_minus(result.uncertainty)}")
    facts += [f"{name} {result.versions[name]}" for name in ("torch", "memlab")
              if name in result.versions]  # fmt: skip
    return ", ".join(facts)


def _timeline(result: RunResult, timeline: RunTimeline, name: str) -> str:
    """Return the timeline as a picture, and the script that puts a chart in its place."""
    stage = timeline.stages[int(timeline.stage[timeline.peak_index])]
    peak = format_bytes(int(timeline.total_bytes.max()))
    label = f"Allocated memory over the run: peak {peak} in {stage}"
    if result.memory_limit_bytes:
        label += f", limit {format_bytes(result.memory_limit_bytes)} on {result.device}"
    payload = {
        "timeline": timeline.to_dict(),
        "limitBytes": result.memory_limit_bytes,
        "device": result.device,
        "label": f"{label}. Arrow keys read it.",
    }
    picture = plots.to_svg(plots.run_timeline(result), label=label)
    return (
        f'<div id="{name}">{picture}</div><script type="module">\n{script_of("run.js")}\n'
        # an output that is shown twice has the element twice
        f'for (const root of document.querySelectorAll("#{name}:not(.ml-chart)"))\n'
        f"  mount(root, {in_script(payload)});\n</script>"
    )


def _listed(head: str, items: tuple[object, ...]) -> str:
    rows = "".join(f"<li>{escape(str(item))}</li>" for item in items)
    return f"<h2>{head}</h2><ul>{rows}</ul>" if rows else ""
