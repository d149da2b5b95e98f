"""The widgets of `memlab.panel`; nothing else in memlab imports ipywidgets.

- `app.py`: `Panel`, which people hold. `view.py` arranges the widgets, `page.py` shows what is new.
- `controls.py` are the controls, `texts.py` the lines beside them, `state.py` the settings as plain
  values and the judgements in words, `asked.py` all that is on screen. `choices.py`: the workloads,
  devices and limits that can be chosen.
- `questions.py` predicts while sliders move, and ahead while they rest.
- `runner.py` starts a run, *Fit for me* and the comparison of a quantized base; `job.py` measures,
  `runs.py` keeps the runs and `table.py` shows them.
- `outlook.py`, `pictures.py`: what is said and drawn of them. `cards_table.py`: the setting on
  screen on several cards. `panel.css`, `access.js`, `help.toml`: what the browser is given.
- `saved_page.py`: a step as a page without a kernel; `page/` is its JavaScript, which `joined.py`
  makes one module.

A choice or a checkbox for a setting needs nothing here: the `Control` of its technique makes it. To
add a slider, give the technique a `Control` whose `offered` is empty, then name the field in
`controls.SLIDERS` and `Controls.__init__` (its range), in `texts.lines` and `texts.wrong_line` (the
line beside it, and the value that its button sets), and in `state.DESCRIBED` and `state.describe`.
"""

from memlab._panel.app import Panel, panel

__all__ = ["Panel", "panel"]
