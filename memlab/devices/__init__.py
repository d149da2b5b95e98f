"""Devices of this machine, cards that need not be in it, and the operators that they run.

- `here.py`: the CPU and the accelerator of this machine, their names, free memory and load.
- `cards.py` finds a card or a cluster; `resolve` turns what a person typed ("cpu", "rtx-4060",
  "24GiB", "8x-h100") into a `Target` to predict for. `cards.toml` holds the cards: to add one, add
  a table there.
- `clusters.py` and `clusters.toml`: several cards and the links between them.
- `operators.py`: a `Signature` holds everything that the memory and time of an operator's call
  depend on; `OperatorCost` is what such a call costs, run alone.
- `generators.py`: the random numbers of a device, and autocast: noted and put back.
"""
