"""The page: all widgets of the panel and their layout, and the methods that write to them."""

import functools
import html
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets as widgets

from memlab._panel import controls as guide
from memlab._panel import texts
from memlab._panel.cards_table import CardsTable
from memlab._panel.choices import OTHER, compared_cards, offered_card
from memlab._panel.controls import (
    RANKS,
    SLIDERS,
    ChoiceRow,
    Controls,
    ExplainedLine,
    SizeRow,
    close,
    on_enter,
    ranks_label,
)
from memlab._panel.pictures import Pictures
from memlab._panel.runs import Run, RunLog
from memlab._panel.state import SYMBOLS, WARN, Verdict
from memlab._panel.table import Table
from memlab._panel.texts import Line, more_label
from memlab.workload import Workload

# The button *Fit for me*, its *Undo*, and the list of what it has found.

MOST_FITTING, MOST_CLOSE = 5, 3
WHAT_IT_DOES = (
    "move the sliders to the fastest setting that fits the limit, by prediction: the batch size "
    "and what you chose stay, memory budget and accumulation are searched anew"
)


class FitPane:
    """Widgets alone; `runner.py` says what they show.

    Args:
        pressed: called when *Fit for me* is pressed.
        undo: called when *Undo* is pressed.
        use: called with the number of a row, from 0, when its button is pressed.

    Attributes:
        button: *Fit for me*.
        undo: beside it; invisible while there is nothing to undo.
        box: the list, of fixed height.
    """

    def __init__(
        self,
        pressed: Callable[[], None],
        undo: Callable[[], None],
        use: Callable[[int], None],
    ) -> None:
        self.button = widgets.Button(description="Fit for me", tooltip=WHAT_IT_DOES)
        self.button.add_class("memlab-fit-button")
        self.button.on_click(lambda _: pressed())
        self.undo = widgets.Button(
            description="Undo", tooltip="bring back the settings as they were before Fit for me"
        )
        self.undo.add_class("memlab-fit-button")
        self.undo.on_click(lambda _: undo())
        self._head, self._past, self._rest = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self._rows = [FitRow(at, use) for at in range(MOST_FITTING + MOST_CLOSE)]
        rows = [row.box for row in self._rows]
        self.box = widgets.VBox([self._head, self._past, *rows, self._rest])
        for name in ("memlab-answer", "memlab-fits"):
            self.box.add_class(name)
        self.show("Press Fit for me to search for the fastest setting that fits the limit.", "")
        self.offer_undo(False)

    def show_ready(self, ready: bool) -> None:
        """Allow *Fit for me*, or not."""
        self.button.disabled = not ready

    def offer_undo(self, possible: bool) -> None:
        """Show *Undo* while there is something to undo; its place stays."""
        self.undo.layout.visibility = "visible" if possible else "hidden"

    def show(
        self, answer: str, about: str, rows: Sequence[str] = (), notes: Sequence[str] = ()
    ) -> None:
        """Show an answer.

        Args:
            answer: in a sentence.
            about: what it is an answer to; "" for nothing.
            rows: a line for each setting, as HTML.
            notes: sentences on what was left alone.
        """
        self._head.value = f"<p><b>{html.escape(answer)}</b></p>" + (
            f"<p>{html.escape(about)}</p>" if about else ""
        )
        for at, row in enumerate(self._rows):
            row.show(rows[at] if at < len(rows) else "")
        items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
        self._rest.value = f"<p>Left alone:</p><ul>{items}</ul>" if items else ""

    def show_past(self, is_past: bool) -> None:
        """Say that the answer belongs to other settings than those on screen, or not."""
        text = "<p class='memlab-line-warn'>{} {}</p>"
        said = "found for other settings than those on screen: press Fit for me again"
        self._past.value = text.format(SYMBOLS[WARN], said) if is_past else ""

    def mark(self, here: int | None, *, allowed: bool) -> None:
        """Mark the row that is on screen, if one is, and enable the buttons, or not."""
        for at, row in enumerate(self._rows):
            row.button.disabled = not allowed
            (row.box.add_class if at == here else row.box.remove_class)("memlab-fits-here")


