"""The widgets of `memlab.panel`; nothing else in memlab imports ipywidgets.

- `app.py`: `Panel`, which people hold. `view.py` arranges the widgets, `page.py` shows what is new.
- `controls.py` are the controls, `texts.py` the lines beside them, `state.py` the settings as plain
  values. `verdicts.py` judges: fits, gradients, outcome.
- `forecasts.py` predicts while sliders move; `job.py` and `runs.py` measure and keep the runs.
- `outlook.py`, `advice.py`, `table.py`, `pictures.py`: what is said, listed and drawn of them.

A choice or a checkbox for a setting needs nothing here: the `Control` of its technique makes it. To
add a slider, give the technique a `Control` whose `offered` is empty, then name the field in
`controls.SLIDERS` and `Controls.__init__` (its range), in `texts.lines` and `texts.wrong_line` (the
line beside it, and the value that its button sets), and in `state.DESCRIBED` and `state.describe`.
"""

from memlab._panel.app import Panel, panel

__all__ = ["Panel", "panel"]
