"""The page: all widgets of the panel and their layout, and the methods that write to them."""

import html
import json
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as widgets

from memlab._panel import style
from memlab._panel.choices import OTHER, offered_card
from memlab._panel.controls import Controls, ExplainedLine, on_enter
from memlab._panel.pictures import Pictures
from memlab._panel.runs import Run, RunLog
from memlab._panel.table import Table
from memlab._panel.texts import Line, more_label
from memlab._panel.verdicts import Verdict

HELP = """<p><b>A step</b> is one optimizer update: forward and backward over each micro-batch, then
the optimizer. <b>Run</b> (or Enter in a number box) measures it in a separate process: one pass
measures memory from every allocation, and another pass measures time without any meter.</p>
<p><b>Allocated</b> is the bytes of live tensors; <b>reserved</b>, on CUDA, is what the caching
allocator holds. The peak is that of a step in which the optimizer state exists.</p>
<p>Before you press Run, and for cards that are not in this machine, the same numbers are
<b>predicted</b>: another process runs the same step on tensors without data. While you move a
slider the numbers are interpolated between predictions, and an exact prediction follows. ± is the
uncertainty. After a run the measured line is drawn over the prediction, and <b>error</b> is
predicted divided by measured, minus one.</p>
<p>At the same batch size, <b>accumulation</b> splits the work and does not change the gradient,
unless a module draws random numbers or mixes samples. <b>Pin</b> keeps a run and names it;
<b>compare</b> draws the last run against it. <code>panel.result</code>, <code>panel.results</code>
and <code>panel.code()</code> give the same numbers to your code.</p>"""