class FitRow:
    """A setting and the button that goes there.

    Args:
        at: its number, from 0.
        use: called with that number when the button is pressed.
    """

    def __init__(self, at: int, use: Callable[[int], None]) -> None:
        self.text = widgets.HTML()
        self.button = widgets.Button(description=f"use {at + 1}", tooltip="move the sliders there")
        self.button.on_click(lambda _: use(at))
        self.box = widgets.HBox([self.button, self.text])
        self.box.add_class("memlab-fits-row")

    def show(self, text: str) -> None:
        """Show the setting, as HTML; nothing for ""."""
        self.text.value = text
        self.box.layout.display = "" if text else "none"


def row_html(settings: str, price: str, *, is_close: bool) -> str:
    """Return the line of a setting; one that is too close to say is marked."""
    mark = ""
    if is_close:
        mark = (
            f'<span class="memlab-verdict memlab-{WARN}"><span aria-hidden="true">{SYMBOLS[WARN]}'
            "</span> too close to say</span> "
        )
    return f"{mark}<b>{html.escape(settings)}</b>: {html.escape(price)}"


# `BasePane`: what a quantized base saves and costs, cause by cause, with what would change
# it.

COMPARE = "Compare"
WHAT_A_BASE_DOES = (
    "predict this step with a base in bf16 too, and say what the quantized base saves and costs at "
    "the peak, why it may not help, and what would change that"
)
PAST = f"this is of other settings than those on screen: press {COMPARE} again"


class BasePane:
    """Widgets alone; `runner.py` says what they show.

    Args:
        ask: called when the pane is opened, and when *Compare* is pressed.
        use: called with the number of a row, from 0, when its button is pressed.

    Attributes:
        toggle: opens and closes the pane; it is there while the base on screen is quantized.
        box: of fixed height.
    """

    def __init__(self, ask: Callable[[], None], use: Callable[[int], None]) -> None:
        self._ask, self._use = ask, use
        self._base: str | None = None
        self.toggle = widgets.ToggleButton(tooltip=WHAT_A_BASE_DOES, layout={"display": "none"})
        self.toggle.observe(self._toggled, "value")
        self._head, self._past, self._parts = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self._parts.add_class("memlab-causes")
        self._compare = widgets.Button(description=COMPARE, tooltip=WHAT_A_BASE_DOES)
        self._compare.on_click(lambda _: ask())
        again = widgets.HBox([self._compare, self._past])
        again.add_class("memlab-base-again")
        self._rows: list[FitRow] = []
        self._above = (self._head, again, self._parts)
        self.box = widgets.VBox(self._above, layout={"display": "none"})
        for name in ("memlab-answer", "memlab-base"):
            self.box.add_class(name)
        self.show("Not compared yet.", "")

    def offer(self, base: str | None) -> None:
        """Offer the comparison of a quantized base; None if that on screen is not quantized.

        A pane that is open stays, and can be closed.
        """
        self._base = base
        if base is not None:
            self.toggle.description = f"what {base} saves"
        is_there = base is not None or self.toggle.value
        self.toggle.layout.display = "" if is_there else "none"

    def show(self, answer: str, about: str, parts: str = "", rows: Sequence[str] = ()) -> None:
        """Show an answer.

        Args:
            answer: in a sentence.
            about: what it is an answer to; "" for nothing.
            parts: the causes as HTML.
            rows: a line for each change that may help, as HTML.
        """
        self._head.value = f"<p><b>{html.escape(answer)}</b></p>" + (
            f"<p>{html.escape(about)}</p>" if about else ""
        )
        self._parts.value = parts
        while len(self._rows) < len(rows):
            self._rows.append(FitRow(len(self._rows), self._use))
            self.box.children = (*self._above, *(row.box for row in self._rows))
        for at, row in enumerate(self._rows):
            row.show(rows[at] if at < len(rows) else "")

    def mark(self, *, can_ask: bool, is_past: bool, usable: Sequence[bool]) -> None:
        """Grey what is of other settings than those on screen, and enable what can be pressed.

        Args:
            can_ask: whether there is something new to compare.
            is_past: whether the answer is of other settings.
            usable: for each row, whether it leads somewhere.
        """
        self._compare.disabled = not can_ask
        self._past.value = (
            f"<p class='memlab-line-warn'>{SYMBOLS[WARN]} {PAST}</p>" if is_past else ""
        )
        for part in (self._head, self._parts, *(row.text for row in self._rows)):
            (part.add_class if is_past else part.remove_class)("memlab-past")
        for row, leads in zip(self._rows, usable, strict=False):
            row.button.disabled = is_past or not leads

    def _toggled(self, change: Mapping[str, Any]) -> None:
        self.box.layout.display = "" if change["new"] else "none"
        if change["new"]:
            self._ask()
        else:
            self.offer(self._base)


