"""Checks and conversions between what people type and what memlab uses inside.

- `checks.py` checks the arguments of public functions before anything runs.
- `units.py` parses and prints bytes and seconds. No other file converts them.
- `quoting.py` writes a person's value into a message, a picture or generated Python.

Every public function calls this room first. Start reading at `checks.checked`.
"""