class View:
    """All widgets. It reports what a person does through `changed`, `run` and `stop`.

    Args:
        workload_names: the workloads to choose from.
        devices: the devices to choose from, as (shown, name).
        device: the device chosen at first.
        memory_limit: the first text of the limit box.
        settings: the first settings of the controls.
        log: the runs, shown in the table.
        changed: called after any change of a control.
        run: called when Run or Enter is pressed.
        stop: called when Stop is pressed.
    """

    def __init__(
        self,
        *,
        workload_names: list[str],
        devices: list[tuple[str, str]],
        device: str,
        memory_limit: str,
        settings: Mapping[str, Any],
        log: RunLog,
        changed: Callable[[], None],
        run: Callable[[], None],
        stop: Callable[[], None],
    ) -> None:
        self._quiet, self._ready = True, False
        self._changed = changed
        self.workload = widgets.Dropdown(options=workload_names, description="Workload")
        self.device = widgets.Dropdown(options=devices, value=device, description="On")
        self.limit = widgets.Text(
            value=memory_limit, description="Limit", placeholder="none", continuous_update=True
        )
        self.limit.tooltip = (
            "bytes that the step may hold, such as 2 GiB; empty for no limit. On a CPU it limits "
            "allocated bytes, on CUDA reserved bytes. For a card that is not in this machine it "
            "starts at what PyTorch can reserve there: the card's memory without the CUDA context"
        )

        self.card = widgets.Text(value="24 GiB", description="Memory", continuous_update=True)
        self.card.tooltip = "memory of any CUDA card, such as 24 GiB; its speed is not known"
        self.card.layout.display = "none"
        on_enter(self.limit, run)
        self.controls = Controls(settings, self._tell, run)
        self.check = widgets.Checkbox(description="check gradients", indent=False)
        self.check.tooltip = "after the run, compare the gradients with those of the plain step"
        self.pictures = Pictures()
        self.table = Table(log, changed)
        self.device.observe(self._offer_memory, "value")
        for control in (self.workload, self.device, self.limit, self.card, self.check):
            control.observe(lambda _: self._tell(), "value")

        self._run_button, self._stop_button = _button("Run", run), _button("Stop", stop)
        self._run_button.button_style = "primary"
        self._progress = widgets.FloatProgress(min=0, max=1)
        self._about, self._advice = (
            ExplainedLine(self._set_header),
            ExplainedLine(self.controls.set),
        )
        self._fit, self._costs, self._note = _html("fit"), _html("costs-box"), _html("note")
        self._status, self._json = _html("status"), _html("json")
        self._code_pane, self._help_pane = _html("pane"), _html("pane", HELP)
        self._live = self._lay_out()
        gone = _html("gone", f"<div role='alert'>{style.GONE}</div>")
        css = widgets.HTML(f"<style>{style.CSS}</style>", layout={"display": "none"})
        self._root = widgets.VBox([css, gone, self._live])
        self._root.add_class("memlab-panel")
        self.say("ready")
        self._quiet = False

    def _lay_out(self) -> Any:
        boxes = self.pictures.boxes
        memory = _box(widgets.VBox, "memory", boxes["peak"], boxes["timeline"], self._note)
        pictures = _box(
            widgets.Box, "pictures", memory, boxes["step_times"], boxes["memory_against_time"],
            boxes["heat_map"], self.table.box,
        )  # fmt: skip
        return _box(
            widgets.VBox, "live", self._header(), _line_row("about", self._about),
            self._code_pane, self._help_pane,
            *(row.row for row in self.controls.sliders.values()), self.controls.precision_row(),
            *self._more(), self._run_row(), self._status, _line_row("advice", self._advice),
            pictures, self._json,
        )  # fmt: skip

    def _header(self) -> Any:
        code = _toggle("code", "the Python code of what is on screen", self._code_pane)
        about = _toggle("?", "help", self._help_pane)
        return _box(
            widgets.HBox, "header", self.workload, self.device, self.limit, self.card,
            _box(widgets.HBox, "toggles", code, about),
        )  # fmt: skip

    def _more(self) -> tuple[Any, Any]:
        """Return the button of the folded controls, and their box."""
        controls = self.controls
        more, optimizer = controls.more_explained, controls.optimizer_explained
        upper = _box(widgets.HBox, "more", *controls.more, more.text, more.button)
        lower = _box(widgets.HBox, "more", *controls.of_optimizer, optimizer.text, optimizer.button)
        inside = _box(widgets.VBox, "more-rows", upper, lower)
        self._more_toggle = _toggle(
            "more",
            "checkpointing, who plans the budget, optimizer, torch.compile, loss, offloading",
            inside,
        )

        return _box(widgets.HBox, "more-row", self._more_toggle), inside

    def _run_row(self) -> Any:
        return _box(
            widgets.HBox, "run-row", self._run_button, self._stop_button, self.check,
            self._progress, _box(widgets.VBox, "outlook", self._fit, self._costs),
        )  # fmt: skip

    @property
    def device_name(self) -> str:
        """The device on screen: of this machine, of a card, or the memory that was typed."""
        name: str = self.device.value
        return self.card.value.strip() if name == OTHER else name

    def _offer_memory(self, change: Mapping[str, Any]) -> None:
        self.card.layout.display = "" if change["new"] == OTHER else "none"

    def set_others(self, fields: Mapping[str, Any]) -> None:
        """Set workload, device, memory_limit or check_gradients, without telling of each."""
        controls = {
            "workload": self.workload,
            "device": self.device,
            "memory_limit": self.limit,
            "check_gradients": self.check,
        }
        self._quiet = True
        try:
            for name, value in fields.items():
                if name == "device" and value not in dict(self.device.options).values():
                    self.device.options = (*self.device.options, offered_card(value))
                controls[name].value = value
        finally:
            self._quiet = False

    def explain(self, lines: Mapping[str, Line]) -> None:
        """Show the line of each control, by field; "more" is that of the folded ones."""
        for field, row in self.controls.sliders.items():
            row.explanation.show(lines[field])
        self.controls.precision_explained.show(lines["precision"])
        self.controls.more_explained.show(lines["more"])
        self.controls.optimizer_explained.show(lines["optimizer"])
        self._more_toggle.description = more_label(self.controls.settings())

    def show_about(self, line: Line) -> None:
        """Show what the workload is, or what is wrong with it or the limit."""
        self._about.show(line)

    def show_advice(self, line: Line) -> None:
        """Show what to do about a step that does not fit."""
        self._advice.show(line)

    def show_ready(self, ready: bool, *, running: bool, by_cell: bool, why: str = "") -> None:
        """Allow what can be pressed now; a press while a cell runs would come after it."""
        self._run_button.disabled = running or not ready
        self._run_button.tooltip = why or "measure one step (or Enter in a number box)"
        self._stop_button.disabled = by_cell or not running
        self._stop_button.tooltip = style.RUN_BY_CELL if by_cell else "stop the run"

    def show_progress(self, fraction: float) -> None:
        """Move the progress bar."""
        self._progress.value = fraction

    def say(self, text: str, kind: str = "") -> None:
        """Show a sentence in the status line, coloured and marked as a verdict if it is one."""
        shown = Verdict(kind, text).html() if kind else html.escape(text)
        title = html.escape(text)
        _write(self._status, f'<div role="status" aria-live="polite" title="{title}">{shown}</div>')

    def show_outlook(self, verdict: Verdict, costs: str) -> None:
        """Show whether the step fits the limit, and below it what it costs, as HTML."""
        _write(self._fit, verdict.html())
        _write(self._costs, costs)

    def show_stale(self, note: str) -> None:
        """Grey the picture of another setting and say what it is, or neither."""
        _write(self._note, f"<p>{html.escape(note)}</p>" if note else "")
        (self._live.add_class if note else self._live.remove_class)("memlab-stale")

    def show_code(self, source: str) -> None:
        """Show the code of what is on screen."""
        _write(self._code_pane, f"<pre>{html.escape(source)}</pre>")

    def show_json(self, run: Run) -> None:
        """Write the last run as JSON where a program can read it on the page."""
        data = run.result.to_dict()
        del data["timeline"]
        text = html.escape(json.dumps({"run": run.number, **data}))
        _write(self._json, f"<code class='memlab-json'>{text}</code>")

    def mimebundle(self) -> dict[str, Any]:
        """Return how the widgets are shown."""
        return dict(self._root._repr_mimebundle_() or {})

    def close(self) -> None:
        """Close every widget with its layout and style, which ipywidgets does not."""
        self._quiet = True
        self.table.close()
        _close(self._root)

    def _set_header(self, fields: Mapping[str, object]) -> None:
        self.set_others(fields)
        self._changed()

    def _tell(self) -> None:
        if not self._quiet:
            self._changed()