RUN, KEEP = "Run", "Keep this prediction"


class View:
    """All widgets. It reports what a person does through the functions that it is given.

    Args:
        workload_names: the workloads to choose from.
        devices: the devices to choose from, as (shown, name).
        device: the device chosen at first.
        memory_limit: the first text of the limit box.
        settings: the first settings of the controls.
        log: the runs, shown in the table.
        changed: called after any change of a control.
        run: called when Run or *Keep this prediction* is pressed.
        entered: called when Enter is pressed in a box, for the same.
        stop: called when Stop is pressed.
        fit: the button *Fit for me*, and what it has found.
        base: what a quantized base saves and costs.
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
        entered: Callable[[], None],
        stop: Callable[[], None],
        fit: FitPane,
        base: BasePane,
    ) -> None:
        self._quiet, self._ready = True, False
        self._changed = changed
        self.workload = widgets.Dropdown(options=workload_names, description="Workload")
        self.device = widgets.Dropdown(options=devices, value=device, description="On")
        self.limit = widgets.Text(
            value=memory_limit, description="Limit", placeholder="none", continuous_update=True
        )
        self.card = widgets.Text(value="24 GiB", description="Memory", continuous_update=True)
        self.card.tooltip = "memory of any CUDA card, such as 24 GiB; its speed is not known"
        self.card.layout.display = "none"
        on_enter(self.limit, entered)
        self.controls = Controls(settings, self._tell, entered)
        self.size = SizeRow(self._tell, entered, self._set_others)
        self.choices = ChoiceRow(self._tell, self._set_others)
        self.check = widgets.Checkbox(description="check gradients", indent=False)
        self.pictures, self.fit, self.base = Pictures(), fit, base
        self.table = Table(log, changed)
        self.cards = CardsTable(compared_cards(), self._choose_card, changed)
        self.device.observe(self._offer_memory, "value")
        others = (self.workload, self.device, self.limit, self.card, self.check)
        for control in (*others, self.pictures.part):
            control.observe(lambda _: self._tell(), "value")
        self.pictures.ranks.on_choice(self._tell)

        self.workload.tooltip, self.device.tooltip, self.limit.tooltip, self.check.tooltip = map(
            guide.tooltip, ("workload", "device", "memory_limit", "check_gradients")
        )
        self._run_button, self._stop_button = _button(RUN, run), _button("Stop", stop)
        self._run_button.button_style = "primary"
        self._run_button.add_class("memlab-run")
        self._progress = widgets.FloatProgress(min=0, max=1)
        self._about, self._advice = (
            ExplainedLine(self._set_others),
            ExplainedLine(self.controls.set),
        )
        self._fit, self._costs, self._note = _html("fit"), _html("costs-box"), _html("note")
        self._failure = _html("failure")
        self._status, self._printed, self._json = _html("status"), _html("printed"), _html("json")
        self._code_pane, self._help_pane = _html("pane"), _html("pane", guide.page())
        what = "this step as code: by memlab, in plain PyTorch; this panel, and its runs as a table"
        self._code_toggle = _toggle("code", what, self._code_pane)
        self._code_toggle.observe(lambda _: self._tell(), "value")
        self._live = self._lay_out()
        gone = _html("gone", f"<div role='alert'>{texts.GONE}</div>")
        css = widgets.HTML(f"<style>{texts.CSS}</style>", layout={"display": "none"})
        self._root = widgets.VBox([css, gone, self._live])
        self._root.add_class("memlab-panel")
        self._quiet = False

    def _lay_out(self) -> Any:
        boxes = self.pictures.boxes
        controls = _box(
            widgets.VBox, "controls", self.choices.row,
            *(self.controls.sliders[field].row for field in SLIDERS), self.size.row,
            self.controls.precision_row(), *self._more(), self._run_row(),
            self._status, self._printed,
        )  # fmt: skip
        memory = _box(
            widgets.VBox, "memory", _box(widgets.VBox, "outlook", self._fit, self._costs),
            _line_row("advice", self._advice), boxes["peak"], boxes["timeline"],
            self.pictures.part, self._note,
        )  # fmt: skip
        details = _toggle(
            "what holds the peak", "a map of the peak, and what would lower it",
            self.pictures.details,
        )  # fmt: skip
        ranks = _toggle(
            "what each rank holds", "each rank at its peak and over the step, and what they send",
            self.pictures.ranks.box,
        )  # fmt: skip
        for toggle in (details, ranks):
            toggle.observe(lambda _: self._tell(), "value")
        self._fit_toggle = _toggle("what fits", "what Fit for me has found", self.fit.box)
        details_row = _box(
            widgets.HBox, "more-row", self._fit_toggle, details, ranks, self.base.toggle
        )  # fmt: skip
        details_row.add_class("memlab-panes")
        charts = _box(
            widgets.Box, "charts", boxes["step_times"], boxes["memory_against_time"],
            boxes["heat_map"],
        )  # fmt: skip
        return _box(
            widgets.VBox, "live", self._header(), self._failure, _line_row("about", self._about),
            self._code_pane, self._help_pane, _box(widgets.Box, "body", controls, memory),
            details_row, self.fit.box, self.pictures.details, self.pictures.ranks.box,
            self.base.box, charts, self.cards.box, self.table.box, self._json,
        )  # fmt: skip

    def _header(self) -> Any:
        about = _toggle("?", "help", self._help_pane)
        return _box(
            widgets.HBox, "header", self.workload, self.device, self.limit, self.card,
            self.fit.button, self.fit.undo, _box(widgets.HBox, "toggles", self._code_toggle, about),
        )  # fmt: skip

    def _more(self) -> tuple[Any, ...]:
        """Return the buttons of the folded controls, and their boxes."""
        controls = self.controls
        more, optimizer = controls.more_explained, controls.optimizer_explained
        upper = _box(widgets.HBox, "more", *controls.more, more.text, more.button)
        lower = _box(widgets.HBox, "more", *controls.of_optimizer, optimizer.text, optimizer.button)
        inside = _box(widgets.VBox, "more-rows", upper, lower)
        self._more_toggle = _toggle(
            "more",
            "show or hide checkpointing, optimizer, torch.compile, loss, offloading and others",
            inside,
        )

        ranks = _box(
            widgets.VBox, "more-rows", _box(widgets.HBox, "more", *controls.of_ranks),
            controls.sliders[RANKS].row,
        )  # fmt: skip
        self._ranks_toggle = _toggle(
            "ranks", "show or hide how several devices share a step", ranks
        )
        buttons = _box(widgets.HBox, "more-row", self._more_toggle, self._ranks_toggle)
        return buttons, inside, ranks

    def _run_row(self) -> Any:
        return _box(
            widgets.HBox, "run-row", self._run_button, self._stop_button, self.check,
            self._progress,
        )  # fmt: skip

    @property
    def device_name(self) -> str:
        """The device on screen: of this machine, of a card, or the memory that was typed."""
        name: str = self.device.value
        return self.card.value.strip() if name == OTHER else name

    def _offer_memory(self, change: Mapping[str, Any]) -> None:
        self.card.layout.display = "" if change["new"] == OTHER else "none"

    def set_others(self, fields: Mapping[str, Any]) -> None:
        """Set what is no field of a config, such as workload or device, without telling."""
        controls = {
            "workload": self.workload,
            "choices": self.choices,
            "sample_size": self.size,
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

    def offer_forms(self, workload: Workload) -> None:
        """Offer the sample sizes and choices of a workload, without telling."""
        self._quiet = True
        try:
            self.size.offer(workload.sample_size)
            self.choices.offer(workload.choices)
        finally:
            self._quiet = False

    def explain(self, lines: Mapping[str, Line]) -> None:
        """Show the line of each control, by field; "more" is that of the folded ones."""
        for field, row in self.controls.sliders.items():
            row.explanation.show(lines[field])
        self.controls.precision_explained.show(lines["precision"])
        self.controls.more_explained.show(lines["more"])
        self.controls.optimizer_explained.show(lines["optimizer"])
        settings = self.controls.settings()
        self._more_toggle.description = more_label(settings)
        self._ranks_toggle.description = ranks_label(settings)

    def show_about(self, line: Line) -> None:
        """Show what the workload is, or what is wrong with it or the limit."""
        self._about.show(line)

    def show_capacity(self, text: str) -> None:
        """Show the limit that counts while none is typed."""
        if self.limit.placeholder != text:
            self.limit.placeholder = text

    def show_advice(self, line: Line) -> None:
        """Show what to do about a step that does not fit."""
        self._advice.show(line)

    def show_ready(
        self, ready: bool, *, running: bool, by_cell: bool, keeps: bool = False, why: str = ""
    ) -> None:
        """Allow what can be pressed now; a press while a cell runs would come after it.

        Args:
            ready: whether the settings are allowed.
            running: whether a run goes on.
            by_cell: whether a cell has started it.
            keeps: whether the button keeps the prediction, because the device is not here.
            why: the tooltip of the button; "" for what it does.
        """
        self._run_button.description = KEEP if keeps else RUN
        self._run_button.disabled = not ready or (running and not keeps)
        self._run_button.tooltip = why or "measure one step (or Enter in a number box)"
        self._stop_button.disabled = by_cell or not running
        self._stop_button.tooltip = texts.RUN_BY_CELL if by_cell else "stop the run"

    def show_progress(self, fraction: float) -> None:
        """Move the progress bar."""
        self._progress.value = fraction

    def show_status(self, line: str) -> None:
        """Show the status line, as HTML."""
        _write(self._status, line)

    def show_printed(self, when: str, text: str) -> None:
        """Show what the model printed below a line that says when; "" for nothing."""
        _write(self._printed, f"<p>{when}</p><pre>{html.escape(text)}</pre>" if text else "")

    def open_fit(self) -> None:
        """Unfold what *Fit for me* finds, while it searches: nothing moves when it arrives."""
        self._fit_toggle.value = True

    def show_failure(self, failure: tuple[str, str] | None) -> None:
        """Show above everything else why the model cannot be trained: a title and a sentence."""
        if failure is None:
            _write(self._failure, "")
            return
        title, sentence = map(html.escape, failure)
        _write(self._failure, f'<div role="alert"><b>{title}</b><p>{sentence}</p></div>')

    def show_outlook(self, verdict: Verdict, costs: str) -> None:
        """Show whether the step fits the limit, and below it what it costs, as HTML."""
        _write(self._fit, verdict.html())
        _write(self._costs, costs)

    def show_stale(self, note: str) -> None:
        """Grey the picture of another setting and say what it is, or neither."""
        _write(self._note, f"<p>{html.escape(note)}</p>" if note else "")
        (self._live.add_class if note else self._live.remove_class)("memlab-stale")

    @property
    def is_code_open(self) -> bool:
        """Whether a person looks at the code."""
        is_open: bool = self._code_toggle.value
        return is_open

    def show_code(self, code: str) -> None:
        """Show the code of what is on screen, as HTML."""
        _write(self._code_pane, code)

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
        """Close every widget but one."""
        self._quiet = True
        _keep_one_open()
        self.table.close()
        close(self._root)

    def _choose_card(self, name: str) -> None:
        self._set_others({"device": name})

    def _set_others(self, fields: Mapping[str, object]) -> None:
        self.set_others(fields)
        self._changed()

    def _tell(self) -> None:
        if not self._quiet:
            self._changed()


@functools.cache
def _keep_one_open() -> Any:
    """Keep a widget open for as long as the kernel lives.

    JupyterLab ends the kernel's subshell for widgets when the last of them closes. A widget that
    opens at that moment may still send its messages there, so that nobody ever reads them.
    """
    return widgets.Layout()


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
