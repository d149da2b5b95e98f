"""Checks and conversions between what people type and what memlab uses inside.

- `checks.py` checks the arguments of public functions before anything runs. Start at `checked`.
- `units.py` parses and prints bytes and seconds, and writes a person's value into a message, a
  picture or generated Python. No other file converts units.
- `functions.py`: the names of functions, whether two are the same one, and which files are a
  person's own.
- `tables.py`: small tables, as HTML and as text.
- `collectives.py`: what ranks send one another, in bytes.
- `torch_found.py`: whether PyTorch is new enough; imported before everything else.
- `torch_private/`: every private name of PyTorch that memlab uses.
"""