def _html(name: str, content: str = "") -> Any:
    made = widgets.HTML(content)
    made.add_class(f"memlab-{name}")
    return made


def _box(kind: Any, name: str, *children: Any) -> Any:
    made = kind(list(children))
    made.add_class(f"memlab-{name}")
    return made


def _line_row(name: str, explanation: ExplainedLine) -> Any:
    """Return a line of fixed height over the whole width, its remedy at the end."""
    explanation.text.add_class(f"memlab-{name}")
    return _box(widgets.HBox, "line-row", explanation.text, explanation.button)


def _button(name: str, pressed: Callable[[], None]) -> Any:
    made = widgets.Button(description=name)
    made.on_click(lambda _: pressed())
    return made


def _toggle(name: str, tooltip: str, pane: Any) -> Any:
    """Return a button that shows and hides a pane."""
    pane.layout.display = "none"
    made = widgets.ToggleButton(description=name, tooltip=tooltip)

    def show(change: Mapping[str, Any]) -> None:
        pane.layout.display = "" if change["new"] else "none"

    made.observe(show, "value")
    return made


def _write(widget: Any, content: str) -> None:
    if widget.value != content:  # what is on the page already is not sent again
        widget.value = content


def _close(widget: Any) -> None:
    for child in getattr(widget, "children", ()):
        _close(child)
    for part in ("style", "layout"):
        if (made := getattr(widget, part, None)) is not None:
            made.close()
    widget.close()
