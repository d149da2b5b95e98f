"""The panel of `memlab.panel`; nothing else in memlab imports anywidget and ipywidgets.

- `app.py`: `Panel`, which people hold; it does what the page asks for. `panel_state.py`:
  `PanelState`, all that the kernel and the page share.
- `asked.py`: the settings on screen and their code. `choices.py`: the workloads, devices and limits
  that can be chosen. `catalog.py`: the same as the page is told, with words and help. `state.py`:
  settings as plain values and judgements in words; `texts.py`: the lines beside the controls.
- `page.py` tells the page what is known, `panes.py` what was opened, and `outlook.py` says it in
  words. `questions.py` predicts while sliders move, and ahead while they rest; `step_files.py`
  numbers recordings.
- `runner.py` starts a run, *Fit for me* and the comparison of a quantized base; `job.py` measures,
  `runs.py` keeps the runs, `table.py` tells of them, `cards_table.py` of other cards.
- `saved_page.py`: the step where no kernel runs. `step_view.py`: `StepView`, the same page over one
  result or a file, with nothing to run. `page/` is the page, which `joined.py` makes one
  module; `page/widget.js` is its door to a kernel and `page/app.js` the page itself.
- `run_page.py`: what a script holds as a page, and in a notebook (`RunView`), with the timeline of
  `page/run.js`.

A control needs nothing here: the `Control` of its technique makes it. A slider for a number is also
named in `catalog.NUMBERS`, and what is wrong with it in `texts.wrong_line`.
"""

from memlab._panel.app import Panel, panel

__all__ = ["Panel", "panel"]
