"""The widgets of `memlab.panel` and `memlab.live_sweep`; nothing else in memlab imports ipywidgets.

- `app.py`: `Panel`, which people hold. `view.py` arranges the widgets, `page.py` shows what is new.
- `controls.py` are the controls, `texts.py` the lines beside them, `state.py` the settings as plain
  values, `asked.py` all that is on screen. `verdicts.py` judges: fits, gradients, outcome.
  `size_row.py` is the slider of the sample size, which makes another workload: `made_sizes.py`.
  `rank_lines.py` explains the ranks that share a step, `rank_pane.py` shows what each holds.
- `forecasts.py` predicts while sliders move, and ahead while they rest: `requests.py` asks for it,
  `neighbours.py` says what may come next. `answers.py` keeps the answers, `estimating.py` says what
  they mean for other settings.
- `runner.py` starts a run, `job.py` measures, `runs.py` keeps it; `keeping.py` turns a prediction
  into a run. `idle_garbage.py` has Python look for garbage while nothing moves.
- `fitting.py` is *Fit for me*: where it moves the sliders, and what it says of it. `fit_pane.py` is
  its button and its list. `base_effect.py` compares a quantized base with one of 16 bits, for the
  pane of `base_pane.py`. `beside.py` asks for both in a thread.
- `outlook.py`, `advice.py`, `status.py`, `pictures.py`: what is said and drawn of them.
  `readout.py` is what pictures say where a person points, `comparisons.py` what the charts of
  several runs compare, `guide.py` the help.
- `table.py` is the table of runs, `rows.py` its rows, `csv_link.py` its file. `cards_table.py` is
  the setting on screen on several cards, `elsewhere.py` fills it.
- `live_sweep.py` is no part of the panel: a sweep that shows itself, `memlab.live_sweep`.

A choice or a checkbox for a setting needs nothing here: the `Control` of its technique makes it. To
add a slider, give the technique a `Control` whose `offered` is empty, then name the field in
`controls.SLIDERS` and `Controls.__init__` (its range), in `texts.lines` and `texts.wrong_line` (the
line beside it, and the value that its button sets), and in `state.DESCRIBED` and `state.describe`.
"""

from memlab._panel.app import Panel, panel

__all__ = ["Panel", "panel"]
