"""What the browser is given, from `panel.css` and `access.js`; sentences that several files say.

The stylesheet takes JupyterLab's theme variables, with values for pages without them. Everything is
scoped under `.memlab-panel`, but for the rule that hides the still picture beside it. Boxes have
fixed heights, so that nothing moves that was not touched. The breakpoints ask for the width of the
panel, not of the window.

The script is for people who use a keyboard or a screen reader. ipywidgets gives the handle of a
slider no name and announces its position (6) where a person needs the value (64), which a class of
the slider lists for each position. Its toggles do not say whether they are pressed, and a key that
is pressed on one of them is also a shortcut of the notebook (`d d` deletes the cell). None of this
can be changed from Python. The script comes with the output that a saved notebook keeps; where a
page does not run it, the panel works as before.
"""

from importlib import resources

RUN_BY_CELL = "a cell is running it: interrupt the kernel to stop it"
PLAYED_BACK = "is another machine: Run shows what was measured there"
NOT_HERE = "is not in this machine: you can keep its predictions, not run it"
KEEPING = "is added to the table as soon as it is exact"
GONE = "The kernel was restarted or has died: run this cell again to get a working panel."

_HERE = resources.files(__package__)
CSS = "\n" + _HERE.joinpath("panel.css").read_text(encoding="utf-8")
SCRIPT = f"<script>{_HERE.joinpath('access.js').read_text(encoding='utf-8').strip()}</script>"
