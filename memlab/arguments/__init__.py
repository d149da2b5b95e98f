"""Checks and conversions between what people type and what memlab uses inside.

- `checks.py` checks the arguments of public functions before anything runs.
- `units.py` parses and prints bytes and seconds. No other file converts them.
- `libraries.py` tells a person's own files from those of installed packages.
- `rank_settings.py`, `collectives.py`: how ranks share the work, and what they send one another.
- `loss_kernels.py`: the packages that may compute a loss.
- `quoting.py` writes a person's value into a message, a picture or generated Python.
- `tables.py` writes escaped texts into the small tables that a notebook shows.

Every public function calls this room first. Start reading at `checks.checked`.
"""
